# SPDX-License-Identifier: Apache-2.0
"""The plots: which kinds of story there are, and how often CI tells each."""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos.simulation.aliens import alien_key
from tests.chaos.simulation.departures import drain_patiently, notice, notice_and_cancel
from tests.chaos.simulation.evictions import (
    evict_and_crash,
    evict_and_end_torchrun,
    evict_and_notice,
)
from tests.chaos.simulation.launchers import close, die, end_torchrun, fail_workers
from tests.chaos.simulation.other_runs import failed_run, other_run
from tests.chaos.simulation.outages import (
    bad_weather,
    compact,
    crash,
    crash_briefly,
    cut_all,
    cut_one,
    cut_one_for_long,
    freeze,
    lag,
    stall,
    tear,
)
from tests.chaos.simulation.plot import Event, Plot, any_shape, in_twos, tight
from tests.chaos.simulation.restores import backup_of_former_lives, restore
from tests.chaos.simulation.returns import drain_behind_a_cut, lose_first_rank
from tests.chaos.simulation.strays import former_lives, late_pod

OUTAGES: Mapping[Event, int] = {
    cut_one: 3,
    cut_all: 1,
    tear: 2,
    stall: 2,
    compact: 1,
    freeze: 2,
    crash: 2,
    bad_weather: 2,
}
BRIEF: Mapping[Event, int] = {cut_all: 2, tear: 2, stall: 2, compact: 1, crash_briefly: 2}
ROUNDS: Mapping[Event, int] = {
    **OUTAGES,
    die: 2,
    end_torchrun: 3,
    fail_workers: 2,
    close: 1,
}
DRAINS: Mapping[Event, int] = {
    **OUTAGES,
    die: 1,
    end_torchrun: 1,
    notice: 8,
    notice_and_cancel: 3,
}
LAGS: Mapping[Event, int] = {lag: 6, cut_one: 1, die: 2, end_torchrun: 3, notice: 3, crash: 1}

PLOTS = (
    Plot("members", {**OUTAGES, die: 2}, (3, 4, 5), trains=False),
    Plot("outages", BRIEF, healthy=True),
    Plot("rounds", ROUNDS),
    Plot("drains", DRAINS),
)
SHARES = (5, 3, 3, 3)

EVICTIONS = (
    Plot("evicted-members", {**OUTAGES, evict_and_crash: 4}, (3, 4, 5), trains=False),
    Plot("evicted-rounds", {**OUTAGES, end_torchrun: 2, evict_and_end_torchrun: 4}),
    Plot("evicted-drains", {**OUTAGES, notice: 2, evict_and_notice: 4}),
)
"""Leases revoked by hand at bad moments."""

RETURNS = Plot("returns", {lose_first_rank: 4, crash_briefly: 1, stall: 1}, (2, 3, 4), any_shape)
"""Somebody is away for about as long as it takes to be given up, at a bad moment."""

FAILURES = Plot("failures", {close: 4, fail_workers: 2, crash: 1, cut_one: 1}, (2, 3), any_shape)
"""Torchruns whose workers fail for the last time, often with too few others to go on."""

UNSEEN = Plot("unseen-drains", {drain_behind_a_cut: 4, tear: 1, stall: 1}, (3, 4), in_twos)
"""Pods that drain and are lost, while another one of their world is cut off."""

ASKED = (
    *EVICTIONS,
    RETURNS,
    FAILURES,
    UNSEEN,
    Plot("cuts-of-all", {cut_all: 1}, (3, 4, 5), trains=False),
    Plot("spare-outages", BRIEF, (2, 3, 4), tight, healthy=True),
    Plot("spare-rounds", ROUNDS, (3, 4, 5), tight),
    Plot("spare-drains", DRAINS, (3, 4, 5), tight),
    Plot(
        "spare-evictions",
        {**OUTAGES, notice: 2, evict_and_notice: 4, evict_and_end_torchrun: 3},
        (3, 4, 5),
        tight,
    ),
    Plot(
        "spare-absences",
        {
            cut_one_for_long: 4,
            drain_patiently: 4,
            evict_and_notice: 2,
            notice: 1,
            stall: 1,
            die: 1,
            crash: 1,
        },
        (3, 4, 5),
        tight,
    ),
    Plot("ends", {**OUTAGES, crash_briefly: 2}, (2, 3, 4), any_shape, ends=True),
    Plot(
        "misfits",
        {cut_one: 1, tear: 1, crash: 1, die: 2, end_torchrun: 2, fail_workers: 1, notice: 2},
        (2, 3, 4),
        tight,
        misfits=("absent", "crashing"),
    ),
    Plot(
        "strays",
        {late_pod: 6, cut_one: 1, crash: 2, tear: 1, die: 1, freeze: 1, end_torchrun: 1},
        (2, 3),
        prologue=former_lives,
    ),
    Plot("aliens", {alien_key: 8, crash: 2, die: 1, compact: 1, notice: 2, cut_one: 1}, (2, 3)),
    Plot("restores", {restore: 6, crash: 1, die: 1, end_torchrun: 1}, (2, 3)),
    Plot(
        "earlier-lives-restored",
        {restore: 6, crash: 1, die: 1, end_torchrun: 1},
        (2, 3),
        prologue=backup_of_former_lives,
    ),
    Plot("restores-and-drains", {restore: 4, notice: 6, crash: 1, end_torchrun: 1}, (3, 4)),
    Plot(
        "other-runs",
        {other_run: 6, crash: 1, end_torchrun: 1, cut_one: 1, tear: 1},
        (2, 3, 4),
        prologue=failed_run,
    ),
    Plot("lags", LAGS, (3, 4), any_shape),
    Plot(
        "long",
        {**DRAINS, **ROUNDS, notice: 4, notice_and_cancel: 1, evict_and_notice: 1, lag: 2},
        (3, 4, 5),
        any_shape,
        (12, 25),
    ),
)
"""Told only where asked for by name."""
BY_NAME = {plot.name: plot for plot in (*PLOTS, *ASKED)}
