# SPDX-License-Identifier: Apache-2.0
"""The plots: which kinds of story there are."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.aliens import alien_key, untrue_record
from tests.simulation.arrivals import break_disk, come_later, keep_coming
from tests.simulation.bounds import pause_for_a_while, set_gather, set_sizes
from tests.simulation.departures import (
    cordon,
    cordon_for_good,
    drain_patiently,
    end_all,
    notice,
    notice_and_cancel,
    preempt,
    take_name_over,
)
from tests.simulation.evictions import evict_and_crash, evict_and_end_torchrun, evict_and_notice
from tests.simulation.launchers import (
    all_fail_at_first,
    close,
    come_fresh,
    die,
    end_torchrun,
    end_torchrun_after_progress,
    fail_workers,
    none_starts_at_first,
    one_fails_at_first,
    stand_still,
    stick,
)
from tests.simulation.long_cuts import cut_all_for_long, cut_some_for_long, cut_world_for_long
from tests.simulation.machines import (
    cut_machine,
    lose_machine,
    lose_one_after_another,
    part_from_all,
    part_from_some,
    part_two,
)
from tests.simulation.other_runs import failed_run, other_run
from tests.simulation.outages import (
    bad_weather,
    compact,
    crash,
    crash_briefly,
    crash_unregistered,
    cut_all,
    cut_one,
    cut_one_for_long,
    freeze,
    lag,
    stall,
    tear,
    tell_early,
)
from tests.simulation.plot import (
    Event,
    Plot,
    any_shape,
    exact,
    growing,
    held_on_cut,
    impatient,
    in_twos,
    one_is_enough,
    one_or_two,
    patient,
    roomy,
    short_of_patience,
    soon_tried,
    tight,
    with_room,
)
from tests.simulation.refusals import (
    join,
    refuse_writes,
    refuse_writes_amid_save,
    refuse_writes_and_cut,
    refuse_writes_in_peace,
)
from tests.simulation.restores import (
    backup_of_former_lives,
    restore,
    restore_amid_save,
    restore_and_start_again,
)
from tests.simulation.returns import drain_behind_a_cut, lose_first_rank
from tests.simulation.roll_outs import roll_out, set_bounds, straggler
from tests.simulation.stages import start_container_again
from tests.simulation.strays import former_lives, late_pod
from tests.simulation.torchrun import LAST_STAGE
from tests.simulation.uneven_ends import (
    end_amid_the_upload,
    fail_beside_the_finished,
    replace_beside_the_finished,
)

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
LONG_CUTS: Mapping[Event, int] = {
    cut_world_for_long: 5,
    cut_all_for_long: 2,
    cut_some_for_long: 3,
    crash_briefly: 1,
    tear: 1,
    end_torchrun: 1,
    die: 1,
    notice: 1,
}
ROUNDS: Mapping[Event, int] = {**OUTAGES, die: 2, end_torchrun: 3, fail_workers: 2, close: 1}
DRAINS: Mapping[Event, int] = {**OUTAGES, die: 1, end_torchrun: 1, notice: 8, notice_and_cancel: 3}
LAGS: Mapping[Event, int] = {lag: 6, cut_one: 1, die: 2, end_torchrun: 3, notice: 3, crash: 1}

SPREAD: Mapping[Event, int] = {**OUTAGES, notice: 2, evict_and_notice: 4, evict_and_end_torchrun: 3}
ABSENCES: Mapping[Event, int] = {
    cut_one_for_long: 4,
    drain_patiently: 4,
    evict_and_notice: 2,
    notice: 1,
    stall: 1,
    die: 1,
    crash: 1,
}
MISFITS: Mapping[Event, int] = {
    cut_one: 1,
    tear: 1,
    crash: 1,
    die: 2,
    end_torchrun: 2,
    fail_workers: 1,
    notice: 2,
}
LATE: Mapping[Event, int] = {
    late_pod: 6,
    cut_one: 1,
    crash: 2,
    tear: 1,
    die: 1,
    freeze: 1,
    end_torchrun: 1,
}
RESTORES: Mapping[Event, int] = {restore: 6, crash: 3, die: 1, end_torchrun: 2}
ANYTHING: Mapping[Event, int] = {
    **DRAINS,
    **ROUNDS,
    notice: 4,
    notice_and_cancel: 1,
    evict_and_notice: 1,
    lag: 2,
}

SHARDS: Mapping[Event, int] = {**OUTAGES, die: 3, end_torchrun: 3, fail_workers: 2, notice: 4}
BOUNDS: Mapping[Event, int] = {
    set_sizes: 4,
    set_gather: 2,
    pause_for_a_while: 3,
    notice: 4,
    die: 1,
    end_torchrun: 2,
    crash: 2,
    cut_one: 2,
    tear: 1,
}

REFUSALS: Mapping[Event, int] = {
    refuse_writes: 6,
    join: 2,
    notice: 3,
    notice_and_cancel: 1,
    crash_briefly: 3,
    crash: 1,
    end_torchrun: 2,
    die: 1,
    cut_one: 1,
}

REFUSED_SAVES: Mapping[Event, int] = {refuse_writes_amid_save: 4, notice: 1, join: 1}

MACHINES: Mapping[Event, int] = {
    lose_machine: 4,
    lose_one_after_another: 2,
    cut_machine: 3,
    part_from_all: 2,
    part_from_some: 4,
    part_two: 2,
    cut_one: 1,
    cut_all: 1,
    freeze: 2,
    crash: 2,
    die: 2,
    notice: 2,
    end_torchrun: 1,
}

IN_PLACE: Mapping[Event, int] = {
    notice: 4,
    notice_and_cancel: 2,
    join: 4,
    die: 2,
    end_torchrun: 1,
    fail_workers: 3,
    crash_briefly: 2,
    crash: 1,
    cut_one: 2,
    cut_all: 1,
    tear: 1,
    stall: 1,
}

TRIOS, FEW, MANY = (3, 3, 4), (2, 3), (3, 4, 5)

PLOTS = (
    Plot("members", {**OUTAGES, die: 2}, MANY, trains=False, weight=4),
    Plot("cuts-of-all", {cut_all: 1}, MANY, trains=False),
    Plot("evicted-members", {**OUTAGES, evict_and_crash: 4}, MANY, trains=False),
    Plot("outages", BRIEF, TRIOS, healthy=True),
    Plot("rounds", ROUNDS, TRIOS, weight=3),
    Plot("drains", DRAINS, TRIOS, weight=3),
    # Sidecars watch each other, and evict before a lease ends.
    Plot("machines", MACHINES, (2, 3, 4, 5), any_shape, (3, 7), machines=True, weight=3),
    # Nobody ends the pods of a node that is cordoned: all train again.
    Plot(
        "cordons",
        {cordon: 6, cordon_for_good: 3, notice: 1, crash: 1, cut_one: 1, tear: 1, die: 1},
        TRIOS,
        weight=2,
    ),
    Plot("preemptions", {preempt: 5, end_all: 2, notice: 2, crash: 1, cut_one: 1}, TRIOS),
    # Some pods are drained before all ranks of their world have begun.
    Plot("slow-starts", {notice: 8, die: 2, end_torchrun: 2}, TRIOS, start_s=4.0, weight=2),
    # Whose torchrun stops while its ranks train is given up once all have saved.
    Plot("silent-agents", {stand_still: 4, come_later: 1}, (2, 3), growing, (2, 4)),
    # Who cannot vote keeps nobody out.
    Plot("broken-disks", {break_disk: 2, come_later: 4, crash: 1}, (2, 3), growing, (4, 7)),
    # Nodes keep coming, at shorter intervals than a world takes to its first step.
    Plot("long-starts", {keep_coming: 1}, (1, 2, 3), growing, (1, 1), start_s=60.0),
    Plot("evicted-rounds", {**OUTAGES, end_torchrun: 2, evict_and_end_torchrun: 4}, TRIOS),
    Plot(
        "names-taken-over",
        {take_name_over: 8, notice: 1, end_torchrun: 1, crash_briefly: 1, tear: 1, stall: 1},
        TRIOS,
        weight=2,
    ),
    Plot("evicted-drains", {**OUTAGES, notice: 2, evict_and_notice: 4}, TRIOS),
    # Who comes for one that went, under its name or another one, often stands in another block.
    Plot(
        "blocks",
        {evict_and_end_torchrun: 4, die: 3, end_torchrun: 3, notice: 1, crash: 1, cut_one: 1},
        (4, 5, 6),
        blocks=2,
        weight=2,
    ),
    Plot("long-cuts", LONG_CUTS, (2, 3, 4), tight, (2, 4), weight=2),
    Plot("long-cuts-held", LONG_CUTS, (2, 3, 4), held_on_cut, (2, 4), weight=2),
    Plot("long-outages", {cut_all_for_long: 3, tear: 1}, TRIOS, patient, (1, 3), healthy=True),
    Plot("spare-outages", BRIEF, (2, 3, 4), tight, healthy=True),
    Plot("spare-rounds", ROUNDS, MANY, tight, blocks=3, weight=3),
    Plot("spare-drains", DRAINS, MANY, tight, weight=4),
    Plot("spare-evictions", SPREAD, MANY, tight, weight=3),
    Plot("spare-absences", ABSENCES, MANY, tight, weight=3),
    Plot("never-started", MISFITS, (2, 3, 4), tight, misfits=("absent",), weight=3),
    Plot("crash-loops", MISFITS, (2, 3, 4), tight, misfits=("crashing", "absent"), weight=2),
    Plot(
        "failing-pods",
        {end_torchrun_after_progress: 6, tear: 1, stall: 1},
        (2, 3, 4),
        short_of_patience,
        (10, 20),
        misfits=("failing",),
    ),
    Plot(
        "fails-while-loading",
        {crash_briefly: 2, tear: 1, stall: 1},
        (2, 3, 4),
        soon_tried,
        misfits=("failing",),
        start_s=20.0,
    ),
    Plot(
        "one-fails",
        {come_fresh: 2, tear: 1, stall: 1, crash_briefly: 1},
        (2, 3, 4),
        impatient,
        prologue=one_fails_at_first,
    ),
    Plot(
        "all-fail",
        {come_fresh: 3, die: 1, tear: 1, stall: 1, crash_briefly: 1},
        (2, 3, 4),
        one_or_two,
        prologue=all_fail_at_first,
    ),
    Plot(
        "none-starts",
        {tear: 1, stall: 1, crash_briefly: 1, end_torchrun: 1, die: 1},
        (2, 3, 4),
        with_room,
        (1, 4),
        prologue=none_starts_at_first,
    ),
    Plot("scarce", {cut_one: 1, crash: 1, tear: 1}, FEW, exact, misfits=("late",)),
    Plot("returns", {lose_first_rank: 4, crash_briefly: 1, stall: 1}, (2, 3, 4), any_shape),
    Plot("unseen-drains", {drain_behind_a_cut: 4, tear: 1, stall: 1}, (3, 4), in_twos),
    Plot("failures", {close: 4, fail_workers: 2, crash: 1, cut_one: 1}, FEW, any_shape, weight=2),
    Plot(
        "stuck-workers",
        {stick: 7, end_torchrun: 3, fail_workers: 2, close: 1, die: 1, notice: 1, crash: 1},
        (2, 3, 4),
        any_shape,
    ),
    Plot("ends", {**OUTAGES, crash_briefly: 2}, (2, 3, 4), any_shape, ends=True),
    Plot(
        "stages",
        {start_container_again: 6, crash_briefly: 2, crash: 1, cut_one: 1, tear: 1, freeze: 1},
        FEW,
        roomy,
        (2, 5),
        ends=True,
        stages=LAST_STAGE,
        weight=2,
    ),
    Plot(
        "uneven-ends",
        {fail_beside_the_finished: 5, crash_briefly: 1, stall: 1, cut_one: 1},
        (2, 3, 4),
        one_is_enough,
        ends=True,
        uploads=True,
    ),
    # Whose last upload is long is ended amid it, or is lost and replaced.
    Plot(
        "last-uploads",
        {end_amid_the_upload: 1, replace_beside_the_finished: 1},
        (2, 3, 4),
        one_is_enough,
        (1, 1),
        ends=True,
    ),
    Plot(
        "roll-outs",
        {roll_out: 6, straggler: 4, crash: 2, cut_one: 2, freeze: 1, tear: 1},
        MANY,
        trains=False,
        weight=2,
    ),
    Plot(
        "roll-outs-and-rounds",
        {roll_out: 4, set_bounds: 3, straggler: 2, crash: 1, end_torchrun: 1, cut_one: 1, tear: 1},
        FEW,
    ),
    Plot(
        "bounds-by-hand",
        {set_bounds: 5, die: 3, roll_out: 1, crash: 2, cut_one: 1},
        FEW,
        trains=False,
    ),
    Plot("strays", LATE, FEW, prologue=former_lives, weight=2),
    # With every member away or told to go, a late pod looks like one of a Job created anew.
    Plot("unknown-strays", {late_pod: 4, tear: 1, end_torchrun: 2}, FEW),
    Plot(
        "other-runs",
        {other_run: 6, crash: 1, end_torchrun: 1, cut_one: 1, tear: 1},
        (2, 3, 4),
        prologue=failed_run,
        weight=3,
    ),
    Plot(
        "other-runs-and-drains",
        {other_run: 5, notice: 6, crash: 1, cut_one: 1},
        (2, 3, 4),
        prologue=failed_run,
    ),
    Plot(
        "aliens", {alien_key: 8, crash: 2, die: 1, compact: 1, notice: 2, cut_one: 1}, FEW, weight=2
    ),
    Plot("untrue-records", {untrue_record: 6, crash: 2, die: 1, notice: 2, cut_one: 1}, FEW),
    Plot("restores", RESTORES, FEW),
    Plot("restores-and-drains", {**RESTORES, restore_and_start_again: 3, notice: 6}, (3, 4)),
    # Of who was there at the time of the backup, often nobody is any more.
    Plot("former-pods-restored", {notice: 10, restore: 4}, FEW),
    Plot("earlier-lives-restored", RESTORES, FEW, prologue=backup_of_former_lives),
    Plot("unregistered", {crash_unregistered: 4, notice: 4, cut_one: 1}, MANY, any_shape),
    Plot("bounds", BOUNDS, MANY, any_shape, (4, 8), weight=2),
    Plot("sizes", {set_sizes: 4, notice: 1}, MANY, any_shape),
    Plot("misfit-bounds", BOUNDS, MANY, tight, misfits=("absent", "crashing")),
    Plot("lags", LAGS, (3, 4), any_shape, weight=2),
    Plot(
        "early-progress",
        {tell_early: 8, end_torchrun: 3, die: 2, notice: 3, crash: 1, cut_one: 1},
        (3, 4),
        any_shape,
        weight=2,
    ),
    Plot("refusals", REFUSALS, FEW, any_shape, weight=2),
    Plot("refused-saves", REFUSED_SAVES, FEW, any_shape, (2, 5), weight=2),
    Plot("refusals-in-peace", {refuse_writes_in_peace: 4, tear: 1, stall: 1}, TRIOS, healthy=True),
    Plot("refusals-and-cuts", {refuse_writes_and_cut: 4, tear: 1, stall: 1}, TRIOS),
    Plot("shards", SHARDS, (2, 3, 4), one_is_enough, (4, 8), shards=True),
    Plot("shards-restored", {**RESTORES, restore_amid_save: 10, notice: 2}, (2, 3), shards=True),
    Plot("in-place", IN_PLACE, (2, 3, 4), one_is_enough, (3, 7), in_place=True, weight=3),
    Plot(
        "in-place-ends",
        {join: 2, fail_workers: 2, tear: 1},
        FEW,
        one_is_enough,
        ends=True,
        in_place=True,
    ),
    Plot("long", ANYTHING, MANY, any_shape, (12, 25), blocks=2),
)
BY_NAME = {plot.name: plot for plot in PLOTS}
