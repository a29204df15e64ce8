# SPDX-License-Identifier: Apache-2.0
"""Rank 0's choice of a checkpoint, told to all ranks, so that no two load different ones.

Rank 0 tells it over the store at ``MASTER_ADDR:MASTER_PORT``, where torch's ranks are about to meet
or have met: a trainer loads before it has made a process group, and a store needs no device.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Callable, List, Optional

import torch.distributed as dist

from muster.progress import RankIdentity

WAIT_S = 300.0
"""Timeout of a rank that waits for rank 0's choice."""

_FAILED = "\0"
"""Prefix of an error in place of a choice; no path has it."""

_calls = 0
_kept: List[object] = []
"""Keeps the store open until the process ends: rank 0 serves it, and torch uses it afterwards."""


def of_rank_0(look: Callable[[], Optional[str]]) -> Optional[str]:
    """Return the result of ``look`` at rank 0. Every rank must call this, equally often.

    If there is no rank 0 to ask (one rank alone, or not started by torchrun) this rank looks
    itself. An error of ``look`` is raised at every rank. Raises ``RuntimeError`` if rank 0 has not
    answered within ``WAIT_S``.
    """
    global _calls
    own = RankIdentity(os.environ)
    if not own.of_torchrun or own.world_size == 1 or not dist.is_available():
        return look()
    _calls += 1
    # An agent's store outlives its workers: a choice from before a restart is not valid.
    key = "muster/choice/%d/%d" % (own.restart, _calls)
    if own.rank == 0:
        try:
            choice = look()
        except Exception as error:
            # The others would wait for an answer, and then fail with a timeout.
            _store(own).set(key, _FAILED + "%s: %s" % (type(error).__name__, error))
            raise
        _store(own).set(key, choice or "")
        return choice
    try:
        told = _store(own).get(key).decode("utf-8")
    except RuntimeError as error:
        raise RuntimeError(
            "rank 0 has not said within %g s which checkpoint it loads: let every rank ask for it,"
            " equally often (%s)" % (WAIT_S, error)
        ) from error
    if told.startswith(_FAILED):
        raise RuntimeError("rank 0 cannot choose a checkpoint: " + told[len(_FAILED) :])
    return told or None


def _store(own: RankIdentity) -> "dist.TCPStore":
    host, _, port = own.master.rpartition(":")
    # torchrun sets this if its agent serves the store already.
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
