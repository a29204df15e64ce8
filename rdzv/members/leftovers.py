# SPDX-License-Identifier: Apache-2.0
"""The records that pods which are gone have left, and which of them can be deleted: pure.

The pods of a Deployment never come back under their names, so that what they leave would grow for
as long as the job exists. The newest records stay: a pod behind a cut may still return, and finds
its place and its drain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rdzv.keys import JobKeys, last_name
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue

KEPT_MIN = 200


def kept(snapshot: Snapshot) -> int:
    """Return how many records of a kind to keep: twice those of a cut that hits all pods."""
    return max(KEPT_MIN, 2 * snapshot.job.max_workers) if snapshot.job else KEPT_MIN


def leftovers(keys: JobKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Return the records of members and generations of the job that are gone for good."""
    if snapshot.job is None:
        return []
    here = keys.in_generation(snapshot.job.generation)
    present = {member.pod_uid for member in snapshot.members.values()}
    former: list[KeyValue] = []
    incarnations: list[KeyValue] = []
    drains: list[KeyValue] = []
    quarantines: list[KeyValue] = []
    for kv in kvs:
        if kv.key.startswith(keys.incarnations):
            if last_name(kv.key) not in snapshot.members:
                incarnations.append(kv)
        elif kv.key.startswith(here.drains):
            if last_name(kv.key) not in present:
                drains.append(kv)
        elif kv.key.startswith(here.quarantines):
            if last_name(kv.key) not in snapshot.members:
                quarantines.append(kv)
        elif kv.key.startswith(keys.generations) and _is_former(keys, snapshot, kv.key):
            # Written by a sidecar that did not know yet that this generation was over.
            former.append(kv)
    most = kept(snapshot)
    return [*former, *oldest(incarnations, most), *oldest(drains, most), *oldest(quarantines, most)]


def oldest(kvs: Sequence[KeyValue], most: int) -> list[KeyValue]:
    """Return those beyond the ``most`` that were written last, the oldest first."""
    by_age = sorted(kvs, key=lambda kv: kv.mod_revision)
    return by_age[: max(0, len(by_age) - most)]


def _is_former(keys: JobKeys, snapshot: Snapshot, key: str) -> bool:
    assert snapshot.job is not None
    number = key[len(keys.generations) :].partition("/")[0]
    return number.isdecimal() and int(number) < snapshot.job.generation
