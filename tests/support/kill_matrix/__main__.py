# SPDX-License-Identifier: Apache-2.0
"""The kill matrix: ``scripts/test --kill-matrix [--sample N] [--jobs N] [PATTERN]``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.kill_matrix import table
from tests.support.kill_matrix.matrix import asked, layer, rows
from tests.support.kill_matrix.plants import bugs_of, own_test
from tests.support.kill_matrix.recording import closure, recorded

FOLDERS = ("unit", "contract", "chaos", "simulation")
OTHER_PLACES = "not long and not etcd and not torch and not kubelab and not container"


class Matrix:
    """A run of pytest that plants bugs instead of running all tests."""

    def __init__(self, options: argparse.Namespace, out: int) -> None:
        self._options = options
        self._out = out

    def _say(self, line: str) -> None:
        os.write(self._out, f"{line}\n".encode())

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the matrix."""
        options = self._options
        bugs = list(bugs_of(session.items))
        there = [bug.name for bug in bugs]
        bugs = [bug for bug in bugs if re.search(options.pattern, bug.name)]
        if options.sample:
            bugs = bugs[:: max(1, len(bugs) // options.sample)][: options.sample]
        self._say(f"{len(bugs)} bugs, {len(session.items)} tests")
        where = asked(session, bugs, options.jobs)
        self._say("the places are known")
        wanted = {
            Path(path)
            for one in where.values()
            for both in one
            for codes in both
            for path, _ in codes
        }
        closures: dict[Path, frozenset[Path]] = {}
        others = [
            item
            for item in session.items
            if not own_test(item)
            and layer(item.nodeid) != "simulation"
            and closure(item.path, closures) & wanted
        ]
        self._say(f"{len(others)} tests import what they change")
        known = recorded(session, others, options.jobs)
        made = []
        for row in rows(session, bugs, where, known, options.jobs, self._say):
            made.append(row)
            if options.write:
                table.write(made, there)
        if not options.write:
            self._say(table.text(made))
        return True


def main(arguments: Sequence[str]) -> int:
    """Run pytest with what replaces its loop."""
    parser = argparse.ArgumentParser(prog="scripts/test --kill-matrix", description=__doc__)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folders", nargs="*", default=FOLDERS)
    parser.add_argument("pattern", nargs="?", default="")
    options = parser.parse_args(arguments)
    plugin = Matrix(options, os.dup(2))
    folders = [f"tests/{one}" for one in options.folders]
    given = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", OTHER_PLACES, *folders]
    return pytest.main(given, plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
