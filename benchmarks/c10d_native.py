# SPDX-License-Identifier: Apache-2.0
"""Helper process: torch's own TCPStore server."""

from __future__ import annotations

import json
import os
import sys

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # else 64 warnings at the end of each load

from torch.distributed import TCPStore


def main() -> None:
    """Answer each order with the server's address, and serve until the input ends."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in sys.stdin:
        answer = {"port": store.port, "pid": os.getpid(), "libuv": store.libuvBackend}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
