# SPDX-License-Identifier: Apache-2.0
"""The planted bugs of all tests, each with the test that looks for it.

A bug is a case of a parametrised test, its *own* test, which passes where it finds the bug. How the
bug is planted into this process, for good, is known by that test's function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.kill_matrix.places import product_modules
from tests.support.sources import imports

Install = Callable[[], None]
"""Plants a bug into this process. None takes it out again: the process is a forked one."""


@dataclass(frozen=True)
class Bug:
    """``own``: the id of the test that looks for it. ``install`` is None where the bug is a switch
    of a model, which the product does not have."""

    name: str
    own: str
    install: Install | None


def _enter(patches: Sequence[AbstractContextManager[Any]]) -> None:
    for one in patches:
        one.__enter__()


def _instead(original: Any, other: Callable[..., Any]) -> None:
    """Put ``other`` in the place of a function wherever the product names it.

    ``other`` may call the original by its name, and reaches it.
    """
    inside = False

    def planted(*args: Any, **known: Any) -> Any:
        nonlocal inside
        if inside:
            return original(*args, **known)
        inside = True
        try:
            return other(*args, **known)
        finally:
            inside = False

    for module in product_modules():
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, planted)


def _functions(given: Mapping[str, Any], model: Any) -> Install | None:
    """Plant what a model has instead of the product's functions; switches have no place there."""
    changes = [(getattr(model, name), value) for name, value in given.items()]
    changes = [(original, value) for original, value in changes if callable(value)]

    def install() -> None:
        for original, other in changes:
            _instead(original, other)

    return install if changes else None


def _set(module: Any, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        setattr(module, name, value)


Case = Mapping[str, Any]
"""The parameters of one own test."""


def _of_simulation(tests: Any, case: Case) -> Install:
    return lambda: _enter(tests.PLANTS[case["name"]].patches())


def _of_worlds(tests: Any, case: Case) -> Install:
    return lambda: _enter(tests.MUTATIONS[case["name"]].patches())


def _of_drains(tests: Any, case: Case) -> Install | None:
    return _functions(case["planted"].mutation, tests.World)


def _module(tests: Any, *given: str) -> Any:
    """The module that a file of tests imports and that has all of these names."""
    known = (sys.modules.get(name) for name in imports(Path(tests.__file__)))
    return next(one for one in known if one is not None and set(given) <= vars(one).keys())


def _of_notices(tests: Any, case: Case) -> Install:
    name, without = tests.MUTATIONS[case["rule"]]
    return lambda: setattr(_module(tests, "_is_ours", name), name, without)


def _of_attribute(tests: Any, case: Case) -> Install:
    return lambda: pytest.MonkeyPatch().setattr(*tests.PLANTED[case["rule"]])


def _of_shards(tests: Any, case: Case) -> Install:
    module = _module(tests, *(name for name, _ in tests.PLANTED.values()))
    return lambda: _set(module, dict([tests.PLANTED[case["bug"]]]))


def _of_kernel(tests: Any, case: Case) -> Install:
    return lambda: _enter([tests.BUGS[case["bug"]][1]()])


def _of_stages(tests: Any, case: Case) -> Install:
    module = _module(tests, *(name for _, wrong in tests.PLANTED.values() for name in wrong))
    return lambda: _set(module, tests.PLANTED[case["name"]][1])


def _of_ranks(tests: Any, case: Case) -> Install:
    plants = sys.modules["tests.support.training.planted_worlds"].PLANTS
    install: Install = plants[case["planted"]]
    return install


def _of_histories(tests: Any, case: Case) -> Install:
    return lambda: case["plant"](pytest.MonkeyPatch())


OWN: dict[str, Callable[[Any, Case], Install | None]] = {
    "tests/simulation/test_simulation.py::test_planted_bugs_are_found": _of_simulation,
    "tests/chaos/test_drain_mutations.py::"
    "test_i2_i3_i7_i10_a_rule_that_is_left_out_is_missed": _of_drains,
    "tests/unit/test_world_conduct.py::test_planted_mistakes_are_found": _of_worlds,
    "tests/chaos/test_linearizability.py::test_a_planted_bug_is_found": _of_histories,
    "tests/unit/test_notices.py::test_a_rule_that_is_taken_away_is_missed": _of_notices,
    "tests/unit/test_standstill.py::test_a_planted_bug_is_found": _of_attribute,
    "tests/contract/test_tunnel_rules.py::test_i8_a_planted_bug_is_found": _of_attribute,
    "tests/unit/test_shards.py::test_a_planted_bug_is_found": _of_shards,
    "tests/unit/test_reconcile.py::test_a_kernel_with_a_bug_breaks_a_promise": _of_kernel,
    "tests/contract/test_passing_over.py::test_a_wrong_rule_is_found": _of_stages,
    "tests/contract/test_worlds_in_place.py::test_a_planted_defect_is_found": _of_ranks,
}
"""Own tests, and what plants the bug of a case of each."""


def is_own(test: str) -> bool:
    """Whether a test looks for a bug that it plants itself."""
    return test.partition("[")[0] in OWN


def bugs_of(items: Sequence[pytest.Item]) -> Iterator[Bug]:
    """All bugs whose own tests are among ``items``."""
    for item in items:
        own, _, case = item.nodeid.partition("[")
        if own in OWN:
            assert isinstance(item, pytest.Function)
            case = item.nodeid.partition("[")[2].removesuffix("]")
            # A plant of linearizability has an id that pytest made of the function's name.
            yield Bug(
                f"{_room(own)}: {case}", item.nodeid, OWN[own](item.module, item.callspec.params)
            )


def _room(own: str) -> str:
    path = own.partition("::")[0].removesuffix(".py")
    return path.rpartition("/test_")[2].removesuffix("_conduct").removesuffix("_mutations")
