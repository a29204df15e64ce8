# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: which planted bug is killed by which tests of which layer."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.kill_matrix import checking, table
from tests.support.kill_matrix.matrix import asked, layer, rows
from tests.support.kill_matrix.plants import OWN, bugs_of, is_own
from tests.support.kill_matrix.recording import closure, recorded

FOLDERS = tuple(f"tests/{one}" for one in ("unit", "contract", "chaos", "simulation"))
HERE = "not long and not etcd and not torch and not kubelab and not container"


class Matrix:
    """A run of pytest that plants bugs instead of running all tests. ``say`` writes a line."""

    def __init__(self, options: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self.mistakes: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the matrix, or check the table."""
        if self._options.check:
            known = table.parsed()
            bugs = list(bugs_of(session.items))
            drawn = checking.drawn(known, self._options.sample)
            self.mistakes += checking.mistakes(session, bugs, known, drawn)
            self._say("\n".join(self.mistakes) or f"checked: {', '.join(row.bug for row in drawn)}")
        else:
            self._run(session)
        return True

    def _run(self, session: pytest.Session) -> None:
        options = self._options
        bugs = list(bugs_of(session.items))
        there = [bug.name for bug in bugs]
        bugs = [bug for bug in bugs if re.search(options.pattern, bug.name)]
        if options.sample:
            bugs = bugs[:: max(1, len(bugs) // options.sample)][: options.sample]
        self._say(f"{len(bugs)} bugs; looking where each is planted")
        where = asked(bugs)
        wanted = {
            Path(path)
            for places in where.values()
            for both in places
            for codes in both
            for path, _ in codes
        }
        closures: dict[Path, frozenset[Path]] = {}
        others = [
            item
            for item in session.items
            if not is_own(item.nodeid)
            and layer(item.nodeid) != "simulation"
            and closure(item.path, closures) & wanted
        ]
        self._say(f"{len(others)} tests may meet them; recording what each calls")
        known = recorded(session, others, options.jobs, adds=not options.recorded)
        made = []
        for row in rows(session, bugs, where, known, options.jobs, options.seconds, self._say):
            made.append(row)
            if options.write:
                table.write(made, there)
        if not options.write:
            self._say(table.text(made))


def main(arguments: Sequence[str]) -> int:
    """Run pytest with what replaces its loop."""
    parser = argparse.ArgumentParser(prog="scripts/test --kill-matrix", description=__doc__)
    add = parser.add_argument
    add("--sample", type=int, default=0, help="so many bugs, from all places; all without")
    add("--jobs", type=int, default=1, help="processes at a time")
    add("--seconds", type=float, default=20.0, help="of CPU, for a bug in a layer")
    add("--recorded", action="store_true", help="only tests that a run has recorded before")
    add("--write", action="store_true", help="put the rows into tests/kill_matrix.txt")
    add("--check", action="store_true", help="only check a sample of the table")
    add("pattern", nargs="?", default="", help="bugs whose names have this regular expression")
    options = parser.parse_args(arguments)
    out = os.dup(2)

    def say(line: str) -> None:
        os.write(out, f"{line}\n".encode())

    plugin = Matrix(options, say)
    where: Sequence[str] = FOLDERS
    if options.check:
        drawn = checking.drawn(table.parsed(), options.sample)
        where = sorted({own.partition("::")[0] for own in OWN} | checking.files(drawn))
    given = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", HERE, *where]
    status = pytest.main(given, plugins=[plugin])
    return 1 if plugin.mistakes else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
