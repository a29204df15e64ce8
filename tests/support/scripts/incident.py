# SPDX-License-Identifier: Apache-2.0
"""A training script without ``import muster`` that has the trouble named by ``INCIDENT``.

``FAILS_MEMBER``: only the workers of that node have it. Others train. When it happens first is kept
in the file ``incident``, in seconds of the wall clock, beside the directory ``STEP_LOOP_DIR``.
"""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

CRASHES_AT_STEP = 15


def mark() -> None:
    """Keep the time of the first incident."""
    path = Path(os.environ["STEP_LOOP_DIR"]).parent / "incident"
    with suppress(FileExistsError), path.open("x") as kept:
        kept.write(str(time.time()))


def trouble(name: str) -> None:
    """Raise what the incident raises."""
    mark()
    if name in ("gpu", "crash"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if name == "data":
        Path("/data/that/is/not/mounted/train.bin").read_bytes()
    if name == "image":
        importlib.import_module("a_package_that_the_image_lacks")


if __name__ == "__main__":
    incident = os.environ["INCIDENT"]
    if incident == "interface":
        mark()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    dist.init_process_group("gloo")
    steps = 0
    while True:
        due = incident != "crash" or steps == CRASHES_AT_STEP
        if due and os.environ.get("FAILS_MEMBER") in (None, os.environ["MUSTER_MEMBER"]):
            trouble(incident)
        dist.all_reduce(torch.ones(1))
        steps += 1
        time.sleep(0.01)
