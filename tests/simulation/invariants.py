# SPDX-License-Identifier: Apache-2.0
"""What must hold whatever happens, looked at after every revision and every turn of a process.

The truth is a mirror that is fed by the store itself, without a network between. Of I8 (untrusted
bytes) only keys are looked at, and I9 (what listens where) is no matter of order and time: they
have tests elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from launcher_shim.hosts import SETTLE_S, token_of
from rdzv.job import JobClient
from rdzv.keys import last_name
from rdzv.members.templates import is_upheld
from rdzv.mirror import spelled
from rdzv.records.drain import Commit, Drain
from rdzv.records.job import HistoryEntry, Incarnation, Member, change_between
from rdzv.records.troubles import Failure
from rdzv.snapshot import Listing, Snapshot, listing_of
from rdzv.store import WatchEvent
from rdzv.store.interface import Interval
from rdzv.store.memory.client import MemoryStore
from tests.simulation.drain_invariants import DrainInvariants
from tests.simulation.kept_worlds import KeptWorlds
from tests.simulation.liveness import Liveness
from tests.simulation.network import Sender
from tests.simulation.nodes import KEYS
from tests.simulation.pods import Pod, SimulatedJob
from tests.simulation.quarantine_invariants import QuarantineInvariants
from tests.simulation.ranks import Rank
from tests.simulation.round_invariants import RoundInvariants
from tests.simulation.split_invariants import SplitInvariants
from tests.simulation.torchrun import Torchrun

DELIVERY_S = 1.0
"""Longest that a host list may lag behind its own sidecar's mirror, which is a turn or two."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Holds one simulation to what must always be so."""

    def __init__(self, job: SimulatedJob) -> None:
        self.checks = 0
        self._job = job
        self._broken: Broken | None = None
        followed = JobClient.of(MemoryStore(job.engine), KEYS, clock=job.loop.time)
        self.truth = followed.mirror
        self.membership = followed.membership
        self._hosts: dict[str, bytes] = {}
        self._hosts_since_s: dict[str, dict[str, float]] = {}
        self._drains_seen_s: dict[str, dict[str, float]] = {}
        self._unlisted: set[str] = set()
        self._went: set[str] = set()
        self._ever_listed: set[str] = set()
        self._foreign: set[str] = set()
        self._listing_of: Snapshot | None = None
        self._listing: Listing
        self.splits = SplitInvariants(job, self.break_)
        self.rounds = RoundInvariants(job, self.truth, self.splits, self.break_)
        self.drains = DrainInvariants(job, self.rounds, self.break_)
        self.liveness = Liveness(job, lambda: self.snapshot, self.break_)
        self.kept_worlds = KeptWorlds(job, self.truth, self.break_)
        self.quarantines = QuarantineInvariants(job, self.truth, self.break_)
        job.invariants = self
        job.engine.on_commit = self._committed
        job.loop.after_turn = self._after_turn

    @property
    def snapshot(self) -> Snapshot:
        """The store's word at this moment."""
        return self.membership.snapshot()

    @property
    def listing(self) -> Listing:
        """The listing of that snapshot, made here: the product keeps its own."""
        if self._listing_of is not self.snapshot:
            self._listing_of = self.snapshot
            self._listing = listing_of(self._listing_of)
        return self._listing

    def break_(self, sentence: str) -> None:
        """Say that something does not hold; the simulation ends with this turn."""
        self._job.timeline.add("BROKEN", sentence)
        if self._broken is None:
            self._broken = Broken(sentence)

    def restored(self) -> None:
        """The store has gone back to what a backup holds of it."""
        engine = self._job.engine
        kvs = engine.read(Interval.of(KEYS.prefix, prefix=True))
        self.truth.replace(kvs, engine.revision)
        self._unlisted |= self._ever_listed - self._listed()
        self.splits.restored()
        self.rounds.restored()
        self.drains.restored()

    def wrote(self, key: str) -> None:
        """Somebody who is not of Muster has written a key."""
        if not spelled(key.removeprefix(KEYS.prefix)):
            self._foreign.add(key)

    # -- what torchruns and ranks do

    def formed(self, torchrun: Torchrun, number: int, rank: int, size: int) -> None:
        """A torchrun was handed a world."""
        self.rounds.formed(torchrun, number, rank, size)

    def in_its_own(self, torchrun: Torchrun, number: int, rank: int, size: int) -> None:
        """A torchrun was handed a round of its own, beside a world that changes in place."""
        name, current = torchrun.pod.name, self.rounds.round
        if not self._job.changes_in_place or rank != size - 1 or number == current.number:
            self.break_(f"I1: {name} is {rank} of {size} in round {number} of its own")

    def gave_up(self, torchrun: Torchrun, why: str) -> None:
        """A torchrun ended by itself."""
        self.rounds.gave_up(torchrun, why)

    def starts(self, rank: Rank, step: int) -> None:
        """A rank was told from which step to go on."""
        self.drains.starts(rank, step)

    def trained(self, rank: Rank, step: int) -> None:
        """A rank has finished a step."""
        self.drains.trained(rank, step)
        self.liveness.trained(rank)

    def let_go(self, pod: Pod, outcome: str, due_s: float) -> None:
        """SIGTERM passes to the pod's torchrun."""
        self.drains.let_go(pod, self.snapshot, outcome, due_s)

    # -- each revision

    def _committed(
        self, revision: int, events: Sequence[WatchEvent], sender: Sender | None
    ) -> None:
        self.checks += 1
        before = self.snapshot
        self._job.timeline.add(
            sender.member if sender else "store", f"{revision}: {_outline(events)}"
        )
        self._check_sender(before, events, sender)
        self._check_failures(before, events)
        if self._job.machines is not None:
            self._job.machines.committed(before, tuple(self.truth.kvs.values()), events)
        self.rounds.committed(before, events)
        if self._job.changes_in_place and before.job is not None:
            keys = KEYS.in_generation(before.job.generation).run(self.rounds.run)
            self._job.in_place.committed(keys.world, events)
        self.truth.apply(events, revision)
        after = self.snapshot
        if after is not before:
            self._check_template(before, after, sender)
            self._note_listed(before, after, sender)
            self.drains.committed(before, after)
            self.splits.committed(before, after)

    def _check_failures(self, before: Snapshot, events: Sequence[WatchEvent]) -> None:
        """Whoever has failed nothing is not accused of it."""
        here = KEYS.in_generation(before.job.generation if before.job else 1)
        for event in events:
            if event.kind == "put" and event.kv.key.startswith(here.failures):
                failure = Failure.from_kv(event.kv)
                self._job.timeline.add(failure.member, f"on record: {failure.sentence}")
                if not self._job.pods[failure.member].failures:
                    self.break_(f"{failure.member} is accused: {failure.sentence}")
            elif event.kind == "put" and event.kv.key.endswith(".wait"):
                self.quarantines.waits(before, HistoryEntry.from_kv(event.kv))

    def _check_sender(
        self, before: Snapshot, events: Sequence[WatchEvent], sender: Sender | None
    ) -> None:
        """I6: what a stale incarnation sends changes nothing."""
        if sender is None:
            return
        generation = before.job.generation if before.job else 1
        here = KEYS.in_generation(generation)
        # Who begins the job's next life takes away all that is left of the former one.
        begins = any(event.kind == "put" and event.kv.key == KEYS.job for event in events)
        for event in events:
            key = event.kv.key
            if event.kind == "put" and key.startswith(KEYS.incarnations):
                new = Incarnation.from_kv(event.kv)
                old = before.incarnations.get(new.member)
                same = old is not None and (new.number, new.pod_uid) == (old.number, old.pod_uid)
                if old is not None and new.number <= old.number and not same:
                    self.break_(
                        f"I6: incarnation {new.number} of {new.member} overwrites {old.number}"
                    )
            elif event.kind == "put" and key.startswith(here.members):
                member = Member.from_kv(event.kv)
                old_member = before.members.get(member.name)
                if old_member is not None and member.incarnation <= old_member.incarnation:
                    self.break_(
                        f"I6: the record of incarnation {member.incarnation} of {member.name}"
                        f" overwrites that of {old_member.incarnation}"
                    )
            elif event.kind == "delete" and begins:
                continue
            elif key.startswith((here.commit, here.drains, here.runs)):
                member_now = before.members.get(sender.member)
                if member_now is None or member_now.lease != sender.lease_id:
                    self.break_(
                        f"I6: {sender.member} writes {last_name(key)} under a registration that"
                        " is not in force"
                    )

    def _check_template(self, before: Snapshot, after: Snapshot, sender: Sender | None) -> None:
        """I12: sidecars change the job's values with its template alone, and nobody takes one back
        that another member upholds."""
        was, now = before.job, after.job
        if sender is None or was is None or now is None or was.generation != now.generation:
            return
        if was.template_in_force == now.template_in_force:
            if change := change_between(was, now):
                self.break_(f"I12: {sender.member} undoes what was set: {change}")
        elif now.template_in_force not in was.former_templates:
            return
        elif is_upheld(before, beside=sender.member):
            self.break_(f"I12: {sender.member} takes {was.template_in_force} back")

    def _note_listed(self, before: Snapshot, after: Snapshot, sender: Sender | None) -> None:
        listed = self._listed()
        self._unlisted |= self._ever_listed - listed
        self._ever_listed |= listed
        self._went |= after.drains.keys()
        if sender is not None:
            gone = before.members.keys() - after.members.keys()
            self._went |= {before.members[name].pod_uid for name in gone}

    def _listed(self) -> set[str]:
        return {member.pod_uid for member in self.listing.listed}

    # -- each turn

    def _after_turn(self) -> None:
        error = self._broken or self._job.failure or self._job.loop.failure
        if error is not None:
            raise error

    def delivered(self, pod: Pod, content: bytes) -> None:
        """A sidecar has renamed a host list into place."""
        if content != self._hosts.get(pod.pod_uid):
            self._check_hosts(pod, content)

    def look(self) -> None:
        """Look at what must not stand for long; to be called every second or so."""
        self.liveness.look()
        self.kept_worlds.look(self.rounds.round, self.liveness.trained_s)
        now = self._job.loop.time()
        for pod in self._job.present():
            taken_in = pod.sidecar is not None and self._foreign & pod.sidecar.mirror.kvs.keys()
            if taken_in:
                self.break_(f"I8: {pod.name} has taken in {min(taken_in)!a}, which is no key")
            content = self._hosts.get(pod.pod_uid)
            if content is None or pod.sidecar is None or pod.sidecar.process.frozen:
                continue
            if pod.sidecar.stopping:
                continue
            self._check_no_drained_host(pod, _hosts(content), now - DELIVERY_S)

    def saw(self, pod: Pod, drains: Mapping[str, Drain]) -> None:
        """The mirror of a sidecar shows these drains."""
        now = self._job.loop.time()
        seen = self._drains_seen_s.setdefault(pod.pod_uid, {})
        for uid in drains:
            seen.setdefault(uid, now)
        for uid in [uid for uid in seen if uid not in drains]:
            del seen[uid]

    def saw_commit(self, pod: Pod, commit: Commit | None) -> None:
        """The mirror of a sidecar shows this commit."""
        if commit is not None:
            self.drains.shown(pod, commit)

    def _filled_in(
        self, host: str, former: set[str], kept: set[str], since_s: Mapping[str, float]
    ) -> bool:
        """Whether ``host`` goes because one is back that it had filled in for.

        Of more hosts than there is room for, those stay that were listed for longest.
        """
        most = self._job.shape.most
        if (rules := self.snapshot.rules) is not None:
            # Of five, only four are listed in sizes 1, 2 and 4.
            most = min(most, rules.policy.largest(len(former | kept)) or most)
        full = len(kept) >= most
        return full and all(since_s.get(one, math.inf) <= since_s[host] for one in kept)

    def _check_hosts(self, pod: Pod, content: bytes) -> None:
        """I4: a list is neither empty nor partial by accident."""
        self.checks += 1
        now = self._job.loop.time()
        former = _hosts(self._hosts.get(pod.pod_uid, b""))
        hosts = _hosts(content)
        self._job.timeline.add(pod.name, f"hosts: {' '.join(sorted(hosts))}")
        self._hosts[pod.pod_uid] = content
        since_s = self._hosts_since_s.get(pod.pod_uid, {})
        self._hosts_since_s[pod.pod_uid] = {host: since_s.get(host, now) for host in hosts}
        steady = {self._token(uid) for uid in self._ever_listed - self._unlisted}
        dropped = (former - hosts) & steady
        if missing := {
            host for host in dropped if not self._filled_in(host, former, hosts, since_s)
        }:
            self.break_(f"I4: {pod.name} drops {sorted(missing)}, listed without a break")
        on_purpose = {self._token(uid) for uid in self._went}
        if former and not hosts and (lost := former - on_purpose):
            self.break_(
                f"I4: the list of {pod.name} becomes empty, though {sorted(lost)} may return"
            )
        self._check_no_drained_host(pod, hosts, now - DELIVERY_S)

    def _check_no_drained_host(self, pod: Pod, hosts: set[str], seen_by_s: float) -> None:
        """I2: but for one that is kept until another has been there for long enough."""
        seen = self._drains_seen_s.get(pod.pod_uid, {})
        drained = {self._token(uid) for uid, at_s in seen.items() if at_s <= seen_by_s} & hosts
        if not drained:
            return
        since_s = self._hosts_since_s[pod.pod_uid]
        now = self._job.loop.time()
        settled = [h for h in hosts - drained if now - since_s[h] > SETTLE_S + DELIVERY_S]
        if len(drained) > 1 or settled:
            self.break_(f"I2: {sorted(drained)} drain and stay on the list of {pod.name}")

    def _token(self, uid: str) -> str:
        return token_of(uid.removeprefix("uid-").rstrip("0123456789"), uid)


def _hosts(content: bytes) -> set[str]:
    lines = content.decode().splitlines()[:-1]
    return {line.rpartition(":")[0] for line in lines}


def _outline(events: Sequence[WatchEvent]) -> str:
    signs = {"put": "+", "delete": "-"}
    return (
        " ".join(f"{signs[event.kind]}{event.kv.key.removeprefix(KEYS.prefix)}" for event in events)
        .encode(errors="backslashreplace")
        .decode()
    )
