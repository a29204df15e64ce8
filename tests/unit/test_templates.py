# SPDX-License-Identifier: Apache-2.0
"""By which of its pods' templates a job goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.members.registration import Held, Identity, Register, plan
from rdzv.members.templates import FORMER_TEMPLATES_MAX, adopted
from rdzv.records.drain import Drain
from rdzv.records.job import Job, change_between
from rdzv.records.template import JobTemplate
from rdzv.snapshot import Snapshot

OLD, NEW = JobTemplate(2, 4), JobTemplate(2, 8, unit=4, gather_s=60)


class Pods:
    """Pods of one job that register one after another, each as its sidecar would."""

    def __init__(self) -> None:
        self.seen = Snapshot(1)
        self.changes: list[str] = []

    def register(self, name: str, template: JobTemplate, *, again: bool = False) -> Job:
        values = (template.min_workers, template.max_workers, *("", -1, "0.2.0"))
        who = Identity(
            *(name, f"uid-{name}", "10.0.0.1", "host", "worker", 1, *values),
            *(template.allowed_sizes, template.unit, template.gather_s),
        )
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
        return self.seen.job.max_workers


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
    assert (job.sizes, job.gather_s) == (NEW.sizes, 60)
    assert job.template == "min=2 max=8 unit=4 gather=60s"
    assert job.former_templates == ("min=2 max=4",)
    assert pods.changes == [
        "max is 8 (before: 4), unit is 4 (before: 1), gather is 60s (before: 0s)"
    ]


def test_a_former_template_wins_once_all_that_have_the_newer_one_are_gone_or_drain() -> None:
    pods = rolled_out("c", "d")
    assert pods.register("late", OLD).max_workers == 8
    pods.leave("c")
    assert pods.register("e", OLD).max_workers == 8
    pods.drain("d")
    assert pods.register("b", OLD, again=True).max_workers == 8  # it was there before
    assert pods.register("back", OLD).max_workers == 4
    assert pods.register("c", NEW).max_workers == 4  # late in its turn


def test_a_pod_that_comes_anew_under_its_name_does_not_keep_itself_from_winning() -> None:
    pods = Pods()
    pods.register("w-0", OLD)
    pods.register("w-0", NEW)
    assert pods.register("w-0", OLD).max_workers == 4


def test_what_was_set_by_hand_stays_until_another_template_comes() -> None:
    pods = rolled_out()
    assert pods.seen.job is not None
    by_hand = replace(pods.seen.job, max_workers=3, desired=3)
    pods.seen = replace(pods.seen, job=by_hand)
    assert pods.register("c", OLD) == by_hand
    assert pods.register("d", NEW).desired == 3
    assert pods.most == 8
    assert pods.register("e", JobTemplate(4, 8)).desired is None  # 3 is below its min


def test_what_was_set_by_hand_outlasts_pods_that_come_back_as_they_were() -> None:
    for template, most in ((OLD, 3), (NEW, 8)):
        pods = rolled_out()
        assert pods.seen.job is not None
        by_hand = replace(pods.seen.job, max_workers=3, desired=3, gather_s=9, paused=True)
        away = replace(by_hand, vacated=True, former_templates=("min=1 max=1",))
        pods.seen = replace(pods.seen, job=away, members={})
        job = pods.register("c", template)
        assert (job.generation, job.max_workers, job.desired, job.paused) == (2, most, 3, True)
        assert job.former_templates == ()
        if template == OLD:
            assert replace(job, generation=1) == by_hand


def test_a_record_that_an_older_sidecar_has_written_goes_by_its_bounds() -> None:
    pods = rolled_out("c")
    assert pods.seen.job is not None
    bare = replace(Job(2, 4), gather_s=0)
    pods.seen = replace(pods.seen, job=bare)
    assert pods.register("d", OLD) == bare
    assert pods.register("e", NEW).max_workers == 8


def test_the_former_templates_are_bounded() -> None:
    job = Job(1, 1)
    for most in range(2, 2 * FORMER_TEMPLATES_MAX):
        job = adopted(job, JobTemplate(1, most), former_wins=False)
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
        (JobTemplate(2, 4), "min=2 max=4"),
        (JobTemplate(2, 8, (2, 4, 8)), "min=2 max=8 sizes=2,4,8"),
        (JobTemplate(2, 8, unit=4, gather_s=0.5), "min=2 max=8 unit=4 gather=0.5s"),
    ],
)
def test_a_template_is_spelled_in_one_way(template: JobTemplate, text: str) -> None:
    assert str(template) == text


def test_every_value_that_changes_is_said() -> None:
    after = Job(2, 8, desired=5, allowed_sizes=(2, 8), gather_s=30)
    assert change_between(Job(1, 8), after) == (
        "min is 2 (before: 1), desired is 5 (before: none), sizes are 2,8 (before: any),"
        " gather is 30s (before: 0s)"
    )
    assert change_between(after, after) == ""
