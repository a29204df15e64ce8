# SPDX-License-Identifier: Apache-2.0
"""A training script without ``import muster`` that has the trouble named by ``INCIDENT``.

``FAILS_MEMBER``: only the workers of that node have it. Others train.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def trouble(name: str) -> None:
    """Raise what the incident raises."""
    if name == "gpu":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    if name == "data":
        Path("/data/that/is/not/mounted/train.bin").read_bytes()
    if name == "image":
        importlib.import_module("a_package_that_the_image_lacks")


if __name__ == "__main__":
    incident = os.environ["INCIDENT"]
    if incident == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    dist.init_process_group("gloo")
    while True:
        if os.environ.get("FAILS_MEMBER") in (None, os.environ["MUSTER_MEMBER"]):
            trouble(incident)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
