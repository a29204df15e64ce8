# SPDX-License-Identifier: Apache-2.0
"""A rank that asks for the last checkpoint before it has a process group, and then makes one.

Argument: the directory as this rank sees it. Prints what it was told, and the size of its world.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from muster.lightning import last_checkpoint


def main() -> None:
    found = [last_checkpoint(sys.argv[1]) for _ in range(2)]
    dist.init_process_group("gloo")
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    sys.stdout.write(f"{found[0]} {found[1]} {int(ranks)}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
