# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.members.registration import Held, Identity, Refuse, Register, RetryLater, plan
from rdzv.members.templates import FORMER_UIDS_MAX
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot
from tests.support.records import by_policy, kv

ME = Identity("w-0", "uid-0", "10.0.0.1", "host", "worker", 1, JobPolicy(2, 4))
JOB = Job(JobPolicy(2, 4), generation=5, mod_revision=9, template="min=2 max=4")
OTHER = Member("w-1", "uid-1", 3, "10.0.0.2", "host", "worker", 1, 2, 4)
TTL_S = 10.0


def decide(
    snapshot: Snapshot,
    identity: Identity = ME,
    held: Held | None = None,
    empty_for_s: float = 0,
    waited_s: float = 0,
    *,
    trained: bool = True,
    known: Job | None = None,
) -> Register | RetryLater | Refuse:
    return plan(
        snapshot,
        identity,
        held,
        empty_for_s=empty_for_s,
        lease_ttl_s=TTL_S,
        waited_s=waited_s,
        trained=trained,
        known=known,
    )


def registered(decision: Register | RetryLater | Refuse) -> Register:
    assert isinstance(decision, Register), decision
    return decision


def test_what_was_set_by_hand_and_is_lost_with_a_store_is_named() -> None:
    usual = replace(JOB, mod_revision=0)
    for known, lost in (
        (by_policy(usual, max_nodes=2), "max is 4 (before: 2)"),
        (replace(usual, paused=True), "it is not paused any more"),
        (usual, ""),
    ):
        reason = registered(decide(Snapshot(3), held=Held(5, 70), known=known)).reason
        named = f"; what was set by hand is lost with its data: {lost}" if lost else ""
        assert reason == f"the job was not in the store{named}"


def test_the_first_member_makes_the_job() -> None:
    decision = registered(decide(Snapshot(1)))
    assert (decision.job.policy.min_nodes, decision.job.policy.max_nodes) == (2, 4)
    assert decision.job.generation == 1
    assert decision.job_changes
    assert decision.superseded_generation is None


def test_a_joiner_takes_the_generation_it_finds() -> None:
    decision = registered(decide(Snapshot(20, JOB, {"w-1": OTHER})))
    assert decision.job.generation == 5
    assert not decision.job_changes


def test_a_new_job_uid_starts_the_next_life_and_ends_the_old_one() -> None:
    drain = Drain("uid-1", "w-1", "deleted", "preStop")
    snapshot = Snapshot(20, replace(JOB, uid="old"), {"w-1": OTHER}, drains={"uid-1": drain})
    decision = registered(decide(snapshot, by_policy(ME, job_uid="new", min_nodes=1)))
    assert decision.job.generation == 6
    assert decision.job.uid == "new"
    assert decision.job.former_uids == ("old",)
    assert decision.job.policy.min_nodes == 1
    assert decision.superseded_generation == 5


@pytest.mark.parametrize(("pod_uid", "kept"), [("uid-0", "a cordon"), ("uid-before", "")])
def test_a_cancelled_drain_is_known_for_as_long_as_its_pod_lives(pod_uid: str, kept: str) -> None:
    holder = Incarnation("w-0", 3, pod_uid, dismissed="a cordon")
    snapshot = Snapshot(20, JOB, {"w-1": OTHER}, incarnations={"w-0": holder})
    incarnation = registered(decide(snapshot, replace(ME, pod_uid="uid-0"))).incarnation
    assert incarnation.dismissed == kept
    assert Incarnation.from_kv(kv("incarnations/w-0", 7, incarnation.to_json())).dismissed == kept


LEAVER = replace(OTHER, name="w-0", pod_uid="uid-old", lease=7)
LEAVES = Drain("uid-old", "w-0", "node pressure", "sigterm", 25.0, 2.0)
TAKEN = Snapshot(
    20,
    JOB,
    {"w-0": LEAVER, "w-1": OTHER},
    incarnations={"w-0": Incarnation("w-0", 3, "uid-old")},
    drains={"uid-old": LEAVES},
)


def test_a_fresh_pod_waits_for_the_pod_of_its_name_that_drains() -> None:
    waiting = decide(TAKEN, waited_s=10)
    assert isinstance(waiting, RetryLater)
    assert waiting.retry_in_s == 15
    assert "uid-old" in waiting.reason
    by_hand = replace(TAKEN, drains={"uid-old": replace(LEAVES, seconds_left=None)})
    assert isinstance(decide(by_hand, waited_s=1e6), RetryLater)


@pytest.mark.parametrize(
    "snapshot",
    [
        replace(TAKEN, drains={}),
        replace(TAKEN, drains={"uid-old": replace(LEAVES, outcome="committed", step=9)}),
        replace(TAKEN, members={"w-1": OTHER}),
        replace(TAKEN, members={"w-0": replace(LEAVER, pod_uid="uid-older")}),
    ],
    ids=["not told to go", "may go", "without a lease", "no longer registered"],
)
def test_a_name_is_taken_over_from_a_pod_that_saves_nothing_more(snapshot: Snapshot) -> None:
    assert registered(decide(snapshot)).incarnation.pod_uid == "uid-0"


def test_a_name_is_taken_over_at_the_deadline_of_the_pod_that_has_it() -> None:
    assert registered(decide(TAKEN, waited_s=25)).incarnation.pod_uid == "uid-0"


def test_a_pod_that_was_there_before_waits_for_no_other_of_its_name() -> None:
    # The store was restored from before it took the name over.
    assert registered(decide(TAKEN, held=Held(5, 4))).incarnation.pod_uid == "uid-0"


def test_an_unknown_uid_waits_beside_members_that_nobody_has_told_to_go() -> None:
    snapshot = Snapshot(20, replace(JOB, uid="present"), {"w-1": OTHER})
    unknown = replace(ME, job_uid="unknown")
    waiting = decide(snapshot, unknown, waited_s=12)
    assert isinstance(waiting, RetryLater)
    assert waiting.retry_in_s == pytest.approx(48)
    assert "1 members of the job with UID present" in waiting.reason
    assert registered(decide(snapshot, unknown, waited_s=60)).job.uid == "unknown"
    assert registered(decide(replace(snapshot, members={}), unknown)).job.uid == "unknown"


@pytest.mark.parametrize("held", [None, Held(4, 3)])
def test_a_pod_of_a_former_life_is_refused_for_as_long_as_the_job_has_a_member(
    held: Held | None,
) -> None:
    snapshot = Snapshot(20, replace(JOB, uid="new", former_uids=("old",)), {"w-1": OTHER})
    decision = decide(snapshot, replace(ME, job_uid="old"), held, waited_s=1000)
    assert isinstance(decision, Refuse)
    assert not decision.for_good


def test_a_new_pod_takes_the_job_back_from_a_late_one_that_is_gone() -> None:
    snapshot = Snapshot(20, replace(JOB, uid="late", former_uids=("mine", "late")))
    mine = replace(ME, job_uid="mine")
    assert isinstance(decide(snapshot, mine, empty_for_s=29), Refuse)
    assert isinstance(decide(snapshot, mine, Held(4, 3), empty_for_s=1000), Refuse)
    back = registered(decide(snapshot, mine, empty_for_s=30)).job
    assert (back.uid, back.former_uids) == ("mine", ("late",))


def test_who_was_fenced_takes_the_job_back_only_where_nobody_has_trained_since() -> None:
    snapshot = Snapshot(20, replace(JOB, uid="late", former_uids=("mine",)))
    mine, held = replace(ME, job_uid="mine"), Held(4, 3)
    back = decide(snapshot, mine, held, empty_for_s=30, trained=False)
    assert registered(back).job.uid == "mine"
    assert isinstance(decide(snapshot, mine, held, empty_for_s=30), Refuse)
    assert isinstance(decide(snapshot, mine, held, empty_for_s=29, trained=False), Refuse)
    there = replace(snapshot, members={"w-1": OTHER})
    assert isinstance(decide(there, mine, held, trained=False), Refuse)
    unknown = replace(ME, job_uid="unknown")
    assert isinstance(decide(snapshot, unknown, held, empty_for_s=30, trained=False), Refuse)


def test_the_uids_of_former_lives_are_bounded() -> None:
    job = JOB
    for life in range(2 * FORMER_UIDS_MAX):
        decision = registered(decide(Snapshot(20, job), replace(ME, job_uid=f"uid-{life}")))
        job = decision.job
    newest = 2 * FORMER_UIDS_MAX - 1
    assert job.former_uids == tuple(f"uid-{n}" for n in range(newest - FORMER_UIDS_MAX, newest))


def test_the_same_job_uid_stays_in_its_life_even_when_nobody_is_left() -> None:
    snapshot = Snapshot(20, replace(JOB, uid="same", vacated=True))
    assert registered(decide(snapshot, replace(ME, job_uid="same"))).job.generation == 5


def test_who_holds_a_generation_of_a_job_that_was_created_again_is_fenced() -> None:
    snapshot = Snapshot(20, replace(JOB, uid="new"))
    decision = decide(snapshot, replace(ME, job_uid="old"), Held(5, 3))
    assert isinstance(decision, Refuse)
    again = replace(snapshot, job=replace(JOB, uid="old", generation=7, former_uids=("new",)))
    assert registered(decide(again, replace(ME, job_uid="old"), Held(5, 3))).job.generation == 7


@pytest.mark.parametrize("job_uid", ["", "new"])
def test_the_next_life_knows_no_pods_without_a_node(job_uid: str) -> None:
    former = replace(JOB, vacated=True, desired=4, unplaced=2)
    decision = registered(decide(Snapshot(20, former), replace(ME, job_uid=job_uid)))
    assert (decision.job.generation, decision.job.unplaced) == (6, 0)


def test_a_fresh_sidecar_starts_anew_at_once_where_the_last_member_left_on_purpose() -> None:
    decision = registered(decide(Snapshot(20, replace(JOB, vacated=True))))
    assert decision.job.generation == 6
    assert not decision.job.vacated


def test_a_fresh_sidecar_waits_three_lease_times_where_nobody_said_goodbye() -> None:
    waiting = decide(Snapshot(20, JOB), empty_for_s=12)
    assert isinstance(waiting, RetryLater)
    assert waiting.retry_in_s == pytest.approx(18)
    assert registered(decide(Snapshot(20, JOB), empty_for_s=30)).job.generation == 6


def test_who_held_a_generation_comes_back_to_it_whatever_it_finds() -> None:
    held = Held(5, 3)
    assert registered(decide(Snapshot(20, JOB), held=held)).job.generation == 5
    vacated = replace(JOB, vacated=True)
    decision = registered(decide(Snapshot(20, vacated), held=held))
    assert decision.job.generation == 5
    assert not decision.job.vacated
    assert registered(decide(Snapshot(1), held=held)).job.generation == 5


@pytest.mark.parametrize("uid", ["", "mine"])
def test_a_store_that_was_restored_takes_nobody_back_a_generation(uid: str) -> None:
    earlier = replace(JOB, uid=uid, vacated=True)
    me = replace(ME, job_uid=uid)
    decision = registered(decide(Snapshot(20, earlier), me, Held(7, 3)))
    assert (decision.job.generation, decision.job.uid, decision.job.vacated) == (7, uid, False)
    assert decision.job_changes
    assert decision.superseded_generation == 5
    assert "went back to generation 5" in decision.reason
    # Who has none of its own, or an earlier one, follows.
    assert registered(decide(Snapshot(20, decision.job), me, Held(5, 3))).job.generation == 7


def test_a_store_restored_from_a_former_uid_is_taken_forward_once_nobody_is_there() -> None:
    mine, held = replace(ME, job_uid="mine"), Held(7, 3)
    earlier = replace(JOB, uid="former")
    assert isinstance(decide(Snapshot(20, earlier), mine, held), Refuse)
    assert isinstance(decide(Snapshot(20, earlier, {"w-1": OTHER}), mine, held, 1000), Refuse)
    decision = registered(decide(Snapshot(20, earlier), mine, held, 3 * TTL_S))
    assert (decision.job.generation, decision.job.uid) == (7, "mine")
    assert decision.job.former_uids == ("former",)
    # A life that is as late as its own, or later, was begun by others.
    assert isinstance(decide(Snapshot(20, earlier), mine, Held(5, 3), 1000), Refuse)


def test_i6_a_new_incarnation_is_above_every_one_given_out_before() -> None:
    holder = Incarnation("w-0", 40, "uid-0", mod_revision=17)
    snapshot = Snapshot(20, JOB, {"w-1": OTHER}, {"w-0": holder})
    assert registered(decide(snapshot, held=Held(5, 50))).incarnation.number == 51
    assert registered(decide(snapshot)).incarnation.number == 41
    assert registered(decide(replace(snapshot, revision=99))).incarnation.number == 99


def test_a_pod_that_registers_again_keeps_its_place_and_a_new_pod_goes_to_the_end() -> None:
    holder = Incarnation("w-0", 40, "uid-0", since=2, mod_revision=17)
    snapshot = Snapshot(60, JOB, {"w-1": OTHER}, {"w-0": holder})
    again = registered(decide(snapshot, held=Held(5, 40)))
    assert again.member.since == again.incarnation.since == 2
    replaced = registered(decide(snapshot, replace(ME, pod_uid="new-pod")))
    assert replaced.member.since == replaced.member.incarnation == 60


def test_only_a_fresh_boot_takes_a_name_over() -> None:
    holder = Incarnation("w-0", 7, "another-pod", mod_revision=17)
    snapshot = Snapshot(20, JOB, {"w-1": OTHER}, {"w-0": holder})
    assert registered(decide(snapshot)).incarnation.pod_uid == "uid-0"
    fenced = decide(snapshot, held=Held(5, 6))
    assert isinstance(fenced, Refuse)
    assert fenced.for_good
    assert "another-pod" in fenced.reason


def test_a_restored_store_gives_a_name_back_to_no_former_pod() -> None:
    """What it holds of the name is older than what this pod has held since."""
    snapshot = Snapshot(4, JOB, incarnations={"w-0": Incarnation("w-0", 5, "former-pod", 5, 4)})
    decision = registered(decide(snapshot, held=Held(5, 6)))
    assert decision.incarnation.number == 7
    assert decision.incarnation.pod_uid == ME.pod_uid


@given(
    st.builds(
        Snapshot,
        st.integers(1, 1000),
        st.none()
        | st.builds(
            Job,
            st.just(JobPolicy(2, 4)),
            st.integers(1, 9),
            st.sampled_from(["", "a", "b"]),
            vacated=st.booleans(),
        ),
        st.sampled_from([{}, {"w-1": OTHER}]),
    ),
    st.sampled_from(["", "a", "b"]),
    st.none() | st.builds(Held, st.integers(1, 9), st.integers(1, 2000)),
    st.floats(0, 100),
)
def test_planning_is_total_and_never_goes_back(
    snapshot: Snapshot, job_uid: str, held: Held | None, empty_for_s: float
) -> None:
    decision = decide(snapshot, replace(ME, job_uid=job_uid), held, empty_for_s)
    assert decision.reason
    if isinstance(decision, Register):
        assert decision.incarnation.number == decision.member.incarnation
        if held is not None:
            assert decision.incarnation.number > held.incarnation
        restored = held is not None and snapshot.job and held.generation > snapshot.job.generation
        if held is not None and restored:
            assert decision.job.generation == held.generation
        elif snapshot.job is not None:
            assert decision.job.generation - snapshot.job.generation in (0, 1)
        if not restored and snapshot.members and snapshot.job and job_uid in ("", snapshot.job.uid):
            assert decision.superseded_generation is None


def test_records_that_cannot_be_read_are_written_anew_by_who_held_them() -> None:
    snapshot = Snapshot(20, None, unreadable_job=17, unreadable_incarnations={"w-0": 18})
    decision = registered(decide(snapshot, held=Held(5, 3)))
    assert (decision.job.generation, decision.job.mod_revision) == (5, 17)
    assert decision.job_changes
    assert (decision.incarnation.number, decision.incarnation.mod_revision) == (20, 18)


def test_a_newcomer_does_not_guess_what_an_unreadable_job_record_said() -> None:
    decision = decide(Snapshot(20, None, unreadable_job=17))
    assert isinstance(decision, RetryLater)
    assert "cannot be read" in decision.reason


SETS = replace(JOB, owner="StatefulSet.apps")
DEPLOYED = replace(ME, owner="Deployment.apps")


@pytest.mark.parametrize("uid", ["", "new"])
def test_an_object_of_another_kind_and_the_same_name_is_refused(uid: str) -> None:
    """Also a batch Job, whose UID would begin another life of the job."""
    there = Snapshot(20, SETS, {"w-1": OTHER})
    refused = decide(there, replace(DEPLOYED, job_uid=uid))
    assert isinstance(refused, Refuse)
    assert not refused.for_good
    assert "StatefulSet.apps" in refused.reason
    assert "Deployment.apps" in refused.reason
    # While no member is there it may come back, as after an outage of the store.
    away = decide(Snapshot(20, SETS), replace(DEPLOYED, job_uid=uid), empty_for_s=20.0)
    assert isinstance(away, RetryLater)
    assert away.retry_in_s == 10.0
    for gone, empty_for_s in ((SETS, 30.0), (replace(SETS, vacated=True), 0.0)):
        begun = registered(
            decide(Snapshot(20, gone), replace(DEPLOYED, job_uid=uid), empty_for_s=empty_for_s)
        )
        assert (begun.job.generation, begun.job.owner) == (6, "Deployment.apps")


@pytest.mark.parametrize(
    ("who", "owner"),
    [
        (replace(ME, owner="StatefulSet.apps"), "StatefulSet.apps"),
        (ME, "StatefulSet.apps"),
        (replace(DEPLOYED, role="launcher"), "StatefulSet.apps"),
    ],
)
def test_pods_of_one_kind_named_ones_and_launchers_join(who: Identity, owner: str) -> None:
    decision = registered(decide(Snapshot(20, SETS, {"w-1": OTHER}), who))
    assert (decision.job.generation, decision.job.owner) == (5, owner)


def test_a_job_is_of_the_kind_of_its_first_worker_that_knows_it() -> None:
    assert registered(decide(Snapshot(1), DEPLOYED)).job.owner == "Deployment.apps"
    launcher = replace(DEPLOYED, role="launcher", owner="Job.batch")
    assert registered(decide(Snapshot(1), launcher)).job.owner == ""
    joined = registered(decide(Snapshot(20, JOB, {"w-1": OTHER}), DEPLOYED))
    assert joined.job_changes
    assert (joined.job.owner, joined.change) == ("Deployment.apps", "")


def test_who_was_registered_before_is_not_refused() -> None:
    there = Snapshot(20, SETS, {"w-1": OTHER})
    assert isinstance(decide(there, DEPLOYED, Held(5, 3)), Register)
