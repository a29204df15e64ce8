# SPDX-License-Identifier: Apache-2.0
"""The key layout: the only place that spells a key.

It spells those of launchers, too: one file owns every key of the store.

Everything a job writes is stored under one prefix, so that one watch shows all of it at one
revision and one grant of rights fits it. Names are percent-encoded: no name can reach out of its
place.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, quote_from_bytes, unquote, unquote_to_bytes

from rdzv.dataclass import dataclass

ROOT = "/muster/v1/"

CACHED_LENGTH = 256
"""Longest launcher's key, in bytes, whose spelling is cached: all together take a MiB or two."""


@lru_cache(maxsize=4096)  # every event of a watch is compared with a few prefixes
def _name(text: str) -> str:
    if not text:
        raise ValueError("a key needs a name: got an empty one")
    return quote(text, safe="")


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys of one job, named by namespace and job name."""

    namespace: str
    job_name: str

    @property
    def prefix(self) -> str:
        """The prefix of everything of this job."""
        return f"{ROOT}{_name(self.namespace)}/{_name(self.job_name)}/"

    @property
    def job(self) -> str:
        """The key of the job record."""
        return f"{self.prefix}job"

    @property
    def last_commit(self) -> str:
        """The key of the newest commit that all ranks acknowledged; outlives the generation."""
        return f"{self.prefix}last_commit"

    @property
    def shards(self) -> str:
        """The prefix of the records of data sets handed out in shards; outlives the generation."""
        return f"{self.prefix}shards/"

    def shards_of(self, name: str) -> ShardKeys:
        """Return the keys of one data set."""
        return ShardKeys(f"{self.shards}{_name(name)}/")

    @property
    def incarnations(self) -> str:
        """The prefix of the incarnation records."""
        return f"{self.prefix}incarnations/"

    def incarnation(self, member: str) -> str:
        """Return the key of the last incarnation given out to ``member``, and to which pod UID."""
        return f"{self.incarnations}{_name(member)}"

    @property
    def history(self) -> str:
        """The prefix of the history."""
        return f"{self.prefix}history/"

    def history_entry(self, revision: int, member: str, what: str) -> str:
        """Return the key of one entry; sorts by revision. Equal reports share one key."""
        return f"{self.history}{revision:020d}.{_name(member)}.{_name(what)}"

    @staticmethod
    def records_departure(history_entry: str) -> bool:
        """Return whether the key of a history entry says that a member left on purpose."""
        return history_entry.endswith(".leave")

    def probe(self, nonce: str) -> str:
        """Return the key on which ``muster doctor`` tries its rights for a moment."""
        return f"{self.prefix}doctor/{_name(nonce)}"

    @property
    def generations(self) -> str:
        """The prefix of all generations."""
        return f"{self.prefix}g/"

    def in_generation(self, generation: int) -> GenerationKeys:
        """Return the keys of one generation."""
        return GenerationKeys(self, generation)


def job_of(key: str) -> tuple[JobKeys, str] | None:
    """Return the job that ``key`` is of, and what follows its prefix; None for any other key."""
    namespace, _, rest = key.removeprefix(ROOT).partition("/")
    name, _, below = rest.partition("/")
    if not (namespace and name and below):
        return None
    keys = _job_named(namespace, name)
    try:
        return (keys, below) if key.startswith(keys.prefix) else None
    except UnicodeEncodeError:
        return None  # bytes that are no UTF-8: no job has such a name


@lru_cache(maxsize=4096)  # every event of the watch of all jobs is parsed
def _job_named(namespace: str, name: str) -> JobKeys:
    return JobKeys(unquote(namespace), unquote(name))


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """Keys of one data set that is handed out in shards."""

    prefix: str

    @property
    def world(self) -> str:
        """The key of the world that it is handed out to; written once for each."""
        return f"{self.prefix}world"

    @property
    def open(self) -> str:
        """The key of the shards that the world may still take."""
        return f"{self.prefix}open"

    @property
    def trained(self) -> str:
        """The key of the places that the saved weights contain."""
        return f"{self.prefix}trained"

    @property
    def pods(self) -> str:
        """The prefix of the places that the pods of the world hold."""
        return f"{self.prefix}pods/"

    def pod(self, member: str) -> str:
        """Return the key of the places that the ranks of one member's pod hold."""
        return f"{self.pods}{_name(member)}"


@dataclass(frozen=True, slots=True)
class GenerationKeys:
    """Keys of one generation of a job."""

    job: JobKeys
    generation: int

    @property
    def prefix(self) -> str:
        """The prefix of everything of this generation."""
        return f"{self.job.generations}{self.generation}/"

    @property
    def members(self) -> str:
        """The prefix of the member records."""
        return f"{self.prefix}members/"

    def member(self, member: str) -> str:
        """Return the key of one member record, on that member's lease."""
        return f"{self.members}{_name(member)}"

    @property
    def drains(self) -> str:
        """The prefix of the drains."""
        return f"{self.prefix}drains/"

    def drain(self, pod_uid: str) -> str:
        """Return the key of one drain, by pod UID: a new pod of the same name starts undrained."""
        return f"{self.drains}{_name(pod_uid)}"

    @property
    def commit(self) -> str:
        """The key of the commit: one for all drains, and for worlds that form again without one."""
        return f"{self.prefix}commit"

    @property
    def votes(self) -> str:
        """The prefix of the votes of every epoch. The commit record itself is outside of it."""
        return f"{self.prefix}commit/"

    def votes_of(self, epoch: int) -> str:
        """Return the prefix of the votes of one epoch."""
        return f"{self.votes}{epoch}/"

    def vote(self, epoch: int, member: str) -> str:
        """Return the key of one member's vote, and then acknowledgement, in one epoch."""
        return f"{self.votes_of(epoch)}{_name(member)}"

    @property
    def saves(self) -> str:
        """The prefix of the saves of the pods of the present worlds."""
        return f"{self.prefix}saves/"

    def pod_saves(self, member: str) -> str:
        """Return the key of the saves of one member's pod, on that member's lease."""
        return f"{self.saves}{_name(member)}"

    @property
    def bypasses(self) -> str:
        """The prefix of the faults that sidecars found with the launchers beside them."""
        return f"{self.prefix}bypasses/"

    def bypass(self, member: str) -> str:
        """Return the key of the fault of a member's launcher, on that member's lease."""
        return f"{self.bypasses}{_name(member)}"

    @property
    def suspicions(self) -> str:
        """The prefix of the suspicions that members are lost."""
        return f"{self.prefix}suspicions/"

    def suspicions_of(self, member: str) -> str:
        """Return the prefix of the suspicions that one member is lost."""
        return f"{self.suspicions}{_name(member)}/"

    def suspicion(self, member: str, by: str) -> str:
        """Return the key of the suspicion of ``member`` by another one, on that one's lease."""
        return f"{self.suspicions_of(member)}{_name(by)}"

    @property
    def unreached(self) -> str:
        """The prefix of the records of neighbours that members never reached."""
        return f"{self.prefix}unreached/"

    def unreached_by(self, member: str) -> str:
        """Return the key of the neighbours that a member never reached, on its lease."""
        return f"{self.unreached}{_name(member)}"

    @property
    def failures(self) -> str:
        """The prefix of the newest failures of members' workers."""
        return f"{self.prefix}failures/"

    def failure(self, member: str) -> str:
        """Return the key of the newest failure of a member's workers, on that member's lease."""
        return f"{self.failures}{_name(member)}"

    @property
    def quarantines(self) -> str:
        """The prefix of the records of torchruns that died."""
        return f"{self.prefix}quarantines/"

    def quarantine(self, member: str) -> str:
        """Return the key of the deaths of one member's torchrun; outlives the member's lease."""
        return f"{self.quarantines}{_name(member)}"

    @property
    def runs(self) -> str:
        """The prefix of every torch run's keys."""
        return f"{self.prefix}c10d/"

    def run(self, run_id: str) -> RunKeys:
        """Return the keys of one torch rendezvous, named by torch's run id."""
        return RunKeys(f"{self.runs}{_name(run_id)}/", self.generation)

    def run_id_of(self, key: str) -> str:
        """Return the run id that ``key``, one below ``runs``, belongs to."""
        return unquote(key.removeprefix(self.runs).partition("/")[0])

    def run_of_round(self, key: str) -> str | None:
        """Return the run id whose round record ``key`` is; None for any other key.

        Launchers name keys of their own as they like: ``round`` is the name of many.
        """
        if not (key.endswith("/round") and key.startswith(self.runs)):
            return None
        run_id = self.run_id_of(key)
        return run_id if run_id and key == self.run(run_id).round else None


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one torch rendezvous (run id) in one generation."""

    prefix: str
    generation: int

    @property
    def name(self) -> str:
        """The run id as it stands in the store: without a slash."""
        return last_name(self.prefix.rstrip("/"))

    @property
    def runs(self) -> str:
        """The prefix of every run's keys in this generation."""
        return self.prefix.rstrip("/").rpartition("/")[0] + "/"

    @property
    def round(self) -> str:
        """The key of the round record."""
        return f"{self.prefix}round"

    @property
    def nodes(self) -> str:
        """The prefix of the node records."""
        return f"{self.prefix}nodes/"

    def node(self, member: str) -> str:
        """Return the key of the node that ``member`` serves, on that member's lease."""
        return f"{self.nodes}{_name(member)}"

    @property
    def world(self) -> str:
        """The key of the newest change of a world that changes in place."""
        return f"{self.prefix}world"

    @property
    def world_reports(self) -> str:
        """The prefix of what the pods of such a world report."""
        return f"{self.prefix}worlds/"

    def world_report(self, member: str) -> str:
        """Return the key of the report of one member's pod, on that member's lease."""
        return f"{self.world_reports}{_name(member)}"

    @property
    def kv(self) -> str:
        """The prefix of everything else that launchers store."""
        return f"{self.prefix}kv/"

    def value(self, key: bytes) -> str:
        """Return the key of a launcher's own key, which is given as it was on the wire."""
        return f"{self.kv}{_bytes_name(key)}"

    @property
    def sums(self) -> str:
        """The prefix of what was added to counters, one key for each adder: adds do not contend."""
        return f"{self.prefix}sum/"

    def addends(self, key: bytes) -> str:
        """Return the prefix of the addends of one counter."""
        return f"{self.sums}{_bytes_name(key)}/"

    def addend(self, key: bytes, adder: str) -> str:
        """Return the key of the addend of one adder to one counter."""
        return f"{self.addends(key)}{_name(adder)}"

    @property
    def queues(self) -> str:
        """The prefix of the elements of all queues."""
        return f"{self.prefix}queue/"

    def queue(self, key: bytes) -> str:
        """Return the prefix of the elements of one queue, which is ordered by create revision."""
        return f"{self.queues}{_bytes_name(key)}/"

    def element(self, key: bytes, element: str) -> str:
        """Return the key of one element of one queue."""
        return f"{self.queue(key)}{_name(element)}"

    @property
    def operations(self) -> str:
        """The prefix of the last operations of all client connections."""
        return f"{self.prefix}ops/"

    def operation(self, session: str) -> str:
        """Return the key of one connection's last operation, to settle what an outage left open."""
        return f"{self.operations}{_name(session)}"

    def split(self, key: str) -> tuple[str, bytes, str]:
        """Parse a key of this run into section, launcher's key, and adder or element."""
        section, _, rest = key.removeprefix(self.prefix).partition("/")
        name, _, item = rest.partition("/")
        return section, _bytes_of(name), unquote(item) if item else item


def _bytes_name(key: bytes) -> str:
    return _cached_bytes_name(key) if len(key) <= CACHED_LENGTH else quote_from_bytes(key, safe="")


@lru_cache(maxsize=1024)  # a launcher writes the same keys again and again
def _cached_bytes_name(key: bytes) -> str:
    return quote_from_bytes(key, safe="")


def _bytes_of(name: str) -> bytes:
    return _cached_bytes_of(name) if len(name) <= CACHED_LENGTH else unquote_to_bytes(name)


@lru_cache(maxsize=1024)  # each write comes back as an event
def _cached_bytes_of(name: str) -> bytes:
    return unquote_to_bytes(name)


def last_name(key: str) -> str:
    """Return the name that the last part of ``key`` spells."""
    return unquote(key.rpartition("/")[2])
