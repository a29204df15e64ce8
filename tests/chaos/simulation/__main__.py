# SPDX-License-Identifier: Apache-2.0
"""Replays one seed: ``scripts/simulate SEED [--planted NAME] [--plot NAME]``."""

from __future__ import annotations

import argparse
import sys

from tests.chaos.simulation.planted import PLANTS
from tests.chaos.simulation.plots import BY_NAME
from tests.chaos.simulation.simulation import simulate


def main() -> int:
    """Exit status 0 where everything held, 1 where something was broken."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--planted", choices=sorted(PLANTS), default="", metavar="NAME")
    parser.add_argument("--plot", choices=sorted(BY_NAME), default="", metavar="NAME")
    asked = parser.parse_args()
    outcome = simulate(asked.seed, asked.planted, asked.plot)
    sys.stdout.write(outcome.report() + "\n")
    return 0 if outcome.failure is None else 1


sys.exit(main())
