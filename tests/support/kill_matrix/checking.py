# SPDX-License-Identifier: Apache-2.0
"""Whether the kept table is true: it has a row for each bug, and tests that it names still fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from random import Random

import pytest

from tests.support.kill_matrix.children import Ran, Tell, limited, run
from tests.support.kill_matrix.matrix import Row, layer, plant
from tests.support.kill_matrix.plants import Bug, is_own
from tests.support.kill_matrix.recording import tree_digest

LIMIT_S = 60.0


def drawn(rows: Mapping[str, Row], count: int) -> list[Row]:
    """Rows that other tests than the bug's own kill; other ones for each state of the tree."""
    known = [row for _, row in sorted(rows.items()) if _named(row)]
    return Random(tree_digest()).sample(known, min(count, len(known)))


def _named(row: Row) -> list[str]:
    """Unit and contract tests that kill the bug; its own tests every run of all tests shows."""
    return [test for name in ("unit", "contract") for test in row.killers[name] if not is_own(test)]


def files(rows: Sequence[Row]) -> set[str]:
    """The files of tests that are named in these rows."""
    return {test.partition("::")[0] for row in rows for test in _named(row)}


def mistakes(
    session: pytest.Session, bugs: Sequence[Bug], rows: Mapping[str, Row], sample: Sequence[Row]
) -> Iterator[str]:
    """What the table says and is not so."""
    there = {bug.name: bug for bug in bugs}
    yield from (f"{name}: the table does not have it" for name in there.keys() - rows.keys())
    yield from (f"{name}: there is no such bug" for name in rows.keys() - there.keys())
    yield from (
        f"{row.bug}: no test kills it" for row in rows.values() if not any(row.killers.values())
    )
    items = {item.nodeid: item for item in session.items}
    for row in sample:
        yield from (f"{row.bug}: no test {test}" for test in _named(row) if test not in items)
    jobs = [
        (row.bug, partial(_kill, there[row.bug], [items[t] for t in _named(row) if t in items]))
        for row in sample
        if row.bug in there
    ]
    killed: dict[str, set[str]] = {row.bug: set() for row in sample}
    for name, told in run(session, jobs, 2, 300.0):
        if told is not None and Ran.of(told).failed:
            killed[name].add(layer(told["test"]))
    for row in sample:
        for name in sorted({layer(test) for test in _named(row)} - killed[row.bug]):
            yield f"{row.bug}: no {name} test that the table names fails with it"


def _kill(bug: Bug, items: Sequence[pytest.Item], tell: Tell) -> None:
    plant(bug)
    done: set[str] = set()
    for item in items:
        if layer(item.nodeid) not in done:
            ran = limited(item, LIMIT_S)
            tell(asdict(ran))
            if ran.failed:
                done.add(layer(item.nodeid))
