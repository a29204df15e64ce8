# SPDX-License-Identifier: Apache-2.0
"""The two jobs of the Horovod benchmark: one is Muster's, the other uses a plain file.

horovodrun's command line and the training script are the same. They differ in how a host joins and
leaves, and in what starts its worker: Muster's tunnel, or OpenSSH.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from benchmarks.horovod_job import CHANGE_TIMEOUT_S, END_TIMEOUT_S, HorovodJob, Host
from console.local import processes
from console.local.payload import CentralLauncher, ExecHost
from console.local.processes import until_ready
from console.local.settings import sidecar_command, sidecar_environment
from launcher_shim.horovod.line import local_arguments
from launcher_shim.rundir import layout
from rdzv.job import JobClient
from rdzv.keys import JobKeys
from rdzv.store.etcd.client import EtcdStore

READY_TIMEOUT_S = 30.0

_CAT = """#!/bin/sh
exec cat "${0%/*}/hosts"
"""
_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec %s "$*"
"""


class SshJob(HorovodJob):
    """A job whose host list is a file, renamed into place and printed by ``cat``.

    All hosts are one sshd; ``ssh`` is the start of its client's command line.
    """

    def __init__(self, directory: Path, endpoint: str, nodes: int, ssh: Sequence[str]) -> None:
        super().__init__(directory, endpoint, nodes)
        self._ssh = ssh

    async def launch(self) -> Process:
        pod = self.launcher.pod
        for name, text in (("discover_hosts.sh", _CAT), ("bin/ssh", _SSH % shlex.join(self._ssh))):
            script = pod.run_dir / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(text)
            script.chmod(0o755)
        self._write(())
        (name, *words), policy = self.line.command, self.settings.policy
        counts = (self.settings.nodes, policy.min_nodes, policy.max_nodes)
        made = local_arguments(words, str(pod.run_dir / "discover_hosts.sh"), counts)
        payload = CentralLauncher(self.settings).prepare(pod.name, pod.uid, pod.run_dir, 0)
        path = f"{pod.run_dir / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**payload.environment, "PATH": path}
        return await self.training_child(self.launcher, (name, *made), environment)

    async def list(self, host: Host) -> float:
        return self._write((*self.hosts, host))

    async def delist(self, host: Host) -> float:
        return self._write(self.hosts)

    def _write(self, hosts: Sequence[Host]) -> float:
        target = self.launcher.pod.run_dir / layout.HOSTS
        aside = target.with_name("hosts.new")
        aside.write_text("".join(f"{host.token}:1\n" for host in hosts))
        began_s = time.monotonic()
        aside.rename(target)
        return began_s


class MusterJob(HorovodJob):
    """A job with real sidecars, one for horovodrun and one for each host.

    A host is announced by its registration, which this process sees in the store as soon as the
    launcher's sidecar can. It leaves by SIGTERM to its container, and ``bury`` waits for its end.
    """

    def __init__(self, directory: Path, endpoint: str, nodes: int) -> None:
        super().__init__(directory, endpoint, nodes)
        self._endpoint = endpoint
        keys = JobKeys(self.settings.namespace, self.settings.job)
        self._store = EtcdStore([endpoint])
        client = JobClient.of(self._store, keys, clock=time.monotonic)
        self._membership = client.membership
        self._watching = asyncio.create_task(client.watching.run())
        self._sidecars: dict[Host, Process] = {}
        self._agents: dict[Host, Process] = {}

    async def launch(self) -> Process:
        await self._start_sidecar(self.launcher)
        payload = CentralLauncher(self.settings)
        pod = self.launcher.pod
        process = payload.prepare(pod.name, pod.uid, pod.run_dir, pod.c10d_port)
        return await self.training_child(self.launcher, process.command, process.environment)

    async def list(self, host: Host) -> float:
        registered = asyncio.create_task(self._until_registered(host))
        await self._start_sidecar(host)
        payload = ExecHost(self.settings)
        pod = host.pod
        process = payload.prepare(pod.name, pod.uid, pod.run_dir, pod.c10d_port)
        self._agents[host] = await self.training_child(host, process.command, process.environment)
        return await registered

    async def delist(self, host: Host) -> float:
        self._agents[host].send_signal(signal.SIGTERM)
        return time.monotonic()

    async def bury(self, host: Host) -> None:
        agent = self._agents.pop(host)
        async with asyncio.timeout(CHANGE_TIMEOUT_S):
            status = await agent.wait()
        if status:
            raise RuntimeError(f"the container of {host.token} ended with {status}")
        await processes.end_child(self._sidecars.pop(host), END_TIMEOUT_S)

    async def end(self) -> None:
        await super().end()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._store.close()

    async def _until_registered(self, host: Host) -> float:
        while host.pod.name not in (snapshot := self._membership.snapshot()).members:
            await self._membership.changed_from(snapshot)
        return time.monotonic()

    async def _start_sidecar(self, host: Host) -> None:
        environment = sidecar_environment(self.settings, host.pod, self._endpoint)
        name = f"{host.pod.name}.sidecar"
        self._sidecars[host] = await self.child(sidecar_command(), environment, f"{name}.log")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await until_ready(host.pod.http_port)
        except TimeoutError:
            raise RuntimeError(f"a sidecar is not ready:\n{self.last_words(name)}") from None
