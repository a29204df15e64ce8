# SPDX-License-Identifier: Apache-2.0
"""A job's templates and sizes; members that are gone, and when one registers once more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.upkeep import orphans
from rdzv.keys import JobKeys
from rdzv.members.gone import KEPT_MIN, kept, leftovers, lost_members
from rdzv.members.registration import Held, Identity, Register, plan
from rdzv.members.templates import FORMER_TEMPLATES_MAX, adopted
from rdzv.pacing import FIRST_PAUSE_S, Pacing
from rdzv.records.drain import Drain
from rdzv.records.job import Job, change_between
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot
from tests.support.records import by_policy, kv, member

OLD, NEW = JobPolicy(2, 4), JobPolicy(2, 8, unit=4, gather_s=60)


class Pods:
    """Pods of one job that register one after another, each as its sidecar would."""

    def __init__(self) -> None:
        self.seen = Snapshot(1)
        self.changes: list[str] = []

    def register(self, name: str, template: JobPolicy, *, again: bool = False) -> Job:
        place = (name, f"uid-{name}", "10.0.0.1", "host")
        who = Identity(*place, "worker", 1, template, version="0.2.0")
        held = Held(1, 1) if again else None
        decision = plan(self.seen, who, held, empty_for_s=1000, lease_ttl_s=10)
        assert isinstance(decision, Register), decision
        members = {**self.seen.members, name: decision.member}
        self.seen = replace(self.seen, job=decision.job, members=members)
        if decision.change:
            self.changes.append(decision.change)
        return decision.job

    def drain(self, name: str) -> None:
        drain = Drain(f"uid-{name}", name, "roll-out", "preStop")
        self.seen = replace(self.seen, drains={**self.seen.drains, drain.pod_uid: drain})

    def leave(self, name: str) -> None:
        left = {one: member for one, member in self.seen.members.items() if one != name}
        self.seen = replace(self.seen, members=left)

    @property
    def most(self) -> int:
        assert self.seen.job is not None
        return self.seen.job.policy.max_nodes


def rolled_out(*names: str) -> Pods:
    """Two pods of the old template, then these of the new one."""
    pods = Pods()
    for name, template in [("a", OLD), ("b", OLD), *((name, NEW) for name in names)]:
        pods.register(name, template)
    return pods


def test_the_newest_template_wins_and_what_changed_is_said_once() -> None:
    pods = rolled_out("c", "d")
    job = pods.seen.job
    assert job is not None
    assert job.policy == NEW
    assert job.template == "min=2 max=8 unit=4 gather=60s"
    assert job.former_templates == ("min=2 max=4",)
    assert pods.changes == [
        "max is 8 (before: 4), unit is 4 (before: 1), gather is 60s (before: 0s)"
    ]


def test_a_former_template_wins_once_all_that_have_the_newer_one_are_gone_or_drain() -> None:
    pods = rolled_out("c", "d")
    assert pods.register("late", OLD).policy.max_nodes == 8
    pods.leave("c")
    assert pods.register("e", OLD).policy.max_nodes == 8
    pods.drain("d")
    assert pods.register("b", OLD, again=True).policy.max_nodes == 8  # it was there before
    assert pods.register("back", OLD).policy.max_nodes == 4
    assert pods.register("c", NEW).policy.max_nodes == 4  # late in its turn


def test_a_pod_that_comes_anew_under_its_name_does_not_keep_itself_from_winning() -> None:
    pods = Pods()
    pods.register("w-0", OLD)
    pods.register("w-0", NEW)
    assert pods.register("w-0", OLD).policy.max_nodes == 4


def test_what_was_set_by_hand_stays_until_another_template_comes() -> None:
    pods = rolled_out()
    assert pods.seen.job is not None
    by_hand = by_policy(pods.seen.job, max_nodes=3, desired=3)
    pods.seen = replace(pods.seen, job=by_hand)
    assert pods.register("c", OLD) == by_hand
    assert pods.register("d", NEW).desired == 3
    assert pods.most == 8
    assert pods.register("e", JobPolicy(4, 8)).desired is None  # 3 is below its min


def test_what_was_set_by_hand_outlasts_pods_that_come_back_as_they_were() -> None:
    for template, most in ((OLD, 3), (NEW, 8)):
        pods = rolled_out()
        assert pods.seen.job is not None
        by_hand = by_policy(pods.seen.job, max_nodes=3, desired=3, gather_s=9, paused=True)
        away = replace(by_hand, vacated=True, former_templates=("min=1 max=1",))
        pods.seen = replace(pods.seen, job=away, members={})
        job = pods.register("c", template)
        assert (job.generation, job.policy.max_nodes, job.desired, job.paused) == (2, most, 3, True)
        assert job.former_templates == ()
        if template == OLD:
            assert replace(job, generation=1) == by_hand


def test_a_record_that_an_older_sidecar_has_written_goes_by_its_bounds() -> None:
    pods = rolled_out("c")
    assert pods.seen.job is not None
    bare = Job(JobPolicy(2, 4))
    pods.seen = replace(pods.seen, job=bare)
    assert pods.register("d", OLD) == bare
    assert pods.register("e", NEW).policy.max_nodes == 8


def test_the_former_templates_are_bounded() -> None:
    job = Job(JobPolicy(1, 1))
    for most in range(2, 2 * FORMER_TEMPLATES_MAX):
        job = adopted(job, JobPolicy(1, most), former_wins=False)
    assert len(job.former_templates) == FORMER_TEMPLATES_MAX
    assert job.former_templates[-1] == f"min=1 max={2 * FORMER_TEMPLATES_MAX - 2}"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["old", "late old", "old again", "new", "new again", "drain", "leave"]),
        st.integers(0, 2),
    ),
    max_size=12,
)


@given(EVENTS)
def test_no_straggler_takes_a_roll_out_back_while_one_of_its_pods_is_there(
    events: Iterable[tuple[str, int]],
) -> None:
    pods = rolled_out("new-0")
    for what, number in events:
        if what in ("drain", "leave"):
            (pods.drain if what == "drain" else pods.leave)(f"{'ab'[number % 2]}")
        elif what.startswith("new"):
            pods.register(f"new-{number}", NEW, again=what.endswith("again"))
        else:
            name = "ab"[number % 2] if what.startswith("old") else f"late-{number}"
            pods.register(name, OLD, again=what.endswith("again"))
        assert pods.most == 8
    assert len(pods.changes) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (JobPolicy(2, 4), "min=2 max=4"),
        (JobPolicy(2, 8, (2, 4, 8)), "min=2 max=8 sizes=2,4,8"),
        (JobPolicy(2, 8, unit=4, gather_s=0.5), "min=2 max=8 unit=4 gather=0.5s"),
    ],
)
def test_a_template_is_spelled_in_one_way(template: JobPolicy, text: str) -> None:
    assert template.template == text


def test_every_value_that_changes_is_said() -> None:
    after = Job(JobPolicy(2, 8, sizes=(2, 8), gather_s=30), desired=5)
    assert change_between(Job(JobPolicy(1, 8)), after) == (
        "min is 2 (before: 1), desired is 5 (before: none), sizes are 2,8 (before: any),"
        " gather is 30s (before: 0s)"
    )
    assert change_between(after, after) == ""


COUNTS = st.integers(1, 12)
SIZES = st.builds(
    JobPolicy, COUNTS, COUNTS, st.lists(COUNTS, max_size=4).map(tuple), st.integers(1, 5)
)


def permitted(sizes: JobPolicy, nodes: int) -> bool:
    """The definition, size by size."""
    chosen = nodes in sizes.sizes if sizes.sizes else nodes % sizes.unit == 0
    return chosen and sizes.min_nodes <= nodes <= sizes.max_nodes


@given(SIZES, st.integers(0, 14))
def test_the_largest_size_is_allowed_and_none_between_is(sizes: JobPolicy, nodes: int) -> None:
    expected = [size for size in range(1, nodes + 1) if permitted(sizes, size)]
    assert sizes.largest(nodes) == max(expected, default=0)


@given(SIZES)
def test_the_smallest_and_the_full_size_are_the_ends_or_a_fault_is_told(sizes: JobPolicy) -> None:
    every = [size for size in range(1, 13) if permitted(sizes, size)]
    assert bool(sizes.fault) == (not every)
    assert sizes.full == max(every, default=0)
    if every:
        assert sizes.smallest == min(every)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (JobPolicy(3, 2), "min is 3, more than max, which is 2: raise max or lower min"),
        (JobPolicy(3, 5, (2, 6)), "none of the sizes 2, 6 lies between min 3 and max 5"),
        (JobPolicy(5, 7, unit=4), "no multiple of 4 lies between min 5 and max 7"),
    ],
)
def test_sizes_that_no_world_can_have_are_told(sizes: JobPolicy, said: str) -> None:
    assert sizes.fault.startswith(said)


ttls_s = st.floats(2, 600)
counts = st.integers(0, 100_000)
seeds = st.integers(0, 2**32)


@given(ttls_s, counts, counts, seeds)
def test_no_pause_is_longer_than_a_lease_or_shorter_than_half_the_first(
    ttl_s: float, failures: int, brief: int, seed: int
) -> None:
    pause_s = Pacing(ttl_s, failures, brief).pause_s(Random(seed))
    assert FIRST_PAUSE_S / 2 <= pause_s <= ttl_s


@given(ttls_s, counts, seeds)
def test_with_each_failure_the_pause_doubles_until_it_is_a_lease_time(
    ttl_s: float, failures: int, seed: int
) -> None:
    before = Pacing(ttl_s, failures)
    before_s, after_s = (one.pause_s(Random(seed)) for one in (before, before.after_failure()))
    longest_s = Random(seed).uniform(0.5, 1.0) * ttl_s
    assert min(2 * before_s, longest_s) == after_s


@given(ttls_s, counts, st.floats(0, 1e9), seeds)
def test_failures_are_forgotten_with_the_first_success(
    ttl_s: float, failures: int, now_s: float, seed: int
) -> None:
    pacing = Pacing(ttl_s, failures).after_registering(now_s).after_loss(kept_s=ttl_s)
    assert pacing.pause_s(Random(seed)) <= FIRST_PAUSE_S
    assert pacing.complaint(now_s) is None


@given(ttls_s, st.lists(st.floats(0, 0.99), min_size=2, max_size=40), st.floats(0, 1e6), seeds)
def test_registrations_that_do_not_last_come_ever_later_and_are_told(
    ttl_s: float, kept: list[float], began_s: float, seed: int
) -> None:
    pacing, now_s = Pacing(ttl_s), began_s
    pauses_s = []
    for share in kept:
        pacing = pacing.after_registering(now_s).after_loss(share * ttl_s)
        pauses_s.append(pacing.pause_s(Random(seed)))
        now_s += pauses_s[-1]
    assert pauses_s == sorted(pauses_s)
    complaint = pacing.complaint(now_s)
    assert complaint is not None
    assert complaint.startswith(f"registered {len(kept)} times within {now_s - began_s:.1f} s: ")
    assert f"for leases of {ttl_s:g} s?" in complaint
    calm = pacing.after_registering(now_s).after_loss(ttl_s)
    assert calm.complaint(now_s) is None
    assert calm.pause_s(Random(seed)) <= FIRST_PAUSE_S


@given(ttls_s, seeds)
def test_a_single_loss_is_no_reason_to_complain_or_to_wait_for_long(
    ttl_s: float, seed: int
) -> None:
    once = Pacing(ttl_s).after_registering(5.0).after_loss(kept_s=0.0)
    assert once.complaint(6.0) is None
    assert once.pause_s(Random(seed)) <= 2 * FIRST_PAUSE_S


KEYS = JobKeys("team", "digits")
HERE = KEYS.in_generation(3)
RUN = HERE.run("digits")
NONCE = "0123456789ab"


SNAPSHOT = Snapshot(
    900, Job(JobPolicy(1, 4), generation=3), {"here": member("here"), "x.y": member("x.y")}
)


def test_names_of_gone_pods_stay_up_to_a_bound_and_the_newest_of_them() -> None:
    gone = [kv(KEYS.incarnation(f"w-{n}"), 1000 - n) for n in range(KEPT_MIN + 3)]
    found = leftovers(KEYS, SNAPSHOT, [*gone, kv(KEYS.incarnation("here"), 1)])
    assert [one.mod_revision for one in found] == [798, 799, 800]


def test_drains_of_gone_pods_stay_up_to_a_bound() -> None:
    gone = [kv(HERE.drain(f"uid-{n}"), n + 1) for n in range(KEPT_MIN + 2)]
    found = leftovers(KEYS, SNAPSHOT, [kv(HERE.drain("uid-here"), 1), *gone])
    assert [one.key for one in found] == [HERE.drain("uid-0"), HERE.drain("uid-1")]


def test_what_was_written_into_a_former_life_goes_at_once() -> None:
    former = [kv(f"{KEYS.generations}{n}/c10d/digits/kv/a") for n in (1, 2)]
    others = [kv(f"{KEYS.generations}{n}/c10d/digits/kv/a") for n in ("3", "4", "x", "")]
    rest = [KEYS.job, KEYS.last_commit, HERE.commit, HERE.member("gone"), RUN.round]
    rest += [KEYS.history_entry(1, "gone", "join"), HERE.vote(1, "gone"), RUN.node("gone")]
    assert leftovers(KEYS, SNAPSHOT, [*former, *others, *map(kv, rest)]) == former


@pytest.mark.parametrize(("most", "expected"), [(4, KEPT_MIN), (1000, 2000)])
def test_a_cut_of_a_whole_job_costs_nobody_its_place(most: int, expected: int) -> None:
    snapshot = replace(SNAPSHOT, job=Job(JobPolicy(1, most), generation=3))
    assert kept(snapshot) == expected
    gone = [kv(KEYS.incarnation(f"w-{n}"), n + 1) for n in range(expected)]
    assert leftovers(KEYS, snapshot, gone) == []


def test_without_a_job_nothing_is_known_to_be_gone() -> None:
    gone = [kv(KEYS.incarnation(f"w-{n}"), n + 1) for n in range(KEPT_MIN + 1)]
    assert leftovers(KEYS, Snapshot(1), gone) == []


@pytest.mark.parametrize(
    "connection", [f"{NONCE}.7", f"{NONCE}.7:3", "0123456789abcdef" * 2, f"{'f' * 32}:12"]
)
@pytest.mark.parametrize("name", ["w-0", "w.0", f"w.{NONCE}", "w.1.2:3"])
def test_records_of_connections_stay_while_their_member_is_here(name: str, connection: str) -> None:
    records = [kv(RUN.operation(f"{name}.{connection}"), n + 1) for n in range(KEPT_MIN + 2)]
    assert len(orphans(HERE, SNAPSHOT, records)) == 2
    with_it = replace(SNAPSHOT, members={name: member(name)})
    assert orphans(HERE, with_it, records) == []


def test_nothing_but_such_records_is_taken_for_one() -> None:
    odd = [RUN.operation("?"), RUN.operation("w-0"), RUN.value(b"ops/w-0"), RUN.node("w-0")]
    odd.append(KEYS.in_generation(2).run("digits").operation(f"w-0.{NONCE}.1"))
    assert orphans(HERE, SNAPSHOT, [kv(key) for key in odd for _ in range(KEPT_MIN + 1)]) == []


A, B = member("a"), member("b", 2)
BOTH = Snapshot(5, Job(JobPolicy(1, 4)), {"a": A, "b": B})


def test_who_is_gone_without_a_goodbye_is_lost() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset()) == (B,)


def test_who_said_goodbye_is_not() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset({"b"})) == ()


def test_a_new_generation_loses_nobody() -> None:
    assert lost_members(BOTH, Snapshot(6, Job(JobPolicy(1, 4), generation=2)), frozenset()) == ()
