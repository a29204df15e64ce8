# SPDX-License-Identifier: Apache-2.0
"""One rank looks, and all are told what it found, so that no two load different checkpoints.

Told over the store at ``MASTER_ADDR:MASTER_PORT``, where torch's ranks are about to meet or have
met: a trainer loads before it has made a process group, and a store needs no device.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Callable, List, Optional

import torch.distributed as dist

from muster.progress import RankIdentity

WAIT_S = 300.0
"""How long a rank waits for what rank 0 has found."""

_calls = 0
_kept: List[object] = []
"""The store stays for as long as the process: rank 0 serves it, and torch goes on to use it."""


def of_rank_0(look: Callable[[], Optional[str]]) -> Optional[str]:
    """What ``look`` gives at rank 0; every rank has to call this, equally often.

    Where there is no rank 0 to ask (one rank alone, or not below torchrun) this rank looks itself.
    Raises ``RuntimeError`` where rank 0 has not told within ``WAIT_S``.
    """
    global _calls
    own = RankIdentity(os.environ)
    if not own.of_torchrun or own.world_size == 1 or not dist.is_available():
        return look()
    _calls += 1
    # An agent's store outlives its workers: what was found before a restart is no answer.
    key = "muster/choice/%d/%d" % (own.restart, _calls)
    if own.rank == 0:
        choice = look()
        _store(own).set(key, choice or "")
        return choice
    try:
        return _store(own).get(key).decode("utf-8") or None
    except RuntimeError as error:
        raise RuntimeError(
            "rank 0 has not said within %g s which checkpoint it loads: let every rank ask for it,"
            " equally often (%s)" % (WAIT_S, error)
        ) from error


def _store(own: RankIdentity) -> "dist.TCPStore":
    host, _, port = own.master.rpartition(":")
    # By torchrun's own account, its agent serves the store already.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host,
        int(port),
        None,
        own.rank == 0 and not served,
        timedelta(seconds=WAIT_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    _kept.append(store)
    return store
