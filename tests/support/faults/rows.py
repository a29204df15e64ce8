# SPDX-License-Identifier: Apache-2.0
"""The faults of the matrix: each breaks something, lasts until it has been felt, and is mended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rdzv.membership import snapshot_of
from rdzv.store.etcd.client import EtcdStore
from tests.support.faults.link import Link
from tests.support.faults.rig import Fault, FaultRig
from tests.support.histories.pods import pod
from tests.support.store.certificates import Authority, write
from tests.support.store.full import cure, fill

Kind = Literal["leader", "follower"]
QUOTA_BYTES = 48 << 20
TOKEN_TTL_S = 3


async def _member(rig: FaultRig, kind: Kind) -> int:
    """The leader, or the follower that sidecars use: a fault of one that nobody uses is none."""
    leader = await asyncio.to_thread(rig.cluster.leader)
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


async def killed(rig: FaultRig, kind: Kind) -> None:
    member = await _member(rig, kind)
    rig.tell(f"etcd: the {kind}, member {member}, is killed")
    rig.cluster.kill(member)
    try:
        await rig.outlasted()
    finally:
        await rig.do(f"etcd: member {member} starts", rig.cluster.restore)


async def frozen(rig: FaultRig, kind: Kind) -> None:
    member = await _member(rig, kind)
    rig.tell(f"etcd: the {kind}, member {member}, is frozen")
    rig.cluster.freeze(member)
    try:
        await rig.outlasted()
    finally:
        rig.tell(f"etcd: member {member} goes on")
        rig.cluster.resume(member)


async def restarted_in_turn(rig: FaultRig) -> None:
    for member in range(len(rig.cluster)):
        await rig.do(f"etcd: member {member} stops in order", partial(rig.cluster.stop, member))
        await rig.outlasted()
        await rig.do(f"etcd: member {member} starts", rig.cluster.restore)
        await rig.settled()


async def all_killed(rig: FaultRig, seconds: float) -> None:
    rig.tell("etcd: all members are killed")
    for member in range(len(rig.cluster)):
        rig.cluster.kill(member)
    await asyncio.sleep(seconds)
    await rig.noticed()
    await rig.do("etcd: all members start", rig.cluster.restore)


async def quorum_lost(rig: FaultRig, seconds: float) -> None:
    leader = await asyncio.to_thread(rig.cluster.leader)
    others = [member for member in range(len(rig.cluster)) if member != leader]
    rig.tell(f"etcd: members {others} are killed, {leader} is alone")
    for member in others:
        rig.cluster.kill(member)
    await asyncio.sleep(seconds)
    # Nobody can prove anything, so nobody says that all is well.
    await rig.noticed()
    await rig.do("etcd: they start", rig.cluster.restore)


async def black_hole(rig: FaultRig, seconds: float, *, past_leases: bool = False) -> None:
    """Last until no lease is left, if told: longer where the store elects meanwhile."""
    rig.tell("lines: nothing passes to any member")
    rig.each_line(Link.hold)
    await asyncio.sleep(seconds)
    if past_leases:
        await rig.until(partial(_members_gone, rig), "the store keeps their leases")
    rig.tell("lines: all passes again, late")
    rig.each_line(Link.mend)


async def _members_gone(rig: FaultRig) -> bool:
    read = await rig.store.range(rig.keys.prefix, prefix=True, timeout_s=60)
    return not snapshot_of(rig.keys, read).members


async def black_hole_to_one(rig: FaultRig) -> None:
    member = await rig.most_used()
    rig.tell(f"lines: nothing passes to member {member}, which they used most")
    rig.each_line(Link.hold, member)
    try:
        await rig.outlasted()
    finally:
        rig.tell("lines: all passes again, late")
        rig.each_line(Link.mend)


async def connections_dead(rig: FaultRig) -> None:
    """As behind one name for all members, when the one that was connected to freezes."""
    rig.tell("lines: nothing passes on what is connected, for good; new connections do")
    rig.each_line(Link.strand)
    await rig.outlasted()


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
    revision = (await rig.store.range(rig.keys.job, timeout_s=60)).revision
    await rig.store.compact(revision, timeout_s=60)
    rig.tell(f"etcd: the history is compacted at {revision}")
    rig.each_line(Link.mend)


async def compacted_past_leases(rig: FaultRig) -> None:
    rig.tell("lines: every connection is reset, and every new one")
    rig.each_line(Link.cut)
    await rig.until(partial(_members_gone, rig), "the store keeps their leases")
    revision = (await rig.store.range(rig.keys.job, timeout_s=60)).revision
    await rig.store.compact(revision, timeout_s=60)
    rig.tell(f"etcd: no lease is left, and the history is compacted at {revision}")
    rig.each_line(Link.mend)


async def lease_revoked(rig: FaultRig) -> None:
    registrar = rig.pods[0].registrar
    held = registrar.held
    assert registrar.lease_id is not None
    rig.tell("etcd: the lease of w-0 is revoked")
    await rig.store.lease_revoke(registrar.lease_id, timeout_s=60)
    if rig.job is not None:
        members = rig.job.keys.in_generation(1).members
        for kv in (await rig.store.range(members, prefix=True, timeout_s=60)).kvs[:1]:
            rig.tell(f"etcd: so is the one of {kv.key}")
            await rig.store.lease_revoke(kv.lease, timeout_s=60)
    await rig.until(lambda: registrar.held != held, "not registered again")


async def no_space(rig: FaultRig, seconds: float) -> None:
    await fill(rig.store)
    rig.tell("etcd: it takes no writes")
    await asyncio.sleep(seconds)
    await rig.do("etcd: deleted, compacted, defragmented, disarmed", partial(cure, rig.cluster))


async def started_twice(rig: FaultRig) -> None:
    """Another pod takes the name of w-0, and one of a node of the job: who held it is fenced."""
    if rig.job is not None:
        await asyncio.to_thread(rig.job.start_twin)
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
            await rig.until(lambda: not old.registrar.registered.is_set(), "two hold one name")
            await asyncio.sleep(3)
            assert other.registrar.registered.is_set()
    finally:
        await store.close()


async def sidecar_frozen(rig: FaultRig, seconds: float) -> None:
    """One of the job's; its node counts as dead, and the others may go on without it meanwhile."""
    assert rig.job is not None
    node = next(iter(rig.job.nodes.values()))
    rig.job.freeze_sidecar(node)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(rig.job.resume, node)


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
    """One fault, what it may cost, and who goes through it.

    After any of them nothing is lost, doubled or out of order, and all go on. ``keeps_leases`` and
    ``new_worlds``: None leaves open what depends on etcd alone. ``drivers``: both where what an
    endpoint does by itself is broken. Not ``daily``: under a real job alone, in the full proof.
    """

    name: str
    fault: Fault
    keeps_leases: bool | None = True
    new_worlds: int | None = 0
    drivers: tuple[str, ...] = ("http2",)
    daily: bool = True


ALL = ("http2", "etcd3")

GROUPS = {
    "members": (
        Row("leader killed", partial(killed, kind="leader"), drivers=ALL),
        Row("follower killed", partial(killed, kind="follower"), daily=False),
        # etcd itself may revoke what others have renewed when such a leader wakes up.
        Row("leader frozen", partial(frozen, kind="leader"), keeps_leases=None),
        Row("follower frozen", partial(frozen, kind="follower"), drivers=ALL),
        Row("restarted in turn", restarted_in_turn),
    ),
    "lines": (
        Row("black hole to one", black_hole_to_one, drivers=ALL),
        Row("connections that are dead", connections_dead),
        Row("200 ms ± 100, 1 % loss, 9 s", partial(bad_lines, seconds=9)),
        Row("200 ms ± 100, 1 % loss, 30 s", partial(bad_lines, seconds=30), daily=False),
        Row(
            "black hole to all past leases",
            partial(black_hole, seconds=0, past_leases=True),
            keeps_leases=False,
        ),
        Row(
            "black hole to all, 45 s",
            partial(black_hole, seconds=45, past_leases=True),
            keeps_leases=False,
            daily=False,
        ),
    ),
    "store": (
        Row("compaction during a cut", partial(compacted_while_cut, seconds=2), drivers=ALL),
        Row("compaction during a cut past leases", compacted_past_leases, keeps_leases=False),
        Row("lease revoked by hand", lease_revoked, keeps_leases=False),
        Row("NOSPACE", partial(no_space, seconds=1)),
    ),
    "outages": (
        Row("all killed, 4 s", partial(all_killed, seconds=4)),
        Row("all killed, 60 s", partial(all_killed, seconds=60), daily=False),
        Row("all killed, 90 s", partial(all_killed, seconds=90), daily=False),
        Row("quorum lost, 4 s", partial(quorum_lost, seconds=4)),
        Row("quorum lost, 15 s", partial(quorum_lost, seconds=15), daily=False),
    ),
    "pods": (
        Row(
            "sidecar frozen, 26 s",
            partial(sidecar_frozen, seconds=26),
            new_worlds=None,
            daily=False,
        ),
        # Last, for the one that is fenced stays so.
        Row("same member started twice", started_twice, new_worlds=None),
    ),
    "secured": (
        # Whoever asks for nothing for the life of its token has none any more.
        Row("token expired", partial(black_hole, seconds=2.3 * TOKEN_TTL_S), drivers=ALL),
        Row("certificate rotated", certificate_rotated, drivers=ALL),
    ),
}
"""Those of a group in this order on one cluster."""

LEASE_S, SECURED_LEASE_S = 20.0, 60.0
