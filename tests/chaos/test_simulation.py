# SPDX-License-Identifier: Apache-2.0
"""Sidecars, torchruns and ranks under a deterministic event loop: a seed decides everything.

See ``docs/simulation.md``. One failing seed is replayed by ``scripts/simulate SEED``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.simulation.invariants import Broken
from tests.chaos.simulation.planted import PLANTS
from tests.chaos.simulation.plots import ASKED, EVICTIONS, FAILURES, PLOTS, RETURNS, UNSEEN
from tests.chaos.simulation.simulation import plot_of, simulate

ROOT = Path(__file__).parents[2]

SEEDS = 1_000
SEEDS_LONG = 10_000
SEEDS_EVICTED = 50
BATCH = 25


FOUND_IN = {
    "cut-taken-for-death": ("outages", 60),
    "done-before-all-have-saved": ("drains", 30),
    "drained-member-listed": ("drains", 60),
    "drains-not-fenced": ("evicted-drains", 20),
    "failure-is-final": ("failures", 20),
    "fillers-forgotten": ("returns", 40),
    "launchers-not-fenced": ("evicted-rounds", 30),
    "lease-loss-ignored": ("members", 30),
    "leavers-excused": ("unseen-drains", 40),
    "lost-leaver-listed": ("unseen-drains", 20),
    "lost-hosts-dropped-at-once": ("cuts-of-all", 20),
    "min-not-compared": ("drains", 40),
    "name-not-compared": ("evicted-members", 20),
    "released-before-done": ("drains", 30),
    "round-completed-twice": ("rounds", 100),
    "stale-gate": ("drains", 50),
    "vote-not-one-more": ("drains", 40),
    "watch-resumes-late": ("members", 30),
}
"""In which plot, and within how many of its seeds, each planted bug is found."""

BY_NAME = [plot.name for plot in ASKED]
"""Plots that no seed draws; each tells any seed."""


def _run(first: int, count: int, plot: str = "") -> None:
    for seed in range(first, first + count):
        outcome = simulate(seed, plot=plot)
        assert outcome.failure is None, outcome.report()


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_invariants_hold(first: int) -> None:
    """I1-I7 and I10 at each step, and everything comes right once the faults are over."""
    _run(first, BATCH)


@pytest.mark.parametrize("plot", [plot.name for plot in EVICTIONS])
@pytest.mark.parametrize("first", range(0, SEEDS_EVICTED, BATCH))
def test_i6_leases_that_are_revoked_at_bad_moments(plot: str, first: int) -> None:
    _run(first, BATCH, plot)


@pytest.mark.parametrize("plot", [RETURNS.name, FAILURES.name, UNSEEN.name])
@pytest.mark.parametrize("first", range(0, SEEDS_EVICTED, BATCH))
def test_i11_worlds_that_are_lost_at_bad_moments(plot: str, first: int) -> None:
    _run(first, BATCH, plot)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_LONG, 500))
def test_invariants_hold_for_many_more(first: int) -> None:
    _run(first, 500)


@pytest.mark.parametrize("name", sorted(FOUND_IN))
def test_planted_bugs_are_found(name: str) -> None:
    assert FOUND_IN.keys() == PLANTS.keys()
    plot, count = FOUND_IN[name]
    asked = plot if plot in BY_NAME else ""
    seeds = [seed for seed in range(SEEDS) if asked or plot_of(seed) == plot][:count]
    found = next((o for o in (simulate(seed, name, asked) for seed in seeds) if o.failure), None)
    assert found is not None
    # Anything else would be a bug that was badly planted.
    assert isinstance(found.failure, Broken), found.report()
    replay = found.report().rpartition("replay it with: ")[2]
    assert replay.startswith(f"scripts/simulate {found.seed} ")
    assert f" --planted {name}" in replay
    assert (f" --plot {plot}" in replay) is bool(asked)


def test_a_seed_is_one_story_whatever_python_hashes_by() -> None:
    seeds = [next(s for s in range(SEEDS) if plot_of(s) == plot.name) for plot in PLOTS]
    ours = [simulate(seed).timeline.digest() for seed in seeds]
    assert ours == [simulate(seed).timeline.digest() for seed in seeds]
    program = (
        "from tests.chaos.simulation.simulation import simulate\n"
        f"for seed in {seeds}: print(simulate(seed).timeline.digest())"
    )
    for hash_seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert told.stdout.split() == ours
