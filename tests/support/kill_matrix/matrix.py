# SPDX-License-Identifier: Apache-2.0
"""Each planted bug against each layer of tests: which tests kill it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import pytest

from tests.support.kill_matrix.children import Ran, Tell, limited, run
from tests.support.kill_matrix.places import (
    Code,
    Names,
    Place,
    codes,
    names,
    places,
    put_back,
    spread,
)
from tests.support.kill_matrix.plants import Bug, is_own

LAYERS = ("unit", "contract", "model", "simulation")

FILES = 3
"""So many files of a layer are looked for that kill a bug."""
SEARCHED = ("unit", "contract", "model")
"""Layers whose tests are run with every bug; the simulation has its own tests of its own bugs."""
OF_A_FILE = 8
"""So many tests of one file are tried with a bug."""


def layer(test: str) -> str:
    """The layer of a test; a model is what explores many orders of events."""
    folder, _, name = test.partition("::")[0].removeprefix("tests/").partition("/")
    if folder == "chaos" or name.endswith(("_exploration.py", "_mutations.py")):
        return "model"
    return folder


def file_of(test: str) -> str:
    return test.partition("::")[0]


@dataclass
class Row:
    """The tests that kill a bug, by layer. ``tried``: how many ran, that met it."""

    bug: str
    killers: dict[str, list[str]] = field(default_factory=lambda: {one: [] for one in LAYERS})
    tried: int = 0


def _order(tests: Sequence[Ran]) -> Iterator[Ran]:
    """One test of each file, then the next ones: first what is quick and calls little else."""
    of_file: dict[str, list[Ran]] = {}
    for ran in sorted(tests, key=lambda one: one.took_s * len(one.codes)):
        of_file.setdefault(file_of(ran.test), []).append(ran)
    turn = 0
    while turn < OF_A_FILE and any(len(known) > turn for known in of_file.values()):
        yield from (known[turn] for known in of_file.values() if len(known) > turn)
        turn += 1


Asked = list[tuple[set[Code], set[Code]]]
"""Of each place of a bug, functions of which a test must call one of each set."""


def asked(bugs: Sequence[Bug]) -> dict[str, Asked]:
    """Plant each bug, to see where it is, and take it out again."""
    found: dict[str, Asked] = {}
    before = names()
    for bug in bugs:
        if bug.install is None:
            continue
        made = _planted(bug, before)
        found[bug.name] = [codes(place) for place in made]
        put_back(made)
        assert not list(places(before)), bug.name
    return found


def plant(bug: Bug) -> None:
    """Plant a bug into this process for good, in each module that has what it changes."""
    spread(_planted(bug, names()))


def _planted(bug: Bug, before: Names) -> list[Place]:
    assert bug.install is not None
    try:
        bug.install()
    except (AttributeError, ImportError) as error:
        raise pytest.UsageError(f"{bug.own} plants nothing: {error}") from error
    return list(places(before))


def _search(
    bug: Bug,
    where: Asked,
    known: Mapping[str, Ran],
    items: Mapping[str, pytest.Item],
    budget_s: float,
    tell: Tell,
) -> None:
    """Plant a bug and run the tests that meet it, until enough files of each layer have failed.

    ``budget_s``: of CPU time, after which the search in a layer ends.
    """
    plant(bug)

    def meets(ran: Ran) -> bool:
        called: set[Code] = set(ran.codes)
        return any(all(not one or one & called for one in both) for both in where)

    meeting = [ran for ran in known.values() if meets(ran)]
    for name in SEARCHED:
        found: set[str] = set()
        began_s = time.process_time()
        for ran in _order([one for one in meeting if layer(one.test) == name]):
            if time.process_time() - began_s > budget_s or len(found) >= FILES:
                break
            if file_of(ran.test) in found:
                continue
            outcome = limited(items[ran.test], 30.0 + 10 * ran.took_s)
            if outcome.failed:
                found.add(file_of(ran.test))
            tell(asdict(outcome))


def usable(ran: Ran) -> bool:
    """Whether a test can say something of a bug in its own process."""
    return not (ran.failed or ran.skipped or ran.forks or is_own(ran.test))


def rows(
    session: pytest.Session,
    bugs: Sequence[Bug],
    where: Mapping[str, Asked],
    known: Mapping[str, Ran],
    at_once: int,
    budget_s: float,
    say: Callable[[str], None],
) -> Iterator[Row]:
    """Run the matrix; give each row once it is complete."""
    items = {item.nodeid: item for item in session.items}
    tests = {name: ran for name, ran in known.items() if name in items and usable(ran)}
    made = {bug.name: Row(bug.name) for bug in bugs}
    for bug in bugs:
        made[bug.name].killers[layer(bug.own)].append(bug.own)
    jobs = [
        (bug.name, partial(_search, bug, where[bug.name], tests, items, budget_s))
        for bug in bugs
        if where.get(bug.name)
    ]
    tried = {name for name, _ in jobs}
    yield from (row for name, row in made.items() if name not in tried)
    for name, told in run(session, jobs, at_once, 400.0):
        row = made[name]
        if told is None:
            counts = " ".join(f"{one}:{len(row.killers[one])}" for one in LAYERS)
            say(f"{name}: {counts} of {row.tried} tests")
            yield row
            continue
        row.tried += 1
        ran = Ran.of(told)
        if ran.failed:
            row.killers[layer(ran.test)].append(ran.test)
