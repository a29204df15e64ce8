# SPDX-License-Identifier: Apache-2.0
"""One of two ranks that meet by Gloo: RANK ADDRESS PORT TIMEOUT_S."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from torch import distributed as dist


def main() -> None:
    rank, address, port, timeout_s = sys.argv[1:]
    store = dist.TCPStore(address, int(port), 2, rank == "0", timedelta(seconds=300))
    timeout = timedelta(seconds=float(timeout_s))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=timeout)
    number = torch.ones(1)
    dist.all_reduce(number)
    sys.stdout.write(f"both are here: {int(number.item())}\n")
    sys.stdout.flush()
    # At an ordinary end a thread of Gloo's may free a tensor when Python is gone, which aborts.
    os._exit(0)


if __name__ == "__main__":
    main()
