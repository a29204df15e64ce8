# SPDX-License-Identifier: Apache-2.0
"""The record of a drain."""

from __future__ import annotations

from typing import Literal, Self, get_args

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.records.codec import (
    dump_record,
    load_record,
    take,
    take_name,
    take_own_name,
    take_seconds,
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


@dataclass(frozen=True, slots=True)
class Drain:
    """A notice that a pod will go away; a member that drains is not listed.

    ``source`` is where the notice came from, ``requested_by`` the requester, if known.
    ``seconds_left`` is the time to the pod's deadline when the record was written, None without
    one; SIGTERM is passed on ``reserve_s`` before it at the latest. ``ending``: the pod is being
    terminated by now, whoever asked for the drain first. ``step`` is the commit step of the outcome
    ``committed``; None without one. ``saver``, of the drain of a Horovod launcher, or of the last
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
