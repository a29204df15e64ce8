# SPDX-License-Identifier: Apache-2.0
"""Replays one seed, or runs many.

scripts/simulate SEED [--plot NAME] [--planted NAME]
scripts/simulate --seeds FROM-TO [--plot NAME] [--processes N] [--coverage]
"""

from __future__ import annotations

import argparse
import sys

from tests.simulation.batch import Tally, run
from tests.simulation.planted import PLANTS
from tests.simulation.plots import BY_NAME
from tests.simulation.simulation import simulate

PROGRESS_SEEDS = 1_000
"""After so many seeds a line says how far it has come."""


def main() -> int:
    """Exit status 0 where everything held, 1 where something was broken."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", type=int, nargs="?", help="replay this one, and print its timeline")
    parser.add_argument("--planted", choices=sorted(PLANTS), default="", metavar="NAME")
    parser.add_argument("--plot", choices=sorted(BY_NAME), default="", metavar="NAME")
    parser.add_argument("--seeds", type=_seeds, metavar="FROM-TO", help="run all of these")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--coverage", action="store_true", help="say what happened in how many")
    asked = parser.parse_args()
    if (asked.seed is None) == (asked.seeds is None):
        parser.error("give either one SEED, or --seeds FROM-TO")
    if asked.seeds is not None:
        if asked.planted:
            parser.error("a bug is planted in one seed at a time: give SEED instead of --seeds")
        return _run_many(asked.seeds, asked.plot, asked.processes, coverage=asked.coverage)
    outcome = simulate(asked.seed, asked.planted, asked.plot)
    sys.stdout.write(outcome.report() + "\n")
    return 0 if outcome.failure is None else 1


def _run_many(seeds: range, plot: str, processes: int, *, coverage: bool) -> int:
    tally = Tally()
    for tally in run(seeds, plot, processes):
        if tally.seeds % PROGRESS_SEEDS == 0:
            sys.stderr.write(f"{tally.seeds} of {len(seeds)} seeds\n")
    text = tally.text() + (f"\n{tally.coverage()}" if coverage else "")
    sys.stdout.write(f"{text}\n")
    return 1 if tally.failures else 0


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds, such as 0-2999")
    return range(int(first), int(last) + 1)


sys.exit(main())
