# SPDX-License-Identifier: Apache-2.0
"""The faults of the matrix: each breaks something, lets time pass, and mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Literal

from rdzv.errors import StoreAmbiguous, StoreFull, StoreUnavailable
from rdzv.membership import snapshot_of
from rdzv.store import Delete, Put
from rdzv.store.etcd.client import EtcdStore
from tests.support.faults.link import Link
from tests.support.faults.rig import Fault, FaultRig
from tests.support.faults.watch import eventually
from tests.support.histories.pods import pod
from tests.support.store.certificates import Authority, write

Kind = Literal["leader", "follower"]
QUOTA_BYTES = 48 << 20
TOKEN_TTL_S = 3
LAPSE_S = 60.0
"""For the store to end leases that were due: one that has elected meanwhile gives them anew."""

AGAIN_S = 60.0
"""For a sidecar to learn what became of its registration."""


async def _member(rig: FaultRig, kind: Kind) -> int:
    """The leader, or the follower that sidecars use: a fault of one that nobody uses is none."""
    leader = await rig.leader()
    if kind == "leader":
        return leader
    rig.each_line(Link.cut, leader)
    await rig.settled()
    member = leader
    while member == leader:
        member = await rig.most_used()
    rig.each_line(Link.mend, leader)
    await rig.settled()
    # What the way there cost is none of the fault's.
    rig.measure_from_now()
    return member


async def killed(rig: FaultRig, kind: Kind, seconds: float) -> None:
    member = await _member(rig, kind)
    rig.tell(f"etcd: the {kind}, member {member}, is killed")
    rig.cluster.kill(member)
    try:
        await rig.outlast(seconds)
    finally:
        await rig.do(f"etcd: member {member} starts", rig.cluster.restore)


async def frozen(rig: FaultRig, kind: Kind, seconds: float) -> None:
    member = await _member(rig, kind)
    rig.tell(f"etcd: the {kind}, member {member}, is frozen")
    rig.cluster.freeze(member)
    try:
        await rig.outlast(seconds)
    finally:
        rig.tell(f"etcd: member {member} goes on")
        rig.cluster.resume(member)


async def all_killed(rig: FaultRig, seconds: float) -> None:
    rig.tell("etcd: all members are killed")
    for member in range(len(rig.cluster)):
        rig.cluster.kill(member)
    await asyncio.sleep(seconds)
    await rig.do("etcd: all members start", rig.cluster.restore)


async def quorum_lost(rig: FaultRig, seconds: float) -> None:
    leader = await rig.leader()
    others = [member for member in range(len(rig.cluster)) if member != leader]
    rig.tell(f"etcd: members {others} are killed, {leader} is alone")
    for member in others:
        rig.cluster.kill(member)
    await asyncio.sleep(seconds)
    await rig.do("etcd: they start", rig.cluster.restore)


async def black_hole(rig: FaultRig, seconds: float) -> None:
    rig.tell("lines: nothing passes to any member")
    rig.each_line(Link.hold)
    await asyncio.sleep(seconds)
    rig.tell("lines: all passes again, late")
    rig.each_line(Link.mend)


async def black_hole_past_leases(rig: FaultRig, seconds: float) -> None:
    """Last until no lease is left, which takes longer where the store elects meanwhile."""
    rig.tell("lines: nothing passes to any member")
    rig.each_line(Link.hold)
    began_s = monotonic()
    await asyncio.sleep(seconds)
    assert await _members_gone(rig), rig.story("the store keeps their leases")
    rig.cut_s = monotonic() - began_s
    rig.tell(f"lines: after {rig.cut_s:.1f} s all passes again, late")
    rig.each_line(Link.mend)


async def _members_gone(rig: FaultRig) -> bool:
    """Whether the store comes to show no member."""
    deadline_s = monotonic() + LAPSE_S
    while monotonic() < deadline_s:
        read = await rig.store.range(rig.keys.prefix, prefix=True, timeout_s=LAPSE_S)
        if not snapshot_of(rig.keys, read).members:
            return True
        await asyncio.sleep(0.1)
    return False


async def black_hole_to_one(rig: FaultRig, seconds: float) -> None:
    member = await rig.most_used()
    rig.tell(f"lines: nothing passes to member {member}, which they used most")
    rig.each_line(Link.hold, member)
    try:
        await rig.outlast(seconds)
    finally:
        rig.tell("lines: all passes again, late")
        rig.each_line(Link.mend)


async def bad_lines(rig: FaultRig, seconds: float) -> None:
    rig.tell("lines: 200 ms ± 100 each way, 1 % stalled as by a loss")
    rig.each_line(partial(Link.slow, delay_s=0.2, jitter_s=0.1, loss=0.01))
    await asyncio.sleep(seconds)
    rig.tell("lines: quick again")
    rig.each_line(Link.quick)


async def compacted_while_cut(rig: FaultRig, seconds: float) -> None:
    rig.tell("lines: every connection is reset, and every new one")
    rig.each_line(Link.cut)
    await asyncio.sleep(seconds)
    async with rig.operator() as store:
        revision = (await store.range(rig.keys.job)).revision
        await store.compact(revision)
    rig.tell(f"etcd: the history is compacted at {revision}")
    rig.each_line(Link.mend)


async def lease_revoked(rig: FaultRig) -> None:
    registrar = rig.pods[0].registrar
    held = registrar.held
    assert registrar.lease_id is not None
    rig.tell("etcd: the lease of w-0 is revoked")
    async with rig.operator() as store:
        await store.lease_revoke(registrar.lease_id)
        if rig.job is not None:
            members = rig.job.keys.in_generation(1).members
            for kv in (await store.range(members, prefix=True)).kvs[:1]:
                rig.tell(f"etcd: so is the one of {kv.key}")
                await store.lease_revoke(kv.lease)
    again = await eventually(lambda: registrar.held != held, AGAIN_S)
    assert again, rig.story("not registered again")


async def no_space(rig: FaultRig, seconds: float) -> None:
    filled = 0
    while True:
        try:
            await rig.store.txn([], [Put(f"/fill/{filled}", bytes(1 << 20))])
        except StoreFull as error:
            rig.tell(f"etcd: after {filled} MiB: {error}")
            break
        except (StoreAmbiguous, StoreUnavailable):
            continue
        filled += 1
    await asyncio.sleep(seconds)
    # As an operator would: delete, compact, defragment, disarm.
    async with rig.operator() as store:
        revision = (await store.txn([], [Delete("/fill/", prefix=True)])).revision
        await store.compact(revision)
    etcdctl = rig.cluster.etcdctl
    await rig.do("etcd: deleted, compacted, defragmented", partial(etcdctl, "defrag"))
    await rig.do("etcd: disarmed", partial(etcdctl, "alarm", "disarm"))


async def started_twice(rig: FaultRig) -> None:
    """Another pod takes the name of w-0: who held it is fenced."""
    old = rig.pods[0]
    rig.tell("another pod of the name w-0 starts")
    store = EtcdStore(rig.access)
    rig.fenced.add(old.name)
    try:
        held = rig.joining(old.name)
        async with pod(
            store, rig.keys, old.name, rig.lease_ttl_s, uid="uid-twice", on_held=held
        ) as other:
            rig.tell("it is registered")
            assert other.registrar.held is not None
            assert old.registrar.held is not None
            assert other.registrar.held.incarnation > old.registrar.held.incarnation
            gone = await eventually(lambda: not old.registrar.registered.is_set(), AGAIN_S)
            assert gone, rig.story("two hold one name")
            await asyncio.sleep(3)
            assert other.registrar.registered.is_set()
    finally:
        await store.close()


async def token_expired(rig: FaultRig) -> None:
    """Whoever asks for nothing for the life of its token has none any more."""
    await black_hole(rig, 2.3 * TOKEN_TTL_S)


async def certificate_rotated(rig: FaultRig) -> None:
    """Another authority signs from now on; the old one is trusted no more at the end."""
    old = rig.cluster.authority
    new = await asyncio.to_thread(Authority, rig.cluster.folder, "ca-2")
    trusted = rig.cluster.authority.cacert
    await rig.do("both authorities are trusted", lambda: write(trusted, old.pem + new.pem))
    await rig.do("the members have new certificates", new.server)
    rig.each_line(Link.cut)
    rig.tell("lines: every connection is made anew")
    rig.each_line(Link.mend)
    await asyncio.sleep(2)
    await rig.do("the old authority is gone", lambda: write(trusted, new.pem))
    rig.each_line(Link.cut)
    rig.each_line(Link.mend)
    await asyncio.sleep(2)


@dataclass(frozen=True)
class Row:
    """One fault, and what it may cost.

    ``extra_s``: for how long, in the full proof, a sidecar may see and write nothing, beyond what
    the store itself was away for, as ``fault_watch.Health`` saw it, and what the fault itself says
    that it kept them from it. Any other fault that leaves the store whole lasts for longer than
    that, so that whoever only waits for its end misses the bar. Every day, that of one member ends
    only after they went past it and renewed their leases, and after any they go on within
    ``back_s`` of the time that counts. ``keeps_leases`` and ``new_worlds``: None leaves open what
    depends on etcd alone.
    """

    name: str
    fault: Fault
    extra_s: float
    keeps_leases: bool | None = True
    new_worlds: int | None = 0

    @property
    def back_s(self) -> float:
        """Within this all go on again, on any machine: time counts only where that is calm."""
        return self.extra_s + MARGIN_S


def _row(
    name: str,
    fault: Callable[..., object],
    *arguments: object,
    extra_s: float,
    keeps_leases: bool | None = True,
    new_worlds: int | None = 0,
) -> Row:
    async def inject(rig: FaultRig) -> None:
        await fault(rig, *arguments)  # type: ignore[misc]

    return Row(name, inject, extra_s, keeps_leases, new_worlds)


MARGIN_S = 5.0
"""For some writes and swaps once they can be done, on a machine that is busy but never late."""
MEMBER_S = 2.0
"""What one dead member may add where nobody has to be elected: an attempt of 1 s and what leads up
to it, which is less than what a watch needs to find out by itself."""
ENDPOINT_S = 3.0
"""What one dead endpoint may add, or a leader that is to be elected, on a machine that is busy."""
QUORUM_S = 5.0
"""A watch learns within 4 s that its member has no leader, and then that it has one again."""
SLOW_S = 6.0
"""A swap is two calls, of 0.4 s each; a connection made anew takes several round trips."""

EVERYDAY = (
    _row("leader killed", killed, "leader", 6, extra_s=ENDPOINT_S),
    _row("follower frozen, 6 s", frozen, "follower", 6, extra_s=MEMBER_S),
    _row("all killed, 4 s", all_killed, 4, extra_s=ENDPOINT_S),
    _row("black hole to one, 6 s", black_hole_to_one, 6, extra_s=MEMBER_S),
    _row("200 ms ± 100, 1 % loss, 9 s", bad_lines, 9, extra_s=SLOW_S),
    _row("compaction during a cut of 2 s", compacted_while_cut, 2, extra_s=2 + ENDPOINT_S),
    _row("lease revoked by hand", lease_revoked, extra_s=MEMBER_S, keeps_leases=False),
    _row("NOSPACE", no_space, 1, extra_s=ENDPOINT_S),
    _row("quorum lost, 4 s", quorum_lost, 4, extra_s=QUORUM_S),
    _row(
        "black hole to all, 9 s",
        *(black_hole_past_leases, 9),
        extra_s=ENDPOINT_S,
        keeps_leases=False,
    ),
)
"""In this order on one cluster, with leases of ``EVERYDAY_LEASE_S``; in the full proof, of
``SHORT_LEASE_S``, which a fault of one member outlasts."""
EVERYDAY_LEASE_S = 15.0
SHORT_LEASE_S = 6.0

SECURED_LEASE_S = 15.0
EVERYDAY_SECURED_LEASE_S = 60.0
SECURED = (
    _row("token expired", token_expired, extra_s=2.3 * TOKEN_TTL_S + ENDPOINT_S),
    _row("certificate rotated", certificate_rotated, extra_s=2 * ENDPOINT_S),
)

TWICE = _row("same member started twice", started_twice, extra_s=MEMBER_S, new_worlds=None)

LONG = {
    "members": (
        _row("leader killed, 10 s", killed, "leader", 10, extra_s=ENDPOINT_S),
        _row("follower killed, 10 s", killed, "follower", 10, extra_s=ENDPOINT_S),
        _row("leader frozen, 10 s", frozen, "leader", 10, extra_s=ENDPOINT_S, keeps_leases=None),
        _row("leader frozen, 30 s", frozen, "leader", 30, extra_s=ENDPOINT_S, keeps_leases=None),
        _row("follower frozen, 10 s", frozen, "follower", 10, extra_s=ENDPOINT_S),
        _row("follower frozen, 30 s", frozen, "follower", 30, extra_s=ENDPOINT_S),
    ),
    "outages": (
        _row("all killed, 5 s", all_killed, 5, extra_s=ENDPOINT_S),
        _row("all killed, 60 s", all_killed, 60, extra_s=ENDPOINT_S),
        _row("all killed, 90 s", all_killed, 90, extra_s=ENDPOINT_S),
        _row("quorum lost, 15 s", quorum_lost, 15, extra_s=QUORUM_S),
    ),
    "lines": (
        _row("black hole to one, 30 s", black_hole_to_one, 30, extra_s=ENDPOINT_S),
        _row(
            "black hole to all, 15 s",
            *(black_hole_past_leases, 15),
            extra_s=ENDPOINT_S,
            keeps_leases=False,
        ),
        _row(
            "black hole to all, 45 s",
            *(black_hole_past_leases, 45),
            extra_s=ENDPOINT_S,
            keeps_leases=False,
        ),
        _row("200 ms ± 100, 1 % loss, 30 s", bad_lines, 30, extra_s=SLOW_S),
    ),
    "store": (
        _row("compaction during a cut of 7 s", compacted_while_cut, 7, extra_s=7 + ENDPOINT_S),
        _row("lease revoked by hand", lease_revoked, extra_s=MEMBER_S, keeps_leases=False),
        _row("NOSPACE, 15 s", no_space, 15, extra_s=ENDPOINT_S),
    ),
}
"""Those of a group in this order on one cluster."""
LEASES_S = {"members": 10.0, "outages": 10.0, "lines": 10.0, "store": 12.0}
"""A lease is renewed with each third of it that passes, so a cut of 7 s may outlast one of 10 s."""
