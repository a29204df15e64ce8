# SPDX-License-Identifier: Apache-2.0
"""Members whose torchrun dies again and again: how long they are kept out of worlds. Pure.

Each time a torchrun joins a world, and each time it is lost from it, everybody's workers start
again. So a member whose torchrun has died a few times within minutes is quarantined: it is not let
in until a torchrun has lived there for a while, which doubles with each further death. The record
is in the store, so that it is the same for everybody; only the member's own sidecar, which serves
that torchrun, counts deaths and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.records.codec import dump_record, load_record, take
from rdzv.store import KeyValue

DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True)
class Terms:
    """When a member is quarantined, and for how long; times in seconds."""

    deaths: int = 3
    """Deaths of its torchrun, none more than ``forget_s`` after the one before, that are too many.
    Fewer: one bad moment keeps a healthy pod out. More: the others re-form more often."""
    first_s: float = 60.0
    """How long the next torchrun has to live; it doubles with each further death."""
    longest_s: float = 3600.0
    """Upper bound of that."""
    forget_s: float = 600.0
    """After this long without a death, all deaths are forgotten."""

    def hold_s(self, deaths: int) -> float:
        """How long a torchrun has to live to be let in after so many deaths."""
        doublings = min(max(0, deaths - self.deaths), DOUBLINGS_MAX)
        return min(self.first_s * 2.0**doublings, self.longest_s)


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How often the torchrun of one pod has died lately; ``out``: whether it is kept out for it.

    ``died``: the nonce of the torchrun that died last, so that no death counts twice.
    """

    member: str
    pod_uid: str
    deaths: int
    died: str
    out: bool = False
    mod_revision: int = 0

    @property
    def sentence(self) -> str:
        """Say why it is kept out, and what ends that."""
        return (
            f"quarantined: its torchrun has died {self.deaths} times; it is let in again once one"
            f" has lived for {TERMS.hold_s(self.deaths):g} s, or by muster admit {self.member}"
        )

    def to_json(self) -> bytes:
        """Encode for the store."""
        return dump_record(
            {"pod_uid": self.pod_uid, "deaths": self.deaths, "died": self.died, "out": self.out}
        )

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(kv.key, kv.value)
        deaths = take(kv.key, fields, "deaths", int)
        if deaths < 1:
            raise RecordError(f"{kv.key}: 'deaths' is {deaths}, expected a number from 1 on")
        return cls(
            member=last_name(kv.key),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            deaths=deaths,
            died=take(kv.key, fields, "died", str),
            out=take(kv.key, fields, "out", bool),
            mod_revision=kv.mod_revision,
        )


@dataclass(frozen=True, slots=True)
class QuarantineDecision:
    """What becomes of a record: ``record`` is to be written, or it is to be dropped, or neither.

    ``reason``: one sentence. ``wake_at_s``: when time alone would change the answer.
    """

    record: Quarantine | None = None
    drop: bool = False
    reason: str = ""
    wake_at_s: float = math.inf


def after_death(
    record: Quarantine | None, member: str, pod_uid: str, died: str, terms: Terms
) -> QuarantineDecision:
    """Decide what the record becomes once the torchrun ``died`` of this pod has ended by itself."""
    revision = record.mod_revision if record else 0
    if record is None or record.pod_uid != pod_uid:
        record = Quarantine(member, pod_uid, 0, "")
    elif record.died == died:
        return QuarantineDecision(reason="that death is counted already")
    deaths = record.deaths + 1
    record = replace(
        record, deaths=deaths, died=died, out=deaths >= terms.deaths, mod_revision=revision
    )
    why = f"its torchrun has died {deaths} times"
    if record.out:
        why += f": quarantined until one has lived for {terms.hold_s(deaths):g} s"
    return QuarantineDecision(record, reason=why)


def after_time(
    now: float, record: Quarantine, seen_s: float, alive_s: float | None, terms: Terms
) -> QuarantineDecision:
    """Decide what time makes of the record.

    ``seen_s``: since when it is as it is; ``alive_s``: since when a torchrun is there, if one is,
    and earlier by the time that those before it lived which only gave up waiting for a place.
    """
    if not record.out:
        forgotten_s = seen_s + terms.forget_s
        if now >= forgotten_s:
            return QuarantineDecision(drop=True, reason="its torchrun has not died for long")
        return QuarantineDecision(wake_at_s=forgotten_s)
    if alive_s is None:
        return QuarantineDecision(reason="it is quarantined, and has no torchrun")
    hold_s = terms.hold_s(record.deaths)
    admitted_s = max(seen_s, alive_s) + hold_s
    if now >= admitted_s:
        why = f"its torchrun has lived for {hold_s:g} s: let in again"
        return QuarantineDecision(replace(record, out=False), reason=why)
    return QuarantineDecision(reason="it is quarantined", wake_at_s=admitted_s)
