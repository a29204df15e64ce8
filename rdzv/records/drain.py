# SPDX-License-Identifier: Apache-2.0
"""The records of drains: each drain, the commit-step agreement, the votes and the last commit.

One commit record serves all drains of a generation, and all worlds that form again without having
lost a node: for newcomers, for smaller sizes, for a pause. Its epoch grows with each hold, so that
nothing of an earlier attempt counts for a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from rdzv.dataclass import dataclass
from rdzv.records.codec import (
    Count,
    Cursor,
    Name,
    OwnName,
    Samples,
    Seconds,
    Tag,
    UnixTime,
    decode_record,
    encode,
    take,
)
from rdzv.store import KeyValue

Outcome = Literal["", "committed", "uncommitted", "expired"]
"""The outcome of a drain: after all had saved, without that, or at its deadline; empty while it
goes on."""

ENDING_SOURCES = frozenset({"prestop", "sigterm", "hold"})
"""Sources of notices that come from the end of a pod itself."""

CONTROLLER = "controller"
"""Source of notices that the controller gives, and withdraws once their cause is over."""

SIGNS = ENDING_SOURCES | {CONTROLLER}
"""Sources of Kubernetes, which also shows whether the pod ends; any other is an order, which stays
until it is cancelled."""

NO_CURSOR = "not kept: the script gives no data cursor (it may keep its own place)"
NO_VERDICT = "not kept: an older version saved it, which does not say"


def verdict(samples: str, cursor: str) -> str:
    """Return whether a commit keeps the samples, and why not: it has a verdict in any case."""
    return samples or (NO_VERDICT if cursor else NO_CURSOR)


@dataclass(frozen=True, slots=True)
class Drain:
    """A notice that a pod will go away; a member that drains is not listed.

    ``source`` is where the notice came from, ``requested_by`` the requester, if known.
    ``seconds_left`` is the time to the pod's deadline when the record was written, None without
    one; SIGTERM is passed on ``reserve_s`` before it at the latest. ``ending``: the pod is being
    terminated by now, whoever asked for the drain first. ``step`` is the commit step of the outcome
    ``committed``; None without one. ``saver``, of the drain of a central launcher, or of the last
    of its hosts: the member whose rank saves before; it sets ``step`` once that is done.
    ``preempted``: the pod makes room for another one, so that no replacement can come before it has
    gone. ``at_unix_s``: the time by the writer's wall clock to which ``seconds_left`` belongs, for
    people only, 0.0 if unknown. ``cause`` of the outcome ``expired``: what was too slow, if that is
    known.
    """

    pod_uid: OwnName
    member: Name
    reason: str
    source: str
    seconds_left: Seconds | None = None
    reserve_s: Seconds = 0.0
    requested_by: str = ""
    ending: bool = False
    outcome: Outcome = ""
    step: int | None = None
    saver: str = ""
    preempted: bool = False
    at_unix_s: UnixTime = 0.0
    cause: str = ""
    created_revision: int = 0
    mod_revision: int = 0

    @property
    def ends(self) -> bool:
        """Whether the pod is being ended, which a cancellation of the drain would not stop."""
        return self.ending or self.source in ENDING_SOURCES

    def left_s(self, now_unix_s: float) -> float | None:
        """Return the seconds until SIGTERM at the latest, by wall clocks; None if unknown."""
        if self.seconds_left is None or not self.at_unix_s:
            return None
        return max(0.0, self.at_unix_s + self.seconds_left - self.reserve_s - now_unix_s)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        sparse = ("saver", "preempted", "at_unix_s", "cause")
        return encode(replace(self, at_unix_s=round(self.at_unix_s, 3)), sparse=sparse)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)


Phase = Literal["idle", "hold", "commit", "done", "void"]
"""The phase of a commit. ``hold``: every rank waits at its next boundary while the sidecars vote.
``commit``: each saves at its first boundary from ``step`` on. ``done``: all have. ``void``: this
attempt has failed."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The progress of one round's ranks in agreeing on a step and saving it.

    ``step`` is the step agreed on, and from ``done`` on the step saved. ``leaving``, ``saved`` and
    ``granted`` are pod UIDs: of pods that drain, of those for which a commit of this round is
    stored, of those that may go. ``joins``: it also serves a world that is to form again for
    another cause than a drain (a ``ReformCause``: newcomers join, it shrinks, the job is paused);
    ``admitted``: it may. Both are named for the first of these causes, and stay so for the sidecars
    that read them. ``refused``: a rank of this round takes no part, so that what the attempt was
    for happens without a save. ``failures`` counts failed attempts in a row, ``missed`` the votes
    in a row that were not complete in time; ``mute`` are the members that did not vote in the last
    attempt, if it failed by that. ``took_s`` is how long the last successful one took.
    """

    epoch: Count = 0
    run: str = ""
    round: Count = 0
    phase: Phase = "idle"
    step: int | None = None
    leaving: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    joins: bool = False
    admitted: bool = False
    refused: bool = False
    failures: Count = 0
    took_s: Seconds = 0.0
    reason: str = ""
    missed: Count = 0
    mute: tuple[str, ...] = ()
    mod_revision: int = 0

    def is_of(self, run: str, number: int) -> bool:
        """Return whether it is about round ``number`` of ``run``."""
        return (self.run, self.round) == (run, number)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, sparse=("missed", "mute"), took_s=round(self.took_s, 3))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, _OF_ALL_VERSIONS)


_OF_ALL_VERSIONS = (
    *("epoch", "run", "round", "phase", "leaving", "saved", "granted", "joins", "admitted"),
    *("refused", "failures", "took_s", "reason"),
)
"""The fields that every version writes of a commit."""


def _take_vote(key: str, fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) == "no" else take(key, fields, name, int)


@dataclass(frozen=True, slots=True)
class Vote:
    """The record of one member in one epoch: its vote, then the outcome of the save in its pod.

    ``vote`` is the first step that none of its ranks can have passed; None is a *no*: a rank takes
    no part. ``acked`` is the step that all its ranks saved, ``failed`` why they did not. ``away``:
    a rank was between two blocks that take part, so that its next boundary may be far off. With
    ``acked`` come the numbers of its ``ranks``, the data ``cursor`` that each of them gave, the
    save ``tag``, and what they say of the ``samples``; each empty for none.
    """

    epoch: Count
    round: Count
    pod_uid: str
    vote: Annotated[int | None, _take_vote]
    acked: int | None = None
    failed: str = ""
    away: bool = False
    cursor: Cursor = ""
    ranks: tuple[int, ...] = ()
    tag: Tag = ""
    samples: Samples = ""
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, vote="no" if self.vote is None else self.vote)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("failed",))


@dataclass(frozen=True, slots=True)
class LastCommit:
    """The newest step that all ranks of a round have saved, for whatever cause.

    ``epoch`` is that of the newest commit, in which all acknowledged the same step. ``job_uid`` is
    that of the job then, empty if the platform gives none. ``forgotten``: by hand, so that no world
    has to go on from it; its epoch still counts. ``periodic``: no commit asked for the save.
    ``at_unix_s`` is the writer's wall clock, for people; 0.0 if it is unknown. ``cursor``: where in
    the data training goes on from it, JSON that every rank gave; or empty. ``run``: the run that
    the round is of; empty in a record of an older sidecar. ``tag``: the save tag of the world that
    saved it, empty if its ranks have asked for none. ``samples``: whether a world that goes on from
    it trains each sample once an epoch: ``kept``, or ``not kept:`` and why; empty in a record of an
    older sidecar.
    """

    step: int
    round: Count
    epoch: Count
    job_uid: str = ""
    forgotten: bool = False
    periodic: bool = False
    at_unix_s: UnixTime = 0.0
    cursor: Cursor = ""
    run: str = ""
    tag: Tag = ""
    samples: Samples = ""
    mod_revision: int = 0

    def is_of(self, run: str) -> bool:
        """Return whether a world of ``run`` goes on from it: steps of another one are not its.

        A container may run one torchrun after the other, each with steps of its own.
        """
        return self.run in ("", run)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, at_unix_s=round(self.at_unix_s, 3))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)
