# SPDX-License-Identifier: Apache-2.0
"""Muster's ``dataclass`` beside that of the standard library: the same, but for the time."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import typing
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any

import pytest

from rdzv.dataclass import dataclass


def classes(make: Any) -> dict[str, Any]:
    """The same classes by one of the two."""

    @make(frozen=True, slots=True)
    class Point:
        x: int
        y: int = 2
        marks: list[str] = field(default_factory=list, repr=False)

    @make(frozen=True, slots=True, kw_only=True)
    class Named(Point):
        name: str
        secret: str = field(default="", repr=False, compare=False)

        def __post_init__(self) -> None:
            if not self.name:
                raise ValueError("no name")

    @make(frozen=True, slots=True)
    class Derived:
        x: int
        twice: int = field(init=False)
        seen: list[int] = field(init=False, default_factory=list)
        kind: str = field(init=False, default="derived")
        shown: int = 3

        def __post_init__(self) -> None:
            object.__setattr__(self, "twice", 2 * self.x)

    @make(frozen=True)
    class Open:
        x: int

        def __repr__(self) -> str:
            return "open"

        def __eq__(self, other: object) -> bool:
            return True

    class Heir(Open):
        pass

    @make(frozen=True, slots=True)
    class Empty:
        pass

    @make(slots=True)
    class Mutable:
        x: int = 1

    @make
    class Bare:
        x: int = 1

    found = (Point, Named, Derived, Open, Heir, Empty, Mutable, Bare)
    return {one.__name__: one for one in found}


OURS, THEIRS = classes(dataclass), classes(dataclasses.dataclass)


def marked(heir: Any) -> Any:
    """One with an attribute that is no field."""
    heir.mark = 1
    return heir


def outcome(act: Callable[[dict[str, Any]], object], of: dict[str, Any]) -> object:
    """What comes of it: a value or an error."""
    try:
        return act(of)
    except Exception as error:
        return type(error), str(error).rpartition(".")[2]


@pytest.mark.parametrize(
    "act",
    [
        lambda of: repr(of["Point"](1)).rpartition(".")[2],
        lambda of: repr(of["Named"](1, name="n", secret="s")).rpartition(".")[2],
        lambda of: repr(of["Open"](1)),
        lambda of: repr(of["Empty"]()).rpartition(".")[2],
        lambda of: of["Point"](1) == of["Point"](1, 2, []),
        lambda of: of["Point"](1) == of["Point"](2),
        lambda of: of["Point"](1) == of["Named"](1, name="n"),
        lambda of: of["Named"](1, name="n", secret="a") == of["Named"](1, name="n", secret="b"),
        lambda of: of["Empty"]() == of["Empty"](),
        lambda of: of["Point"](1) == (1, 2, []),
        lambda of: of["Heir"](1) == of["Heir"](2),
        lambda of: hash(of["Empty"]()) == hash(()),
        lambda of: hash(of["Open"](7)) == hash((7,)),
        lambda of: hash(of["Heir"](7)) == hash((7,)),
        lambda of: hash(of["Point"](7)),
        lambda of: copy.copy(marked(of["Heir"](1))).mark,
        lambda of: hash(of["Mutable"](7)),
        lambda of: of["Point"](),
        lambda of: of["Named"](1, 2, [], "n"),
        lambda of: of["Named"](1, name=""),
        lambda of: of["Point"](1).marks is of["Point"](1).marks,
        lambda of: setattr(of["Point"](1), "x", 2),
        lambda of: delattr(of["Point"](1), "x"),
        lambda of: setattr(of["Heir"](1), "x", 2),
        lambda of: setattr(of["Heir"](1), "y", 2),
        lambda of: hasattr(of["Point"](1), "__dict__"),
        lambda of: asdict(of["Named"](1, name="n")),
        lambda of: asdict(replace(of["Named"](1, name="n"), name="m", x=3)),
        lambda of: asdict(copy.copy(of["Named"](1, name="n"))),
        lambda of: asdict(copy.deepcopy(of["Point"](1, 2, ["m"]))),
        lambda of: [one.name for one in fields(of["Named"])],
        lambda of: str(inspect.signature(of["Point"])).replace("<factory>", "MISSING")[:40],
        lambda of: typing.get_type_hints(of["Point"].__init__)["marks"],
        lambda of: asdict(of["Derived"](4, 5)),
        lambda of: of["Derived"](4, 5) == of["Derived"](4, 5),
        lambda of: of["Derived"](4, kind="other"),
        lambda of: of["Derived"](4).seen is of["Derived"](4).seen,
        lambda of: of["Named"].__match_args__,
        lambda of: of["Point"].__init__.__qualname__.rpartition(".")[2],
        lambda of: (of["Mutable"](), of["Bare"]()) == (of["Mutable"](1), of["Bare"](1)),
    ],
)
def test_it_is_as_the_standard_library_s(act: Callable[[dict[str, Any]], object]) -> None:
    expected = outcome(act, THEIRS)
    # Comparison and hash are made at the first use.
    assert [outcome(act, OURS), outcome(act, OURS)] == [expected] * 2


@dataclass(frozen=True, slots=True)
class Sent:
    """One that is known by its name."""

    x: int


def test_it_goes_through_a_pipe() -> None:
    assert pickle.loads(pickle.dumps(Sent(1))) == Sent(1)
    with pytest.raises(FrozenInstanceError):
        pickle.loads(pickle.dumps(Sent(1))).x = 2


def test_each_class_compares_its_own_fields() -> None:
    @dataclass(frozen=True)
    class One:
        a: int

    @dataclass(frozen=True)
    class Two(One):
        b: int

    # The subclass first: what it compiles is its own.
    assert Two(1, 2) != Two(1, 3)
    assert One(1) == One(1)
    assert One(1) != One(2)
    assert len({Two(1, 2), Two(1, 3), Two(1, 2)}) == 2
    assert len({One(1), One(1)}) == 1
