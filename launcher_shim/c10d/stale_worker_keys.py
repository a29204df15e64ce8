# SPDX-License-Identifier: Apache-2.0
"""Keys that workers of former worlds left in the run of clients without a rendezvous: pure.

If torch lets workers share the agents' store (which the delivered environment switches off), their
keys are here: every world leaves its keys, and each of its workers a part of the counter by which a
client registers itself. torch's own server drops them when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.stages import SHARED_RUN
from rdzv.errors import RecordError
from rdzv.keys import GenerationKeys
from rdzv.records.history import HistoryEntry
from rdzv.records.round_number import ROUNDS_PER_LIFE
from rdzv.store import KeyValue

WORKERS = (b"/worker/attempt_", b"init/")
"""Prefixes of the keys of torch's workers there. Keys of other clients are left alone."""


def stale_worker_keys(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Find the keys that no worker has written since the world before the present one.

    That is the world of every run that goes on, as a worker does not say which run it belongs to.
    """
    kvs = tuple(kvs)
    shared = keys.run(SHARED_RUN)
    of_key: dict[bytes, list[KeyValue]] = {}
    for kv in kvs:
        if kv.key.startswith((shared.kv, shared.sums, shared.queues)):
            name = shared.split(kv.key)[1]
            if name.startswith(WORKERS):
                of_key.setdefault(name, []).append(kv)
    if not of_key:
        return []
    since = min(_formed_before(keys, kvs).values(), default=0)
    stale = [parts for parts in of_key.values() if max(part.mod_revision for part in parts) < since]
    return [kv for parts in stale for kv in parts]


def _formed_before(keys: GenerationKeys, kvs: Iterable[KeyValue]) -> Mapping[str, int]:
    """Return the revision of the world before the present one, by open run; 0 if unknown."""
    open_runs: set[str] = set()
    formed: dict[str, list[tuple[int, int]]] = {}
    for kv in kvs:
        try:
            if kv.key.startswith(keys.runs):
                run_id = keys.run_id_of(kv.key)
                if kv.key == keys.run(run_id).round and not Round.from_kv(kv).closed:
                    open_runs.add(run_id)
            elif kv.key.startswith(keys.job.history):
                details = HistoryEntry.from_kv(kv).details
                run_id, number = str(details.get("run_id", "")), details.get("round")
                if isinstance(number, int) and number // ROUNDS_PER_LIFE == keys.generation - 1:
                    formed.setdefault(run_id, []).append((number, kv.mod_revision))
        except RecordError:
            continue
    return {
        run_id: sorted(rounds)[-2][1] if len(rounds := formed.get(run_id, [])) > 1 else 0
        for run_id in open_runs
    }
