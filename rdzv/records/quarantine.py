# SPDX-License-Identifier: Apache-2.0
"""The quarantine of members whose torchrun dies again and again: pure.

Each time a torchrun joins a world, and each time it is lost from it, the workers of all members
start again. So a member whose torchrun has died a few times within minutes is quarantined: it is
kept out of worlds until a torchrun has lived there for a while, which doubles with each further
death. The record is in the store, so that it is the same for all; only the member's own sidecar,
which serves that torchrun, counts deaths and time.

The steps that a torchrun's ranks have made count, too: a death after enough of them is no sign of a
crash loop. A member that ends one world after the other without progress stays out until it is let
in.
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
    """The terms on which a member is quarantined, and for how long; times in seconds."""

    deaths: int = 3
    """Deaths of its torchrun, none more than ``forget_s`` after the one before, that are too many.
    Fewer: one bad moment keeps a healthy pod out. More: the others re-form more often."""
    first_s: float = 60.0
    """Time for which the next torchrun has to live; it doubles with each further death."""
    longest_s: float = 3600.0
    """Upper bound of that time."""
    forget_s: float = 600.0
    """Time without a death after which all deaths are forgotten. Longer: a pod that has bad luck
    twice a day is kept out. Shorter: one that takes long to die never is."""
    steps: int = 200
    """Steps of its ranks since it came, from which on the death of a torchrun does not count, nor
    do those before it; 0: steps are ignored. Fewer: a pod that gets nowhere stops the others again
    and again. More: one that works, but slowly, is taken for one that does not."""
    worlds: int = 6
    """Number of worlds in a row that its torchruns have ended without progress, from which on it
    stays out until it is let in by hand. Fewer: a bad hour costs a pod for good. More: the others
    are stopped twice for each."""
    brief_s: float = 60.0
    """A world that lasted for less was without progress, if the ranks publish no steps. Longer: a
    pod whose script publishes nothing, and that something else kills, may stay out."""

    def hold_s(self, deaths: int) -> float:
        """Return for how long a torchrun has to live to be let in after this number of deaths."""
        doublings = min(max(0, deaths - self.deaths), DOUBLINGS_MAX)
        return min(self.first_s * 2.0**doublings, self.longest_s)


TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Death:
    """A torchrun that has ended by itself; ``nonce`` names its connection.

    ``steps``: how many its ranks have made since it came; None if they publish none. ``world_s``:
    how long the world had lasted that it was in; None if it was in none.
    """

    nonce: str
    steps: int | None = None
    world_s: float | None = None

    def has_progress(self, terms: Terms) -> bool:
        """Return whether its ranks have made enough steps for it not to count."""
        return bool(terms.steps) and self.steps is not None and self.steps >= terms.steps

    def adds_to(self, row: int, terms: Terms) -> int:
        """Return how many worlds in a row were ended without progress now, after ``row`` before."""
        if self.world_s is None:
            return row
        if self.has_progress(terms):
            return 0
        told = bool(terms.steps) and self.steps is not None
        return row + 1 if told or self.world_s < terms.brief_s else 0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The recent deaths of one pod's torchruns; ``out``: whether it is kept out for them.

    ``died``: the nonce of the torchrun that died last, so that no death counts twice.
    ``fruitless``: how many worlds its torchruns have ended in a row without progress.
    """

    member: str
    pod_uid: str
    deaths: int
    died: str
    out: bool = False
    mod_revision: int = 0
    fruitless: int = 0

    def stays(self, terms: Terms) -> bool:
        """Return whether it is kept out until it is let in by hand."""
        return self.out and self.fruitless >= terms.worlds

    @property
    def sentence(self) -> str:
        """The sentence why it is kept out, and what ends that."""
        if self.stays(TERMS):
            return (
                f"quarantined: its torchruns have ended {self.fruitless} worlds in a row without"
                f" progress; it stays out until muster admit {self.member}"
            )
        return (
            f"quarantined: its torchrun has died {self.deaths} times; it is let in again once one"
            f" has lived for {TERMS.hold_s(self.deaths):g} s, or by muster admit {self.member}"
        )

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        fields: dict[str, object] = {
            "pod_uid": self.pod_uid,
            "deaths": self.deaths,
            "died": self.died,
            "out": self.out,
        }
        if self.fruitless:
            fields["fruitless"] = self.fruitless
        return dump_record(fields)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        fields = load_record(kv.key, kv.value)
        deaths, row = take(kv.key, fields, "deaths", int), take(kv.key, fields, "fruitless", int, 0)
        if deaths < 1 or row < 0:
            raise RecordError(
                f"{kv.key}: 'deaths' is {deaths} and 'fruitless' {row}, expected numbers from 1"
                " and from 0 on"
            )
        return cls(
            member=last_name(kv.key),
            pod_uid=take(kv.key, fields, "pod_uid", str),
            deaths=deaths,
            died=take(kv.key, fields, "died", str),
            out=take(kv.key, fields, "out", bool),
            mod_revision=kv.mod_revision,
            fruitless=row,
        )


@dataclass(frozen=True, slots=True)
class QuarantineDecision:
    """The change of a record: ``record`` is to be written, or it is to be deleted, or neither.

    ``reason``: one sentence. ``wake_at_s``: the time at which time alone would change the answer.
    """

    record: Quarantine | None = None
    drop: bool = False
    reason: str = ""
    wake_at_s: float = math.inf


def after_death(
    record: Quarantine | None, member: str, pod_uid: str, death: Death, terms: Terms
) -> QuarantineDecision:
    """Decide how the record changes once a torchrun of this pod has ended by itself."""
    revision = record.mod_revision if record else 0
    known = record is not None and record.pod_uid == pod_uid
    if record is None or not known:
        record = Quarantine(member, pod_uid, 0, "")
    elif record.died == death.nonce:
        return QuarantineDecision(reason="that death is counted already")
    if death.has_progress(terms):
        if record.stays(terms):
            return QuarantineDecision(reason=f"it is quarantined until muster admit {member}")
        why = f"its torchrun has died after {death.steps} steps: that is no crash loop"
        return QuarantineDecision(drop=known, reason=why)
    deaths, row = record.deaths + 1, death.adds_to(record.fruitless, terms)
    out = deaths >= terms.deaths or row >= terms.worlds or record.stays(terms)
    if record.stays(terms):
        row = max(row, record.fruitless)
    record = replace(
        record, deaths=deaths, died=death.nonce, out=out, mod_revision=revision, fruitless=row
    )
    why = f"its torchrun has died {deaths} times"
    if record.stays(terms):
        why = (
            f"its torchruns have ended {row} worlds in a row without progress: quarantined until"
            f" muster admit {member}"
        )
    elif record.out:
        why += f": quarantined until one has lived for {terms.hold_s(deaths):g} s"
    return QuarantineDecision(record, reason=why)


def after_time(
    now: float,
    record: Quarantine,
    seen_s: float,
    alive_s: float | None,
    terms: Terms,
    steps: int | None = None,
) -> QuarantineDecision:
    """Decide how the record changes by time alone.

    ``seen_s``: since when it has been as it is; ``alive_s``: since when a torchrun has been there,
    if one is, and earlier by the time that those before it lived which only gave up waiting for a
    place. ``steps``: as of a ``Death``, of the torchrun that is there.
    """
    if not record.out:
        forgotten_s = seen_s + terms.forget_s
        if now < forgotten_s:
            return QuarantineDecision(wake_at_s=forgotten_s)
        if record.fruitless and steps is not None and steps < terms.steps:
            # It has been there for long without progress: its row goes on.
            return QuarantineDecision(wake_at_s=now + terms.forget_s)
        return QuarantineDecision(drop=True, reason="its torchrun has not died for long")
    if record.stays(terms):
        return QuarantineDecision(reason=f"it is quarantined until muster admit {record.member}")
    if alive_s is None:
        return QuarantineDecision(reason="it is quarantined, and has no torchrun")
    hold_s = terms.hold_s(record.deaths)
    admitted_s = max(seen_s, alive_s) + hold_s
    if now >= admitted_s:
        why = f"its torchrun has lived for {hold_s:g} s: let in again"
        return QuarantineDecision(replace(record, out=False), reason=why)
    return QuarantineDecision(reason="it is quarantined", wake_at_s=admitted_s)
