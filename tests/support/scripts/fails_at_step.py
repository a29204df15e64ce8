# SPDX-License-Identifier: Apache-2.0
"""A training script without ``import muster`` that raises at its 15th step on one node.

``FAILS_MEMBER`` is that node; it fails for as long as the file ``FAILS_WHILE`` is there.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

FAILS_AT = 15


def step_on(value: torch.Tensor, step: int) -> None:
    """Train one step."""
    here = os.environ["MUSTER_MEMBER"] == os.environ["FAILS_MEMBER"]
    if step == FAILS_AT and here and os.path.exists(os.environ["FAILS_WHILE"]):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered, token=s3cr3t")
    dist.all_reduce(value)
    time.sleep(0.01)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number in range(1_000_000):
        step_on(torch.ones(1), number)
