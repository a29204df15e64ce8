# SPDX-License-Identifier: Apache-2.0
"""The transactions on suspicions, each with the compares of what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher_shim.c10d.rounds.records import Node
from rdzv.errors import RecordError
from rdzv.job import JobClient
from rdzv.keys import GenerationKeys
from rdzv.members.lease import Registered
from rdzv.peers import Eviction, Sign, Suspicion
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Member
from rdzv.store import Compare, Delete, GuardedWrites, KeyValue, Operation, Put

KEYS_MAX = 40
"""Bound on the keys of a lost member that one transaction takes: etcd takes 128 operations."""


def suspicion(
    here: GenerationKeys,
    guard: Registered,
    member: Member,
    by: str,
    sign: Sign,
    stored: Mapping[str, Suspicion],
) -> GuardedWrites:
    """Build the write of a suspicion of this very incarnation of ``member``."""
    key = here.suspicion(member.name, by)
    before = stored[key].mod_revision if key in stored else 0
    one = Suspicion(by, member.name, member.incarnation, sign)
    compares = [
        Compare(here.member(member.name), "mod", "=", member.mod_revision),
        Compare(key, "mod", "=", before),
    ]
    return compares, [Put(key, one.to_json(), guard.lease() or 0)]


def backing_out(untrue: Sequence[Suspicion]) -> GuardedWrites:
    """Build the write that takes suspicions back, as they are stored."""
    compares = [Compare(one.key, "mod", "=", one.mod_revision) for one in untrue]
    return compares, [Delete(one.key) for one in untrue]


def eviction(client: JobClient, generation: int, one: Eviction, at_unix_s: float) -> GuardedWrites:
    """Build the eviction: what the end of the lease would do, and that its nodes have left.

    It compares the incarnation, each vote and its member's registration, and that nobody was
    suspected since.
    """
    here, mirror, member = client.keys.in_generation(generation), client.mirror, one.member
    key = here.member(member.name)
    compares = [
        Compare(key, "mod", "=", member.mod_revision),
        Compare(here.suspicions, "mod", "<", mirror.certain_revision + 1, prefix=True),
    ]
    for vote in one.votes:
        compares.append(Compare(vote.key, "mod", "=", vote.mod_revision))
        compares.append(Compare(here.member(vote.by), "lease", "=", vote.lease))
    details = {"incarnation": member.incarnation, "pod_uid": member.pod_uid, "early": True}
    entry = HistoryEntry("lost", member.name, one.reason, at_unix_s, details)
    operations: list[Operation] = [Delete(here.suspicions_of(member.name), prefix=True)]
    owned = [kv for kv in mirror.kvs.values() if kv.lease == member.lease]
    for kv in sorted(owned, key=lambda kv: kv.key != key)[:KEYS_MAX]:
        node = _node(here, member.name, kv)
        if node is None:
            operations.append(Delete(kv.key))
        elif node.state != "left":
            compares.append(Compare(kv.key, "mod", "=", kv.mod_revision))
            left = replace(node, state="left", left_reason="closed", round=0, finished=False)
            operations.append(Put(kv.key, left.to_json(), kv.lease))
    return compares, [*operations, *client.history(entry)]


def _node(here: GenerationKeys, member: str, kv: KeyValue) -> Node | None:
    """Return the record of a node of ``member``; None for any other key."""
    if not kv.key.startswith(here.runs) or kv.key != here.run(here.run_id_of(kv.key)).node(member):
        return None
    try:
        return Node.from_kv(kv)
    except RecordError:
        return None
