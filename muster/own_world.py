# SPDX-License-Identifier: Apache-2.0
"""The rank of this process and the size of its world, of those who know them; and how it leaves."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Tuple

HOROVODS = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")


def own_world(call: str) -> Tuple[int, int]:
    """Return the rank and the world size for ``call``, which was given none.

    An initialized process group of torch, or Horovod, is asked; else it is the environment, and a
    process alone is rank 0 of 1. Raises ``ValueError`` if they differ, or if horovodrun has started
    the process and Horovod is not initialized.
    """
    environ = os.environ
    set_ = "RANK" in environ or "WORLD_SIZE" in environ
    said = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    for name in ("torch.distributed", *HOROVODS):
        library = sys.modules.get(name)
        if library is None or not getattr(library, "is_initialized", lambda: False)():
            continue
        size = getattr(library, "get_world_size" if name == "torch.distributed" else "size")()
        rank = getattr(library, "get_rank" if name == "torch.distributed" else "rank")()
        if set_ and (rank, size) != said:
            raise ValueError(
                "%s: %s has rank %d of %d, and RANK and WORLD_SIZE say rank %d of %d: give it rank="
                " and world_size=" % (call, name, rank, size, *said)
            )
        return int(rank), int(size)
    if not set_ and int(environ.get("HOROVOD_SIZE", "1")) > 1:
        raise ValueError(
            "%s: horovodrun has started this process, and Horovod is not initialized: call"
            " hvd.init() before, or give it rank=hvd.rank() and world_size=hvd.size()" % call
        )
    return said


def leave_at_exit() -> None:
    """Let this process leave a process group of Gloo's before Python ends, if no error ends it.

    A thread of Gloo's needs Python to free a tensor. If Python has ended, the thread aborts the
    process, and torchrun restarts the whole world for a rank that has trained to its end.
    """
    atexit.register(_leave, os.getpid())


def _leave(process: int) -> None:
    dist = sys.modules.get("torch.distributed")
    if os.getpid() != process or getattr(sys, "last_value", None) is not None:
        return
    if dist is None or not getattr(dist, "is_initialized", lambda: False)():
        return
    if dist.get_backend() == "gloo":  # to leave one of NCCL may wait for ranks that are gone
        dist.destroy_process_group()
