# SPDX-License-Identifier: Apache-2.0
"""The transaction that writes an answer about shards: it compares all that it rests on."""

from __future__ import annotations

from rdzv.keys import JobKeys, ShardKeys
from rdzv.records.job import Member
from rdzv.records.shards import PodShards
from rdzv.shards.ledger import ShardLedger
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, Delete, GuardedWrites, Operation, Put


def transaction(
    keys: JobKeys,
    name: str,
    revision: int,
    membership: Snapshot,
    before: ShardLedger,
    after: ShardLedger,
) -> GuardedWrites:
    """Build the change of the store from ``before`` to ``after``; no operations if they are equal.

    ``revision`` is the one up to which ``before`` is complete. The transaction requires that the
    world is the one that it was, and that each record which it replaces is unchanged. Another world
    requires that all records are unchanged, and deletes those of pods. A pod that is given up as
    gone must be gone. The caller adds its registration guard, and for a world of torchrun the
    round.
    """
    here = keys.shards_of(name)
    operations: list[Operation] = []
    known = before.world.mod_revision if before.world else 0
    compares = [Compare(here.world, "mod", "=", known)]
    begins = before.world is None or after.world is None or after.world.name != before.world.name
    if begins and after.world is not None:
        # No pod has reported since. Deletions do not show here, but only another beginning deletes.
        compares.append(Compare(here.pods, "mod", "<", revision + 1, prefix=True))
        # One deletion for all: etcd takes 128 operations, and a world may have more pods.
        operations += [Put(here.world, after.world.to_json()), Delete(here.pods, prefix=True)]
    if begins or after.open != before.open:
        compares.append(Compare(here.open, "mod", "=", before.open.mod_revision))
        operations.append(Put(here.open, after.open.to_json()))
    if begins or after.trained != before.trained:
        compares.append(Compare(here.trained, "mod", "=", before.trained.mod_revision))
        operations.append(Put(here.trained, after.trained.to_json()))
    for member, pod in after.pods.items():
        was = before.pods.get(member)
        if pod != was:
            compares += _unchanged(keys, here, membership, was, pod)
            operations.append(Put(here.pod(member), pod.to_json()))
    return compares, operations


def _unchanged(
    keys: JobKeys, here: ShardKeys, membership: Snapshot, was: PodShards | None, pod: PodShards
) -> list[Compare]:
    compares = [Compare(here.pod(pod.member), "mod", "=", was.mod_revision if was else 0)]
    if pod.over:
        member: Member | None = membership.members.get(pod.member)
        generation = membership.job.generation if membership.job else 1
        there = keys.in_generation(generation).member(pod.member)
        compares.append(Compare(there, "mod", "=", member.mod_revision if member else 0))
    return compares
