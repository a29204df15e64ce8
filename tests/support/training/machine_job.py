# SPDX-License-Identifier: Apache-2.0
"""A job whose nodes are machines of one network, each a namespace; needs root."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rdzv.store.memory.server import EmbeddedServer
from tests.support.training.background import Background
from tests.support.training.job import Job
from tests.support.training.machines import Network, network
from tests.support.training.pods import Node


class MachineJob(Job):
    """The job; its store is on this machine, which the others reach."""

    network: Network
    net: str

    def node(self, name: str, number: int, job_uid: str = "") -> Node:
        """A pod on a machine of its own."""
        node = super().node(name, number, job_uid)
        address = f"{self.net}{number + 10}"
        node.sidecar_settings["MUSTER_ADDRESS"] = address
        self.network.add(name, address)
        return node

    def spawn(
        self, node: Node, command: Sequence[str], environ: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        """Start a process of a node on its machine."""
        return super().spawn(node, self.network.command(node.name, *command), environ, log)

    def cut(self, node: Node) -> None:
        """Cut a node off from everything; it runs on."""
        self.tell(f"{node.name}: cut off")
        self.network.cut(node.name)
        del self.nodes[node.name]


@contextmanager
def machine_job(directory: Path, background: Background, **settings: Any) -> Iterator[MachineJob]:
    """Make a store, a network and a job without nodes; nothing of them outlives the block."""
    net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}."
    with network() as made:
        made.reach(f"{net}1")
        server = EmbeddedServer(f"{net}1:0")
        background.run(server.__aenter__())
        try:
            job = MachineJob(directory, background, [server.endpoint], **settings)
            job.network, job.net = made, net
            try:
                yield job
            finally:
                job.end()
        finally:
            background.run(server.__aexit__(None, None, None))
