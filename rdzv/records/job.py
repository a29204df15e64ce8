# SPDX-License-Identifier: Apache-2.0
"""The records of a job, of its members and of its history, and a change of its values in words.

The history is for people to read, and bounded: joins, leaves, losses and rounds. Numbers of rounds
are unique over all lives of a job in the store; people read them from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import field, replace
from typing import Annotated, Literal, Self

from rdzv.dataclass import dataclass
from rdzv.errors import RecordError
from rdzv.keys import JobKeys
from rdzv.records.codec import (
    Name,
    OwnName,
    UnixTime,
    decode_record,
    dump_record,
    encode,
    fields_of_record,
    stored_as,
)
from rdzv.records.policy import JobPolicy, take_policy
from rdzv.store import Delete, KeyValue, Operation, Put

Role = Literal["worker", "launcher"]


@dataclass(frozen=True, slots=True)
class Job:
    """The record of a job, on which all members agree.

    ``generation`` is its number. ``desired`` is the wanted number of workers, or None. ``vacated``:
    the last member left on purpose. ``uid`` is empty if the platform gives none; ``former_uids``
    are those of earlier generations, the newest last, and bounded. ``paused``: no world may train.
    ``template`` is the pods' template that it goes by, even if ``muster set`` has changed a
    value since, and ``former_templates`` those before, the newest last, and bounded.
    ``unplaced``: how many of its pods no node has room for, as the controller sees them. ``owner``:
    the kind of object from whose name its workers have the job's; empty if it is unknown.
    ``mod_revision`` is the store's, for a compare; 0 for a record not stored.
    """

    policy: Annotated[JobPolicy, take_policy]
    generation: int = 1
    uid: str = ""
    desired: int | None = None
    paused: bool = False
    vacated: bool = False
    former_uids: tuple[str, ...] = ()
    mod_revision: int = 0
    template: str = ""
    former_templates: tuple[str, ...] = ()
    unplaced: int = 0
    owner: str = ""

    @property
    def expected(self) -> int | None:
        """The number of workers that a new world waits for, or None: no pod without a node."""
        return None if self.desired is None else self.desired - self.unplaced

    @property
    def template_in_force(self) -> str:
        """Its template; built from its policy if a sidecar of 0.1.0 has left it out."""
        return self.template or self.policy.template

    @property
    def values(self) -> dict[str, object]:
        """The values that an operator sets, by their names in records, and for programs."""
        rest = self.policy.stored
        bounds = {name: rest.pop(name) for name in ("min", "max")}
        return {**bounds, "desired": self.desired, **rest}

    def with_policy(self, policy: JobPolicy) -> Self:
        """Return the job by the policy of a pod; ``desired`` stays if within bounds."""
        wanted = self.desired
        fits = wanted is not None and policy.min_nodes <= wanted <= policy.max_nodes
        return replace(
            self, policy=policy, desired=wanted if fits else None, template=policy.template
        )

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        own = fields_of_record(self, without=("policy",), sparse=("unplaced", "owner"))
        rest = self.policy.stored
        bounds = {name: rest.pop(name) for name in ("min", "max")}
        return dump_record({**bounds, **{name: own.pop(name) for name in _BEFORE}, **rest, **own})

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, ("generation", "uid", "vacated"))


_BEFORE = ("generation", "uid", "desired", "paused", "vacated", "former_uids")
"""The fields between the bounds and the further values of the policy, in the record."""


@dataclass(frozen=True, slots=True)
class Member:
    """One sidecar, hence one pod.

    ``incarnation`` grows each time the same member registers again; ``since`` is the first one of
    this pod, and orders members by age (0: this is the first). ``slots`` is the number of worker
    processes its pod runs (0 for a launcher pod). ``created_revision`` orders members by the time
    they came; ``lease`` is the lease that the record is attached to. ``index`` is the number that
    the pod's controller gave it (-1: none). ``version`` is the sidecar's, for people (empty: it is
    older than this field). ``template``: what the pod was started with. ``topology`` says where its
    machine, the ``node``, is: a path such as ``block/rack``, the most general part first (empty:
    unknown). ``tunnel_port`` is where its sidecar takes a launcher's commands (0: nowhere), and
    ``pin`` the SHA-256 of that sidecar's certificate, in hexadecimal. ``health_port`` is where
    other sidecars may hold a connection (0: nowhere, as in one of 0.1.0).
    """

    name: OwnName
    pod_uid: Name
    incarnation: int
    address: str
    node: str
    role: Role
    slots: int
    min_workers: int = stored_as("min")
    max_workers: int = stored_as("max")
    since: int = 0
    index: int = -1
    version: str = ""
    template: str = ""
    topology: str = ""
    created_revision: int = 0
    mod_revision: int = 0
    lease: int = 0
    tunnel_port: int = 0
    pin: str = ""
    health_port: int = 0

    @property
    def own_template(self) -> str:
        """Its template; built from its bounds if its sidecar (0.1.0) names none."""
        return self.template or JobPolicy(self.min_workers, self.max_workers).template

    @property
    def counts_newest_run(self) -> bool:
        """Whether its sidecar writes commits of the newest run alone: 0.1.0 names no version."""
        return not self.version

    @property
    def knows_bounds_alone(self) -> bool:
        """Whether its sidecar goes by no more than min, max and desired, as 0.1.0 does."""
        return not self.version

    @property
    def knows_no_worlds(self) -> bool:
        """Whether its sidecar knows no world that changes in place, as one of 0.1.0."""
        return not self.version

    @property
    def age_order(self) -> tuple[int, str]:
        """The sort key, oldest first. A pod keeps its place when it registers again after a cut."""
        return (self.since or self.incarnation, self.name)

    @property
    def block(self) -> str:
        """The first part of its topology; empty if that is not known. A machine is no block."""
        return self.topology.partition("/")[0]

    @property
    def location(self) -> tuple[str, ...]:
        """The parts of its topology, the most general first, then its machine.

        A part that is not known is empty if another one follows.
        """
        parts = [*self.topology.split("/"), self.node] if self.topology else [self.node]
        while parts and not parts[-1]:
            parts.pop()
        return tuple(parts)

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self)

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The holder of a member's name: the last incarnation given out, and to which pod.

    ``since`` is the first incarnation that this pod had (0: this one). ``dismissed``: the reason of
    its last drain, if that was cancelled though the sign for it had not gone.
    """

    member: OwnName
    number: int
    pod_uid: str
    since: int = 0
    mod_revision: int = 0
    dismissed: str = ""

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, sparse=("dismissed",))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv)


def change_between(before: Job, after: Job) -> str:
    """Name each value that has changed, with what it was before; return empty text for none."""
    was, now = _values_in_words(before), _values_in_words(after)
    return ", ".join(
        f"{name} {'are' if name == 'sizes' else 'is'} {now[name]} (before: {was[name]})"
        for name in now
        if now[name] != was[name]
    )


def _values_in_words(job: Job) -> dict[str, str]:
    rest = {name: text or "any" for name, text in job.policy.spelled.items()}
    bounds = {name: rest.pop(name) for name in ("min", "max")}
    return {**bounds, "desired": "none" if job.desired is None else str(job.desired), **rest}


HISTORY_LENGTH = 200
"""Entries kept for each job: some 40 KB."""

Happening = Literal[
    "join",
    "leave",
    "lost",
    "failed",
    "wait",
    "round",
    "world",
    "closed",
    "generation",
    "drain",
    "slow",
    "forget",
    "quarantine",
    "admit",
    "set",
    "pause",
    "resume",
    "state",
]


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One event in the history.

    ``at_unix_s`` is the writer's wall clock, for people only: nothing is decided by it.
    ``revision`` is the store's when the entry was written; 0 for one not written yet.
    """

    what: Happening
    member: str
    why: str
    at_unix_s: UnixTime
    details: dict[str, object] = field(default_factory=dict)
    revision: int = 0

    def to_json(self) -> bytes:
        """Encode the record for the store."""
        return encode(self, without=("revision",), at_unix_s=round(self.at_unix_s, 3))

    @classmethod
    def from_kv(cls, kv: KeyValue) -> Self:
        """Decode the record; raise ``RecordError`` if it is malformed."""
        return decode_record(cls, kv, revision=kv.mod_revision)


def departures(entries: Iterable[KeyValue]) -> dict[str, int]:
    """Return the members that left on purpose, with the revision at which each did so last."""
    left: dict[str, int] = {}
    for kv in entries:
        if not JobKeys.records_departure(kv.key):
            continue  # not decoded: each sidecar reads the whole history at each departure
        try:
            entry = HistoryEntry.from_kv(kv)
        except RecordError:
            continue
        if entry.what == "leave":
            left[entry.member] = max(kv.mod_revision, left.get(entry.member, 0))
    return left


def losses(entries: Iterable[KeyValue]) -> set[str]:
    """Return the members whose loss is among ``entries``."""
    found = set()
    for kv in entries:
        if kv.key.endswith(".lost"):
            with suppress(RecordError):
                found.add(HistoryEntry.from_kv(kv).member)
    return found


def entry_operations(
    keys: JobKeys, entry: HistoryEntry, at_revision: int, present: Iterable[str]
) -> tuple[Operation, ...]:
    """Return the operations that write ``entry`` and delete what is beyond the bound.

    ``at_revision`` is that of the snapshot in which it happened: two members that report the same
    thing write the same key. ``present`` are the history keys known to be there.
    """
    oldest_first = sorted(present)
    surplus = oldest_first[: max(0, len(oldest_first) + 1 - HISTORY_LENGTH)]
    put = Put(keys.history_entry(at_revision, entry.member, entry.what), entry.to_json())
    return (put, *(Delete(key) for key in surplus[:20]))


ROUNDS_PER_LIFE = 1_000_000
"""Distance between the first round numbers of two generations: more rounds than one ever has."""


def shown_round(number: int) -> int:
    """Return the number of a round in its generation: the first one is 0."""
    return number % ROUNDS_PER_LIFE
