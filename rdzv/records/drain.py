# SPDX-License-Identifier: Apache-2.0
"""The records of drains: each drain, the commit-step agreement, the votes and the last commit.

One commit record serves all drains of a generation, and all worlds that form again without having
lost a node: for newcomers, for smaller sizes, for a pause. Its epoch grows with each hold, so that
nothing of an earlier attempt counts for a later one.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import (
    Cursor,
    Tag,
    dump_record,
    load_record,
    take,
    take_cursor,
    take_name,
    take_own_name,
    take_samples,
    take_seconds,
    take_tag,
    take_unix_s,
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

    pod_uid: str
    member: str
    reason: str
    source: str
    seconds_left: float | None = None
    reserve_s: float = 0.0
    requested_by: str = ""
    outcome: Outcome = ""
    step: int | None = None
    ending: bool = False
    saver: str = ""
    preempted: bool = False
    at_unix_s: float = 0.0
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
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "member": self.member,
                "reason": self.reason,
                "source": self.source,
                "seconds_left": self.seconds_left,
                "reserve_s": self.reserve_s,
                "requested_by": self.requested_by,
                "ending": self.ending,
                "outcome": self.outcome,
                "step": self.step,
                **({"saver": self.saver} if self.saver else {}),
                **({"preempted": True} if self.preempted else {}),
                **({"at_unix_s": round(self.at_unix_s, 3)} if self.at_unix_s else {}),
                **({"cause": self.cause} if self.cause else {}),
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        outcome = fields.get("outcome", "")
        if outcome not in get_args(Outcome):
            raise RecordError(f"{kv.key}: 'outcome' is {outcome!r}, which no drain ends with")
        step = fields.get("step")
        left = fields.get("seconds_left")
        return cls(
            pod_uid=take_own_name(kv.key, fields, "pod_uid"),
            member=take_name(kv.key, fields, "member"),
            reason=take(kv.key, fields, "reason", str),
            source=take(kv.key, fields, "source", str),
            seconds_left=None if left is None else take_seconds(kv.key, fields, "seconds_left"),
            reserve_s=take_seconds(kv.key, {"reserve_s": 0, **fields}, "reserve_s"),
            requested_by=take(kv.key, fields, "requested_by", str, ""),
            ending=take(kv.key, fields, "ending", bool, False),
            outcome=outcome,
            step=None if step is None else take(kv.key, fields, "step", int),
            saver=take(kv.key, fields, "saver", str, ""),
            preempted=take(kv.key, fields, "preempted", bool, False),
            at_unix_s=take_unix_s(kv.key, fields, "at_unix_s"),
            cause=take(kv.key, fields, "cause", str, ""),
            created_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
        )


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

    epoch: int = 0
    run: str = ""
    round: int = 0
    phase: Phase = "idle"
    step: int | None = None
    leaving: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()
    joins: bool = False
    admitted: bool = False
    refused: bool = False
    failures: int = 0
    took_s: float = 0.0
    reason: str = ""
    missed: int = 0
    mute: tuple[str, ...] = ()
    mod_revision: int = 0

    def is_of(self, run: str, number: int) -> bool:
        """Return whether it is about round ``number`` of ``run``."""
        return (self.run, self.round) == (run, number)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "epoch": self.epoch,
                "run": self.run,
                "round": self.round,
                "phase": self.phase,
                "step": self.step,
                "leaving": self.leaving,
                "saved": self.saved,
                "granted": self.granted,
                "joins": self.joins,
                "admitted": self.admitted,
                "refused": self.refused,
                "failures": self.failures,
                "took_s": round(self.took_s, 3),
                "reason": self.reason,
                **({"missed": self.missed} if self.missed else {}),
                **({"mute": self.mute} if self.mute else {}),
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        phase: Any = fields.get("phase")
        if phase not in get_args(Phase):
            raise RecordError(f"{kv.key}: 'phase' is {phase!r}, which is no phase of a commit")
        step = fields.get("step")
        return cls(
            epoch=_count(kv.key, fields, "epoch"),
            run=take(kv.key, fields, "run", str),
            round=_count(kv.key, fields, "round"),
            phase=phase,
            step=None if step is None else take(kv.key, fields, "step", int),
            leaving=_names(kv.key, fields, "leaving"),
            saved=_names(kv.key, fields, "saved"),
            granted=_names(kv.key, fields, "granted"),
            joins=take(kv.key, fields, "joins", bool),
            admitted=take(kv.key, fields, "admitted", bool),
            refused=take(kv.key, fields, "refused", bool),
            failures=_count(kv.key, fields, "failures"),
            took_s=take_seconds(kv.key, fields, "took_s"),
            reason=take(kv.key, fields, "reason", str),
            missed=_count(kv.key, {"missed": 0, **fields}, "missed"),
            mute=_names(kv.key, fields, "mute") if "mute" in fields else (),
            mod_revision=kv.mod_revision,
        )


@dataclass(frozen=True, slots=True)
class Vote:
    """The record of one member in one epoch: its vote, then the outcome of the save in its pod.

    ``vote`` is the first step that none of its ranks can have passed; None is a *no*: a rank takes
    no part. ``acked`` is the step that all its ranks saved, ``failed`` why they did not. ``away``:
    a rank was between two blocks that take part, so that its next boundary may be far off. With
    ``acked`` come the numbers of its ``ranks``, the data ``cursor`` that each of them gave, the
    save ``tag``, and what they say of the ``samples``; each empty for none.
    """

    epoch: int
    round: int
    pod_uid: str
    vote: int | None
    acked: int | None = None
    failed: str = ""
    away: bool = False
    cursor: str = ""
    ranks: tuple[int, ...] = ()
    tag: str = ""
    samples: str = ""
    mod_revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "epoch": self.epoch,
                "round": self.round,
                "pod_uid": self.pod_uid,
                "vote": "no" if self.vote is None else self.vote,
                "acked": self.acked,
                "failed": self.failed,
                "away": self.away,
                "cursor": self.cursor,
                "ranks": self.ranks,
                "tag": self.tag,
                "samples": self.samples,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        acked = fields.get("acked")
        return cls(
            epoch=_count(kv.key, fields, "epoch"),
            round=_count(kv.key, fields, "round"),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            vote=None if fields.get("vote") == "no" else take(kv.key, fields, "vote", int),
            acked=None if acked is None else take(kv.key, fields, "acked", int),
            failed=take(kv.key, fields, "failed", str),
            away=take(kv.key, fields, "away", bool, False),
            cursor=take_cursor(kv.key, fields),
            ranks=_ranks(kv.key, fields),
            tag=take_tag(kv.key, fields),
            samples=take_samples(kv.key, fields),
            mod_revision=kv.mod_revision,
        )


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
    round: int
    epoch: int
    job_uid: str = ""
    forgotten: bool = False
    periodic: bool = False
    at_unix_s: float = 0.0
    cursor: Cursor = ""
    run: str = ""
    tag: Tag = ""
    samples: str = ""
    mod_revision: int = 0

    def is_of(self, run: str) -> bool:
        """Return whether a world of ``run`` goes on from it: steps of another one are not its.

        A container may run one torchrun after the other, each with steps of its own.
        """
        return self.run in ("", run)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return dump_record(
            {
                "step": self.step,
                "round": self.round,
                "epoch": self.epoch,
                "job_uid": self.job_uid,
                "forgotten": self.forgotten,
                "periodic": self.periodic,
                "at_unix_s": round(self.at_unix_s, 3),
                "cursor": self.cursor,
                "run": self.run,
                "tag": self.tag,
                "samples": self.samples,
            }
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        return cls(
            step=take(kv.key, fields, "step", int),
            round=_count(kv.key, fields, "round"),
            epoch=_count(kv.key, fields, "epoch"),
            job_uid=take(kv.key, fields, "job_uid", str, ""),
            forgotten=take(kv.key, fields, "forgotten", bool, False),
            periodic=take(kv.key, fields, "periodic", bool, False),
            at_unix_s=take_unix_s(kv.key, fields, "at_unix_s"),
            cursor=take_cursor(kv.key, fields),
            run=take(kv.key, fields, "run", str, ""),
            tag=take_tag(kv.key, fields),
            samples=take_samples(kv.key, fields),
            mod_revision=kv.mod_revision,
        )


def _count(key: str, fields: dict[str, Any], name: str) -> int:
    value = take(key, fields, name, int)
    if value < 0:
        raise RecordError(f"{key}: {name!r} is {value!r}, expected a number from 0 on")
    return value


def _names(key: str, fields: dict[str, Any], name: str) -> tuple[str, ...]:
    names = take(key, fields, name, list)
    if not all(isinstance(one, str) for one in names):
        raise RecordError(f"{key}: {name!r} is {names!r}, expected names")
    return tuple(names)


def _ranks(key: str, fields: dict[str, Any]) -> tuple[int, ...]:
    ranks = take(key, fields, "ranks", list, [])
    if not all(type(rank) is int for rank in ranks):
        raise RecordError(f"{key}: 'ranks' is {ranks!r}, expected numbers of ranks")
    return tuple(ranks)
