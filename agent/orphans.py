# SPDX-License-Identifier: Apache-2.0
"""Records of client connections whose pod is gone: no client is left to delete them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rdzv.keys import GenerationKeys, last_name
from rdzv.members.leftovers import kept, oldest
from rdzv.snapshot import Snapshot
from rdzv.store import KeyValue

_AUTHOR = re.compile(r"(?P<member>.+?)\.(?:[0-9a-f]{12}\.\d+|[0-9a-f]{32})(?::\d+)?")
"""Names that ``Endpoint`` gives its clients: one of its own, and one behind a relay."""


def orphans(keys: GenerationKeys, snapshot: Snapshot, kvs: Iterable[KeyValue]) -> list[KeyValue]:
    """Return the connection records of members that are gone, but for the newest ones."""
    of_gone = [
        kv
        for kv in kvs
        if kv.key.startswith(keys.runs)
        and kv.key.startswith(keys.run(keys.run_id_of(kv.key)).operations)
        and (author := _AUTHOR.fullmatch(last_name(kv.key))) is not None
        and author["member"] not in snapshot.members
    ]
    return oldest(of_gone, kept(snapshot))
