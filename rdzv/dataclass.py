# SPDX-License-Identifier: Apache-2.0
"""``dataclass`` of the standard library, made in a third of the time where it is frozen.

A sidecar has over a hundred of them, and starts beside the training. The standard library compiles
six functions for each. Here the constructor alone is compiled at once, comparison and hash when
they are first used, and all others are the same functions for all classes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        kw_only: bool = False,
        eq: bool = True,
        repr: bool = True,
        **options: bool,
    ) -> Any:
        """Make a dataclass; the arguments are those of the standard library's."""

        def made(cls: type) -> type:
            if frozen and eq and not options:
                return _frozen(cls, slots=slots, kw_only=kw_only, shown=repr)
            options.update(frozen=frozen, slots=slots, kw_only=kw_only, eq=eq, repr=repr)
            return dataclasses.dataclass(cls, **options)

        return made if cls is None else made(cls)


def _frozen(cls: type, *, slots: bool, kw_only: bool, shown: bool) -> type:
    own = dict(vars(cls))
    made: type = dataclasses.dataclass(
        cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only
    )
    if len(fields(made)) < len(made.__dataclass_fields__):  # type: ignore[attr-defined]
        raise TypeError(
            f"{cls.__qualname__}: InitVar and ClassVar are left to the standard library"
        )
    methods: dict[str, Callable[..., Any]] = {
        "__setattr__": _set,
        "__delattr__": _delete,
        "__eq__": _equal,
        "__hash__": _hash,
    }
    if slots:
        methods |= {"__getstate__": _state, "__setstate__": _restore}
    if shown:
        methods["__repr__"] = _shown
    for name, method in methods.items():
        if own.get(name) is None:
            setattr(made, name, method)
    if "__init__" not in own:
        made.__init__ = _constructor(made)  # type: ignore[misc]
    return made


def _constructor(cls: type) -> Callable[..., None]:
    around: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    parameters: dict[bool, list[str]] = {False: [], True: []}
    body: list[str] = []
    for one in fields(cls):
        name = value = one.name
        default = ""
        if one.default is not MISSING:
            around[f"_default_{name}"] = one.default
            default = f"=_default_{name}"
        elif one.default_factory is not MISSING:
            around[f"_make_{name}"] = one.default_factory
            default, value = "=_missing", f"_make_{name}() if {name} is _missing else {name}"
        if one.init:
            parameters[bool(one.kw_only)].append(name + default)
        elif default:
            value = value.partition(" ")[0] if "(" in value else default[1:]
        else:
            continue
        body.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    named = ["*", *parameters[True]] if parameters[True] else []
    head = ", ".join(["self", *parameters[False], *named])
    made = _compiled("__init__", head, body or ["pass"], cls, around)
    made.__annotations__ = {one.name: one.type for one in fields(cls) if one.init}
    return made


def _compiled(
    name: str, head: str, body: list[str], cls: type, around: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that sees the names of ``around``, and those of the module of ``cls``."""
    lines = (f"def make({', '.join(around)}):", f" def {name}({head}):")
    text = "\n".join((*lines, *(f"  {line}" for line in body), f" return {name}"))
    scope: dict[str, Any] = {}
    exec(text, vars(sys.modules[cls.__module__]), scope)
    made: Callable[..., Any] = scope["make"](**around)
    made.__qualname__ = f"{cls.__qualname__}.{name}"
    return made


def _together(names: Iterable[str], of: str) -> str:
    return "(" + "".join(f"{of}.{name}, " for name in names) + ")"


def _own(self: Any, name: str, method: object) -> Any:
    """Return the class that has ``method``, to put what was compiled in its place."""
    return next(one for one in type(self).__mro__ if vars(one).get(name) is method)


def _equal(self: Any, other: object) -> Any:
    cls = _own(self, "__eq__", _equal)
    names = [one.name for one in fields(cls) if one.compare]
    body = [
        "if other.__class__ is not self.__class__: return NotImplemented",
        f"return {_together(names, 'self')} == {_together(names, 'other')}",
    ]
    cls.__eq__ = _compiled("__eq__", "self, other", body, cls, {})
    return cls.__eq__(self, other)


def _hash(self: Any) -> int:
    cls = _own(self, "__hash__", _hash)
    names = [one.name for one in fields(cls) if (one.compare if one.hash is None else one.hash)]
    body = [f"return hash({_together(names, 'self')})"]
    cls.__hash__ = _compiled("__hash__", "self", body, cls, {})
    return int(cls.__hash__(self))


def _shown(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _set(self: Any, name: str, value: object) -> None:
    _refuse(self, name, "assign to")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    _refuse(self, name, "delete")
    object.__delattr__(self, name)


def _refuse(self: Any, name: str, what: str) -> None:
    """Raise as the standard library does: what inherits may have attributes of its own."""
    if "__dataclass_fields__" in vars(type(self)) or name in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot {what} field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, one.name) for one in fields(self)]


def _restore(self: Any, state: list[object]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
