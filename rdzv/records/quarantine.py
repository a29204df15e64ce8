# SPDX-License-Identifier: Apache-2.0
"""The quarantine of the member that fails first, world after world: pure.

Each world that ends without progress is held against the member whose torchrun died first in it.
After a few such worlds in a row, the next one forms without that member, if enough others are
there, and each further one without the next. Once a world without it has made progress, the member
pauses, and is then let in again; progress with it clears its record. If nothing more can be left
out, the failure is common, and all records are cleared.

The records are in the store, so that they are the same for all. A member's own sidecar counts the
deaths of its torchruns, and the time of its pause; each sidecar tells of the progress of the world
that its torchrun is in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Self

from rdzv.dataclass import dataclass
from rdzv.keys import last_name
from rdzv.records.codec import Count, Ordinal, decode_record, encode
from rdzv.store import KeyValue

DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which a member is quarantined, and for how long; times in seconds."""

    worlds: int = 3
    """Number of worlds in a row without progress from which on the next forms without the member
    that failed first. Fewer: one bad moment keeps a healthy pod out. More: a pod that fails each
    time stops the others more often."""
    steps: int = 200
    """Steps of its ranks from which on a world has made progress; 0: steps are ignored. Fewer: a
    pod that gets nowhere stops the others again and again. More: one that works, but slowly, is
    taken for one that does not."""
    brief_s: float = 60.0
    """Time after which a world has made progress, if its ranks publish no steps and do not load;
    at least the last start. Longer: a pod whose script publishes nothing, and that something else
    kills, may be kept out."""
    first_s: float = 60.0
    """The first pause, from when the member is left out to the next try with it; it doubles each
    time the member fails again."""
    longest_s: float = 1800.0
    """Upper bound of the pause."""
    trial_s: float = 600.0
    """Time after which a member is let in again although no world without it has made progress.
    Shorter: a world that takes long to start shows nothing. Longer: a healthy pod waits for longer
    where steps are slow."""

    def pause_s(self, pauses: int) -> float:
        """Return the length of the pause of this number, which counts from 1."""
        return min(self.first_s * 2.0 ** min(max(0, pauses - 1), DOUBLINGS_MAX), self.longest_s)


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class FormedWorld:
    """A world that a torchrun is in, or would have been in.

    ``revision``: that of the store at which it formed, so that who died in it has a later record.
    ``since_s``: when this sidecar first saw the torchrun in it, on its monotonic clock.
    ``progress`` and ``start_s``: as its round has them.
    """

    members: frozenset[str]
    revision: int
    since_s: float = 0.0
    progress: str = ""
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stay:
    """The stay of one torchrun in one world, up to now or to its death.

    ``nonce`` names the torchrun's connection. ``steps``: how many its ranks have made in that
    world; None if they publish none.
    """

    nonce: str
    world: FormedWorld
    lasted_s: float
    steps: int | None = None

    def has_progress(self, terms: Terms) -> bool:
        """Return whether the world has made progress by now.

        Ranks that load have made none, however long they take. Time counts only where no rank
        reports a step.
        """
        if terms.steps and self.steps is not None:
            return self.steps >= terms.steps
        if self.world.progress == "loads" or (terms.steps and self.world.progress == "steps"):
            return False
        return self.lasted_s >= max(terms.brief_s, self.world.start_s)


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The failures of one pod since the last progress of a world.

    ``deaths``: how many worlds its torchruns were the first to end. ``died``: the nonce of the one
    that died last, so that no death counts twice. ``out``: whether worlds form without it.
    ``proven``: whether one without it has made progress since. ``pauses``: how often it has been
    left out, this time included.
    """

    member: str
    pod_uid: str
    deaths: Ordinal
    died: str
    out: bool = False
    mod_revision: int = 0
    proven: bool = False
    pauses: Count = 0

    @property
    def sentence(self) -> str:
        """The sentence why it is kept out, and what ends that."""
        proof = "" if self.proven else " and once a world without it has made progress"
        often = "once" if self.deaths == 1 else f"{self.deaths} times"
        return (
            f"quarantined: its torchrun has died {often}, first of its world and without progress;"
            f" it is let in again after {TERMS.pause_s(self.pauses):g} s{proof},"
            f" or by muster admit {self.member}"
        )

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, without=("member",), sparse=("proven", "pauses"))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("out",), member=last_name(kv.key))


Records = Mapping[str, Quarantine]
"""Quarantines by member."""


@dataclass(frozen=True, slots=True)
class QuarantineDecision:
    """The records to be written, by member; those that are None are to be deleted.

    ``reason``: one sentence. ``wake_at_s``: the time at which time alone would change the answer.
    """

    records: Mapping[str, Quarantine | None] = field(default_factory=dict)
    reason: str = ""
    wake_at_s: float = math.inf


def after_death(
    records: Records, member: str, pod_uid: str, stay: Stay, fit: int, least: int, terms: Terms
) -> QuarantineDecision:
    """Decide what the death of a torchrun of this pod, by itself, changes.

    ``fit``: how many other members can form the next world. ``least``: the size of the smallest.
    """
    mine = records.get(member)
    if mine is not None and mine.pod_uid != pod_uid:
        mine = None
    if mine is not None and mine.died == stay.nonce:
        return QuarantineDecision(reason="that death is counted already")
    if stay.has_progress(terms):
        return after_progress(records, stay.world.members)
    here = stay.world
    if first := [
        one.member
        for one in records.values()
        if one.member != member and one.member in here.members and one.mod_revision > here.revision
    ]:
        return QuarantineDecision(reason=f"{first[0]} has died before it in that world")
    pending = sum(one.deaths for one in records.values() if not (one.out and one.proven))
    before = mine or Quarantine(member, pod_uid, 0, "")
    known = records[member].mod_revision if member in records else 0
    record = replace(
        before,
        deaths=before.deaths + 1,
        died=stay.nonce,
        out=False,
        proven=False,
        mod_revision=known,
    )
    if pending + 1 < terms.worlds and not record.pauses:
        why = f"its torchrun has died first in a world without progress: {pending + 1} in a row"
        return QuarantineDecision({member: record}, why)
    if fit < least:
        why = "worlds make no progress, whoever is left out: the failure is common"
        return QuarantineDecision(dict.fromkeys(records), why)
    record = replace(record, out=True, pauses=record.pauses + 1)
    return QuarantineDecision({member: record}, record.sentence)


def after_progress(records: Records, members: Collection[str]) -> QuarantineDecision:
    """Decide what the progress of a world of ``members`` changes.

    It clears what is held against them, and the row of worlds without progress before it. Who is
    left out is so rightly, and is let in again once its pause is over.
    """
    changed: dict[str, Quarantine | None] = {}
    for name, one in records.items():
        if name in members or not (one.out or one.pauses):
            changed[name] = None
        elif one.out and not one.proven:
            changed[name] = replace(one, proven=True)
    return QuarantineDecision(changed, "a world has made progress")


def after_time(
    now: float, record: Quarantine, out_s: float, terms: Terms, *, another_is_tried: bool
) -> QuarantineDecision:
    """Decide how the record of a member that is left out changes by time alone.

    ``out_s``: since when it has been left out. ``another_is_tried``: whether another member has
    been let in again, and no progress has cleared its record yet: that one is tried alone for as
    long as the pause took.
    """
    if not record.out:
        return QuarantineDecision(reason="it is not left out")
    pause_s = terms.pause_s(record.pauses) * (2 if another_is_tried else 1)
    due_s = out_s + (pause_s if record.proven else max(pause_s, terms.trial_s))
    if now < due_s:
        return QuarantineDecision(reason="it is quarantined", wake_at_s=due_s)
    record = replace(record, out=False, proven=False, deaths=1)
    return QuarantineDecision({record.member: record}, "its pause is over: let in again")
