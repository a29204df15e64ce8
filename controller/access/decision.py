# SPDX-License-Identifier: Apache-2.0
"""The next step of a job's access to the store: a pure function of time, snapshot and policy.

The Secret is the single source of truth, and each write of it compares its resourceVersion. The
store's users and roles follow from it and hold no state of their own, as users have no passwords.
So any replica can repair a difference at any time, whatever was interrupted before, and two
replicas can do no harm.

The order is role, Secret, user; on removal Secret, users, role. So a Secret or a user implies a
role, by which the job is found, and a user implies that there is, or was, a Secret.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

Kind = Literal[
    "rest",
    "make_role",
    "make_user",
    "delete_user",
    "delete_role",
    "create_secret",
    "write_secret",
    "delete_secret",
]

FOREIGN = (
    "it is there and is not the controller's: rename it, or name it by the annotation"
    " muster.dev/etcd-secret"
)
OTHER_RELEASE = (
    "it belongs to release {} of this cluster, which keeps it: let one release inject the pods of a"
    " namespace (injection.namespaceSelector); if that one is gone, delete the Secret"
)
REPLACE = (
    "delete it, and the controller makes another; then replace the job's pods, on each node all of"
    " them before the first comes back there, or scale the job to 0 and back: a kubelet goes on"
    " giving the former Secret to pods of its node while one of them has it"
)


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Retention and rotation: how long certificates and the access of former jobs are kept."""

    keep: timedelta
    """The time for which a job's access is kept after its last pod. Shorter: a job that starts
    again needs a new Secret more often; longer: its user and role stay in the store for longer."""
    rotate: timedelta
    """The age at which a certificate is replaced. Shorter: a stolen one is valid for less time, but
    each replacement costs every sidecar of the job a reconnect."""
    overlap: timedelta = timedelta(minutes=15)
    """The time for which a replaced certificate stays valid. A kubelet updates a mounted Secret
    within about two minutes: with much less overlap, sidecars are refused until they have the new
    one."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The content of a job's Secret.

    ``user``: the user of its certificate. ``next``: the user of the coming certificate. ``former``:
    the user of the one before, while pods may still have it. ``fault``: the reason why its
    certificate is unusable, or empty. ``immutable``: somebody made the Secret immutable, so that
    its certificate cannot be replaced. ``labelled``: whether it has the controller's labels.
    """

    version: str
    user: str
    issued: datetime
    next: str = ""
    former: str = ""
    unused_since: datetime | None = None
    rotate_asked: bool = False
    fault: str = ""
    immutable: bool = False
    labelled: bool = True

    @property
    def users(self) -> frozenset[str]:
        """The users that the store must have for this Secret."""
        return frozenset(filter(None, (self.user, self.next, self.former)))


@dataclass(frozen=True, slots=True)
class AccessSnapshot:
    """The state of one job: users first, then the role, then the Secret, read in this order.

    ``granted``: those of ``users`` that have the role. ``foreign``: there is a Secret of that name
    that is not the controller's. ``release``: the other release of the chart that it belongs to.
    """

    in_use: bool
    users: frozenset[str]
    granted: frozenset[str]
    role: bool
    secret: Grant | None
    foreign: bool = False
    release: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """One step, with its reason in one sentence.

    ``until``: the time of the next check, unless something changes before; None if there is none.
    ``secret``: the content to write to the Secret. ``sign``: whether to issue a new certificate.
    ``blocked``: no progress until a user has done with the Secret what the reason says.
    """

    kind: Kind
    reason: str
    user: str = ""
    secret: Grant | None = None
    sign: bool = False
    until: datetime | None = None
    blocked: bool = False


def decide(now: datetime, seen: AccessSnapshot, policy: AccessPolicy, fresh: str) -> Action:
    """Decide the next step for one job; ``fresh`` is a user name that was never used before."""
    if seen.release:
        # Also its users: both releases may have one store.
        return Action("rest", OTHER_RELEASE.format(seen.release), blocked=True)
    if seen.secret is None:
        return _without_secret(now, seen, fresh)
    return (
        _presence(now, seen.in_use, seen.secret, policy)
        or _soundness(now, seen.secret, fresh)
        or _store(seen, seen.secret)
        or _immutable(seen.secret, seen.secret.fault)
        or _rotation(now, seen.secret, policy, fresh)
    )


def _without_secret(now: datetime, seen: AccessSnapshot, fresh: str) -> Action:
    if seen.users:
        # Its Secret existed before the user and is gone: nothing needs this user any more.
        return Action("delete_user", "no Secret has a certificate of this user", min(seen.users))
    if seen.foreign and seen.in_use:
        return Action("rest", FOREIGN, blocked=True)
    if seen.in_use:
        if not seen.role:
            return Action("make_role", "the job has a pod")
        made = Grant("", fresh, now)
        return Action("create_secret", "the job has a pod", secret=made, sign=True)
    if seen.role:
        return Action("delete_role", "the job is gone")
    return Action("rest", "the job is gone, and so is all that it had")


def _presence(now: datetime, in_use: bool, secret: Grant, policy: AccessPolicy) -> Action | None:
    if in_use and secret.unused_since is not None:
        return _written("the job has pods again", replace(secret, unused_since=None))
    if not in_use and secret.unused_since is None:
        return _written("the job has no pod any more", replace(secret, unused_since=now))
    if secret.unused_since is not None and now >= secret.unused_since + policy.keep:
        return Action("delete_secret", "the job has been gone for a time", secret=secret)
    return None


def _soundness(now: datetime, secret: Grant, fresh: str) -> Action | None:
    if not secret.labelled:
        return _written("its label was taken away", replace(secret, labelled=True))
    if not secret.fault or secret.immutable:
        return None
    mended = replace(secret, user=secret.user or fresh, issued=now, fault="")
    return _written(secret.fault, mended, sign=True)


def _immutable(secret: Grant, why: str) -> Action | None:
    """Return a blocked step if there is a reason to replace an immutable Secret's certificate."""
    if not secret.immutable or not why:
        return None
    reason = f"it is immutable, and {why}: {REPLACE}"
    return Action("rest", reason, blocked=True)


def _store(seen: AccessSnapshot, secret: Grant) -> Action | None:
    if not seen.role:
        return Action("make_role", "the store has no role for the job's Secret")
    for user in sorted(secret.users - seen.granted):
        return Action("make_user", "the store does not know the user of the Secret", user)
    if secret.immutable and not secret.user:
        return None  # its certificate stays, and may be that of any of these users
    for user in sorted(seen.users - secret.users):
        return Action("delete_user", "no certificate of this user is in use", user)
    return None


def _rotation(now: datetime, secret: Grant, policy: AccessPolicy, fresh: str) -> Action:
    if secret.next and not secret.immutable:
        turned = replace(
            secret, user=secret.next, former=secret.user, next="", issued=now, fault=""
        )
        return _written("the store knows the next certificate's user", turned, sign=True)
    asked = secret.rotate_asked or bool(secret.next)
    overlap_ends, ends = secret.issued + policy.overlap, secret.issued + policy.rotate
    if secret.former:
        if now < overlap_ends:
            return Action("rest", "pods may still have the former certificate", until=overlap_ends)
        return _written("no pod has the former certificate any more", replace(secret, former=""))
    if asked or now >= ends:
        reason = "a new certificate was asked for" if asked else "its certificate is old"
        if (blocked := _immutable(secret, reason)) is not None:
            return blocked
        return _written(reason, replace(secret, next=fresh, rotate_asked=False))
    if secret.unused_since is not None:
        return Action(
            "rest", "the job may come back", until=min(ends, secret.unused_since + policy.keep)
        )
    return Action("rest", "user, role and Secret agree", until=ends)


def _written(reason: str, secret: Grant, *, sign: bool = False) -> Action:
    return Action("write_secret", reason, secret=secret, sign=sign)
