# SPDX-License-Identifier: Apache-2.0
"""The sidecar in this process."""

from __future__ import annotations

from pathlib import Path

from agent.config import Config
from rdzv.settings import load
from tests.support.ports import free_ports


def configured(endpoint: str, run_dir: Path) -> Config:
    http_port, c10d_port = map(str, free_ports(2))
    return load(
        Config,
        {
            "job": "digits",
            "min_nodes": "1",
            "max_nodes": "2",
            "etcd_endpoints": endpoint,
            "run_dir": str(run_dir),
            "http_port": http_port,
            "c10d_port": c10d_port,
        },
        {},
    )
