# SPDX-License-Identifier: Apache-2.0
"""Access to the store: whatever is cut off, user, role and Secret agree in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.access.decision import AccessPolicy, AccessSnapshot, Action, Grant, decide
from controller.access.secret import JobName, job_of, secret_name

JOB = JobName("team", "train")
POLICY = AccessPolicy(keep=timedelta(hours=24), rotate=timedelta(days=30))
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)

Decide = Callable[[datetime, AccessSnapshot, AccessPolicy, str], Action]


class World:
    """The store and the API, and what they let happen at once."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.pods = False
        self.role = False
        self.users: dict[str, bool] = {}
        """Whether each has the role."""
        self.secret: Grant | None = None
        self.foreign = False
        """Whether somebody else has a Secret of that name."""
        self.certificate = ""
        """The user of the certificate that the Secret has."""
        self.mounted: set[str] = set()
        """That user, if the store knew it when the Secret's annotations went: pods are it."""
        self.version = count(1)
        self.fresh = (JOB.user(f"{number:x}") for number in count(1))

    def write(self, secret: Grant) -> None:
        self.secret = dataclasses.replace(secret, version=str(next(self.version)))

    def apply(self, action: Action) -> None:
        """As the executor does it: with compares, and refused without a word."""
        held = self.secret
        match action.kind:
            case "make_role":
                self.role = True
            case "make_user":
                self.users.setdefault(action.user, False)
                self.users[action.user] |= self.role
            case "delete_user":
                self.users.pop(action.user, None)
            case "delete_role":
                self.role = False
                self.users = dict.fromkeys(self.users, False)
            case "create_secret" if held is None and not self.foreign:
                assert action.secret is not None
                self.certificate = action.secret.user
                self.write(action.secret)
            case "write_secret" if held is not None:
                assert action.secret is not None
                if action.secret.version == held.version:
                    assert not (held.immutable and action.sign), "the API server refuses it"
                    if action.sign:
                        self.certificate = action.secret.user
                    self.write(action.secret)
            case "delete_secret" if held is not None:
                assert action.secret is not None
                if action.secret.version == held.version:
                    self.secret = None


class Replica:
    """One controller: it reads in three steps, then acts; anything may happen in between."""

    def __init__(self, world: World, decision: Decide) -> None:
        self.world = world
        self.decision = decision
        self.crash()

    def crash(self) -> None:
        self.step = 0

    def proceed(self, *, cut_off: bool = False) -> str:
        """One step; one that is ``cut_off`` makes a user that has no role yet, and ends there."""
        world = self.world
        match self.step:
            case 0:
                self.users = frozenset(world.users)
                self.granted = frozenset(user for user, has in world.users.items() if has)
            case 1:
                self.role = world.role
            case 2:
                self.in_use, self.secret = world.pods, world.secret
                self.foreign = world.foreign
            case _:
                held = (self.role, self.secret, self.foreign)
                seen = AccessSnapshot(self.in_use, self.users, self.granted, *held)
                action = self.decision(world.now, seen, POLICY, next(world.fresh))
                if cut_off and action.kind == "make_user":
                    world.users.setdefault(action.user, False)
                else:
                    world.apply(action)
                self.step = 0
                return action.kind
        self.step += 1
        return ""

    def take_part(self, what: str) -> None:
        """Do what an event of its name says."""
        match what:
            case "":
                self.proceed()
            case "acts":
                while not self.proceed():
                    pass
            case "settles":
                self.settle()
            case "crashes":
                self.crash()
            case "is cut off":
                while not self.proceed(cut_off=True):
                    pass

    def settle(self) -> None:
        """Go on until nothing is left to do; that it ends is part of what is tested."""
        for _ in range(400):
            if self.proceed() == "rest":
                return
        raise AssertionError("it never comes to rest")


ANY = st.lists(
    st.one_of(
        st.sampled_from(["first", "second", "first acts", "second acts"]),
        st.sampled_from(["first acts", "second acts", "first settles", "second settles"]),
        st.sampled_from(["first crashes", "second crashes", "first is cut off"]),
        st.sampled_from(["pods come", "pods go", "an hour", "two days", "a month"]),
        st.sampled_from(["asked to rotate", "Secret deleted", "store restored", "fault"]),
        st.sampled_from(["made immutable", "label gone", "Secret of others"]),
        st.sampled_from(["annotations gone", "immutable without annotations"]),
    ),
    max_size=40,
)
AT_WORK = ["pods come", "first settles"]
EVENTS = st.one_of(ANY, ANY.map(lambda events: [*AT_WORK, *events]))
"""Half of them begin with a job at work: few would come so far by chance."""


UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("user", "next", "former"), ""),
    "issued": datetime.min.replace(tzinfo=UTC),
    "unused_since": None,
    "fault": "its annotations were changed",
}
"""What a Secret says that was applied again without its annotations."""


def happen(events: list[str], decision: Decide = decide) -> World:
    world = World()
    replicas = {name: Replica(world, decision) for name in ("first", "second")}
    waits = {"an hour": 1, "two days": 48, "a month": 24 * 31}
    for event in events:
        name, _, what = event.partition(" ")
        if event in waits:
            world.now += timedelta(hours=waits[event])
        elif name in replicas:
            replicas[name].take_part(what)
        elif event.startswith("pods"):
            world.pods = event == "pods come"
        elif event in ("Secret deleted", "Secret of others"):
            world.secret, world.foreign = None, event != "Secret deleted"
        elif event == "store restored":
            world.users, world.role, world.mounted = {}, False, set()
        elif world.secret is not None:
            if "annotations" in event:
                world.mounted = {world.certificate} & world.users.keys()
            changed: dict[str, dict[str, Any]] = {
                "asked to rotate": {"rotate_asked": True},
                "fault": {"fault": "broken"},
                "made immutable": {"immutable": True},
                "label gone": {"labelled": False},
                "annotations gone": UNKNOWN,
                "immutable without annotations": {**UNKNOWN, "immutable": True},
            }
            world.write(dataclasses.replace(world.secret, **changed[event]))
    for _ in range(2):
        for replica in replicas.values():
            replica.crash()
            replica.settle()
    return world


def check(world: World) -> None:
    if world.secret is None:
        assert world.foreign or not world.pods
        assert world.users == {}
        assert world.pods or not world.role
    else:
        assert world.role
        if world.secret.user:
            assert world.users == dict.fromkeys(world.secret.users, True)
        else:
            assert world.mounted <= world.users.keys()
        assert world.secret.labelled
        assert world.secret.fault == "" or world.secret.immutable
        assert world.pods or world.secret.unused_since is not None


@settings(max_examples=150, deadline=None)
@given(EVENTS)
@example([*AT_WORK, "store restored"])
@example([*AT_WORK, "made immutable", "asked to rotate"])
def test_user_role_and_secret_agree_in_the_end_and_a_job_that_is_gone_for_good_leaves_nothing(
    events: list[str],
) -> None:
    world = happen(events)
    check(world)
    world.pods = False
    for days in (0, 60):
        world.now += timedelta(days=days)
        Replica(world, decide).settle()
    assert (world.secret, world.role, world.users) == (None, False, {})


def test_nobody_is_refused_while_a_certificate_is_replaced() -> None:
    """Both the former and the new one are good until no pod has the former any more."""
    world = World()
    world.pods = True
    replica = Replica(world, decide)
    replica.settle()
    before = world.secret
    assert before is not None
    world.now += POLICY.rotate
    seen: set[str] = set()
    while replica.proceed() != "rest":
        assert world.secret is not None
        assert world.users.get(before.user) is True
        if world.secret.user != before.user:
            seen.add(world.secret.user)
            assert world.users[world.secret.user] is True
    assert len(seen) == 1
    world.now += POLICY.overlap
    replica.settle()
    assert list(world.users) == [*seen]


Change = Callable[[AccessSnapshot, Action], Action | None]
REST = Action("rest", "planted")


def mutated(change: Change) -> Decide:
    """Decide as ``change`` does, where it says anything."""

    def other(now: datetime, seen: AccessSnapshot, policy: AccessPolicy, fresh: str) -> Action:
        action = decide(now, seen, policy, fresh)
        return change(seen, action) or action

    return other


def resting(when: Callable[[AccessSnapshot, Action], object]) -> Decide:
    """Do nothing in these cases."""
    return mutated(lambda seen, action: REST if when(seen, action) else None)


def role_first(seen: AccessSnapshot, action: Action) -> Action | None:
    if not seen.role and seen.users and seen.secret is None:
        return REST
    users_go = action.kind == "delete_user" and seen.secret is None and not seen.in_use
    return Action("delete_role", "planted") if users_go else None


def user_goes(seen: AccessSnapshot, action: Action) -> Action | None:
    unknown = seen.secret is not None and not seen.secret.user and seen.users
    return Action("delete_user", "planted", min(seen.users)) if unknown else None


PLANTED: dict[str, tuple[Decide, list[str]]] = {
    "a user whose Secret is gone stays": (
        resting(lambda seen, action: action.kind == "delete_user" and seen.secret is None),
        [*AT_WORK, "pods go", "Secret deleted"],
    ),
    "a user without the role is left so": (
        resting(lambda seen, action: action.kind == "make_user" and action.user in seen.users),
        ["pods come", "first acts", "first acts", "first is cut off"],
    ),
    "the role goes before the users, and nobody looks again": (
        mutated(role_first),
        [*AT_WORK, "pods go", "Secret deleted", "first settles"],
    ),
    "the users of a Secret that is somebody else's by now are left": (
        resting(lambda seen, action: seen.foreign),
        [*AT_WORK, "Secret of others"],
    ),
    "a Secret without its label is left so": (
        resting(lambda seen, action: seen.secret is not None and not seen.secret.labelled),
        [*AT_WORK, "label gone"],
    ),
    "the user of a certificate that cannot be replaced goes with an annotation": (
        mutated(user_goes),
        [*AT_WORK, "immutable without annotations"],
    ),
    "an unused access is kept for good": (
        resting(lambda seen, action: action.secret and action.secret.unused_since),
        [*AT_WORK, "pods go"],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    decision, events = PLANTED[name]
    check(happen(events))
    with pytest.raises(AssertionError):
        check(happen(events, decision))


@settings(max_examples=100, deadline=None)
@given(EVENTS)
def test_what_a_job_has_can_be_found_by_its_role(events: list[str]) -> None:
    """Nobody may list Secrets: one that has no role and no pod would never be found again."""
    world = World()
    replica = Replica(world, decide)
    for event in events:
        name, _, what = event.partition(" ")
        if name == "first":
            replica.take_part(what)
        elif event.startswith("pods"):
            world.pods = event == "pods come"
        elif event == "two days":
            world.now += timedelta(days=2)
        assert world.role or (world.secret is None and not world.users)


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_names_lead_back_to_their_job_and_to_no_other(one: str, other: str) -> None:
    job = JobName(one, other)
    assert job_of(job.role) == job
    assert job.owns(job.user("0a"))
    assert len(job.user("f" * 12)) <= 64
    if one != other:
        assert secret_name(one) != secret_name(other)
        assert not JobName(other, one).owns(job.user("0a"))


def test_roles_and_users_of_others_are_not_the_controllers() -> None:
    assert job_of("muster/v1/team/train") is None
    assert job_of("root") is None
    assert job_of("controller/muster/v1/team/a/b") is None
    assert not JOB.owns("root")
    assert not JOB.owns("muster/v1/team/train")
