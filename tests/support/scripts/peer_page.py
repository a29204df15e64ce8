# SPDX-License-Identifier: Apache-2.0
"""A sidecar's health server alone, until it is ended: ``peer_page.py ADDRESS PORT MEMBER``."""

from __future__ import annotations

import asyncio
import os
import sys
from time import monotonic

from agent.config import Config
from agent.telemetry.http import LoopLag, serving
from agent.telemetry.metrics import Metrics
from rdzv.settings import load


async def serve(address: str, port: str, member: str) -> None:
    flags = {"job": "x", "min_nodes": "1", "max_nodes": "1"}
    flags |= {"address": address, "http_port": port, "member": member}
    async with serving(load(Config, flags, {}), LoopLag(monotonic), lambda: None, Metrics()):
        os.write(1, b"serves\n")
        await asyncio.Event().wait()


asyncio.run(serve(*sys.argv[1:]))
