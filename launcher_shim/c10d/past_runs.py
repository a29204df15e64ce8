# SPDX-License-Identifier: Apache-2.0
"""The keys that runs which ended well have left in the store, and those to delete: pure.

As for rounds, keys that launchers stored are deleted when the run is two back: a node that was cut
off in the exit barrier of the run before may still come back to it. The round stays, with the
launch lines and the nodes that reached the exit barrier: a container that is started again still
has to learn that the run has ended well, and whether its own work was done.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher_shim.c10d.rounds.records import Node, Round
from launcher_shim.c10d.stages import SHARED_RUN
from launcher_shim.c10d.torch_keys import is_exit_barrier
from launcher_shim.tcpstore import wire
from rdzv.errors import RecordError
from rdzv.keys import GenerationKeys
from rdzv.store import KeyValue

KEPT = 1
"""The number of runs before the present one that keep the keys that launchers stored."""


def surplus(keys: GenerationKeys, kvs: Iterable[KeyValue], present: str) -> list[str]:
    """Find the keys to delete now that a world has formed in the run ``present``."""
    kvs = tuple(kvs)
    ended: list[tuple[int, str]] = []
    taken: set[str] = set()
    for kv in kvs:
        if (name := keys.run_of_round(kv.key)) is not None:
            if name not in (present, SHARED_RUN) and _ended_well(kv):
                ended.append((kv.mod_revision, name))
        elif kv.key.startswith(keys.runs):
            name = keys.run_id_of(kv.key)
            if name and kv.key.startswith(keys.run(name).nodes) and _takes_part(kv):
                taken.add(name)
    past = [name for _, name in sorted(ended)[:-KEPT] if name not in taken]
    return [kv.key for name in past for kv in kvs if _is_surplus(keys, name, kv.key)]


def _is_surplus(keys: GenerationKeys, name: str, key: str) -> bool:
    run = keys.run(name)
    if key.startswith(run.kv):
        return not run.split(key)[1].startswith(wire.STAGE)
    if key.startswith(run.sums):
        return not is_exit_barrier(run.split(key)[1])
    return key.startswith((run.queues, run.operations))


def _ended_well(kv: KeyValue) -> bool:
    try:
        return Round.from_kv(kv).closed == "success"
    except RecordError:
        return False


def _takes_part(kv: KeyValue) -> bool:
    try:
        return Node.from_kv(kv).state != "left"
    except RecordError:
        return False
