# SPDX-License-Identifier: Apache-2.0
"""A command through two real sidecars, and what happens when one of those on the way is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from shlex import quote

import pytest

from console.local.processes import NODE_MARK, RUN_MARK, end_all, marked
from launcher_shim.rundir.exec_frames import detached_max_s
from rdzv.store.memory.server import EmbeddedServer
from tests.support.faults.cut_node import CutNode, cut_node
from tests.support.ports import free_ports
from tests.support.sidecars.processes import CONSOLE, PATIENCE_S, Sidecar, sidecar, until
from tests.support.store.tcp_proxy import TcpProxy

AS_LONG_AS_IT_TAKES = "600"
SHORT = "5"
AS_LONG_AS_A_SIDECAR_NEEDS = "15"


class Pods:
    """A launcher's and a worker's pod; what runs in them bears the run's mark."""

    def __init__(self, directory: Path, endpoint: str, lease_ttl: str, stack: AsyncExitStack):
        self.directory = directory
        self.run = uuid.uuid4().hex
        self.ports = dict(zip(("launcher", "node-0", "node-1"), free_ports(3), strict=True))
        self.sidecars: dict[str, Sidecar] = {}
        self.agents: dict[str, asyncio.subprocess.Process] = {}
        self.hosts: dict[str, str] = {}
        self._endpoint = endpoint
        self._lease_ttl = lease_ttl
        self._stack = stack

    async def start_sidecar(
        self, name: str, node: CutNode | None = None, *, ready: bool = True
    ) -> None:
        """Start it, or start another one in its pod; ``node``: not on this one."""
        port = self._endpoint.rpartition(":")[2]
        one: AbstractAsyncContextManager[Sidecar] = sidecar(
            self._endpoint if node is None else f"{node.outside}:{port}",
            self.directory / name,
            name,
            CONSOLE if node is None else node.runner,
            MUSTER_ADDRESS="127.0.0.1" if node is None else node.inside,
            MUSTER_POD_UID=f"uid-{name}",
            MUSTER_ROLE="launcher" if name == "launcher" else "worker",
            MUSTER_TUNNEL_PORT=str(self.ports[name]),
            MUSTER_LEASE_TTL=self._lease_ttl,
        )
        self.sidecars[name] = await self._stack.enter_async_context(one)
        if ready:
            await self.sidecars[name].until_ready()

    async def start_agent(self, name: str = "node-0") -> None:
        """Start what a worker's training container runs."""
        run_dir = self.directory / name
        text = await asyncio.to_thread((run_dir / "env").read_text)
        delivered = dict(line.split("=", 1) for line in text.splitlines())
        self.hosts[name] = delivered["MUSTER_HOST"]
        self.agents[name] = await asyncio.create_subprocess_exec(
            *(run_dir / "bin" / "muster-run", "--", run_dir / "bin" / "muster-exec"),
            env=self._environ(name, MUSTER_RUN_DIR=str(run_dir)),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await until(lambda: asyncio.to_thread((run_dir / "exec.sock").exists))

    def _environ(self, node: str, **more: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        return {**clean, RUN_MARK: self.run, NODE_MARK: node, **more}

    async def command(
        self, script: str, name: str = "node-0", slot: int = 0
    ) -> asyncio.subprocess.Process:
        """Run a shell script on a worker, as horovodrun does, once it says that it is up."""
        host = self.hosts[name]
        told = f"HOROVOD_HOSTNAME={host} HOROVOD_LOCAL_RANK={slot} COMMAND=1"
        text = f"cd / > /dev/null 2>&1 ; env {told} sh -c {quote('echo up; ' + script)}"
        process = await asyncio.create_subprocess_exec(
            *(self.directory / "launcher" / "kubexec.sh", host, text),
            env=self._environ("launcher"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            assert await process.stdout.readline() == b"up\n"
        return process

    def commands(self) -> set[int]:
        """The processes of commands on node-0; reads ``/proc``."""
        return {pid for pid in marked(self.run, "node-0") if b"\0COMMAND=1\0" in environ_of(pid)}

    async def no_command(self) -> bool:
        """Whether no command is left."""
        return not await asyncio.to_thread(self.commands)

    async def touch(self, path: Path) -> None:
        """Let a script go on."""
        await asyncio.to_thread(path.touch)

    async def kill(self, name: str) -> None:
        await self.sidecars[name].end(signal.SIGKILL)

    async def end(self) -> None:
        await asyncio.to_thread(
            end_all, lambda: marked(self.run), set(), time.monotonic() + PATIENCE_S
        )
        # Each has ended, but the event loop may not have noticed yet.
        async with asyncio.timeout(PATIENCE_S):
            for agent in self.agents.values():
                await agent.wait()


def environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


StartPods = Callable[..., AbstractAsyncContextManager[Pods]]


@pytest.fixture
def start_pods() -> Iterator[StartPods]:
    # A short path: that of a unix socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="pods-") as directory:

        @asynccontextmanager
        async def start(
            lease_ttl: str, node: CutNode | None = None, *, through: list[TcpProxy] | None = None
        ) -> AsyncIterator[Pods]:
            listen = "127.0.0.1:0" if node is None else "0.0.0.0:0"
            async with EmbeddedServer(listen) as server, AsyncExitStack() as stack:
                endpoint = server.endpoint.replace("0.0.0.0", "127.0.0.1")
                if through is not None:
                    proxy = await stack.enter_async_context(TcpProxy(endpoint))
                    through.append(proxy)
                    endpoint = proxy.endpoint
                pods = Pods(Path(directory), endpoint, lease_ttl, stack)
                stack.push_async_callback(pods.end)
                await pods.start_sidecar("launcher")
                await pods.start_sidecar("node-0", node)
                await pods.start_agent()
                await pods.sidecars["launcher"].until_hosts(1)
                yield pods

        yield start


async def finished(process: asyncio.subprocess.Process) -> tuple[int | None, bytes, bytes]:
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode, out, err


async def test_no_sidecar_that_is_killed_is_noticed_by_the_command(start_pods: StartPods) -> None:
    async with start_pods(AS_LONG_AS_IT_TAKES) as pods:
        steps = pods.directory / "steps"
        await asyncio.to_thread(steps.mkdir)
        script = (
            f"for i in 1 2 3; do while ! [ -e {steps}/$i ]; do sleep 0.05; done;"
            " seq $((i * 10000 + 1)) $((i * 10000 + 9000)); echo $i >&2; done; exit 7"
        )
        worker = await pods.command(script)
        for number, name in enumerate(("launcher", "node-0"), 1):
            await pods.kill(name)
            await pods.touch(steps / str(number))  # it says this to nobody
            await pods.start_sidecar(name)
        await pods.touch(steps / "3")
        status, out, err = await finished(worker)
    wanted = [b"%d" % (i * 10000 + j) for i in (1, 2, 3) for j in range(1, 9001)]
    assert (status, err, out.split()) == (7, b"1\n2\n3\n", wanted)


async def test_a_sidecar_that_is_told_to_stop_leaves_its_command_to_the_next(
    start_pods: StartPods,
) -> None:
    async with start_pods(AS_LONG_AS_IT_TAKES) as pods:
        worker = await pods.command(
            f"while ! [ -e {pods.directory}/go ]; do sleep 0.05; done; exit 5"
        )
        for name in ("launcher", "node-0"):
            assert await pods.sidecars[name].end() == 0
            await pods.sidecars[name].until_logged("outlived")
            await pods.start_sidecar(name)
        await pods.touch(pods.directory / "go")
        assert await finished(worker) == (5, b"", b"")


@pytest.mark.parametrize(
    "killed", [("launcher",), ("node-0",), ("launcher", "node-0")], ids=" and ".join
)
async def test_i5_a_sidecar_that_is_killed_while_the_store_is_away_costs_no_command(
    start_pods: StartPods, killed: tuple[str, ...]
) -> None:
    through: list[TcpProxy] = []
    # A new sidecar has to be there before the agent gives the launcher up.
    lease_ttl = AS_LONG_AS_A_SIDECAR_NEEDS
    async with start_pods(lease_ttl, through=through) as pods:
        worker = await pods.command(
            f"while ! [ -e {pods.directory}/go ]; do sleep 0.05; done; exit 5"
        )
        (proxy,) = through
        proxy.cut()
        for name in killed:
            await pods.kill(name)
            await pods.start_sidecar(name, ready=False)
        # More than the time after which an agent gives a launcher up of which it hears nothing.
        await asyncio.sleep(1.2 * detached_max_s(int(lease_ttl)))
        assert worker.returncode is None
        assert not await pods.no_command()
        proxy.mend()
        for name in killed:
            await pods.sidecars[name].until_ready()
        await pods.touch(pods.directory / "go")
        assert await finished(worker) == (5, b"", b"")


async def test_who_kills_the_launchers_side_ends_the_worker(start_pods: StartPods) -> None:
    async with start_pods(AS_LONG_AS_IT_TAKES) as pods:
        worker = await pods.command("trap '' TERM; while :; do sleep 0.1; done")
        worker.kill()
        await until(pods.no_command)
        await finished(worker)


async def test_a_launcher_that_is_gone_with_its_sidecar_leaves_no_worker(
    start_pods: StartPods,
) -> None:
    async with start_pods(SHORT) as pods:
        worker = await pods.command("trap '' TERM; while :; do sleep 0.1; done")
        await pods.kill("launcher")
        worker.kill()
        await until(pods.no_command)
        await pods.sidecars["node-0"].until_logged("tunnel_abandoned")
        await finished(worker)


async def test_a_worker_that_is_gone_with_its_sidecar_is_no_success(start_pods: StartPods) -> None:
    async with start_pods(SHORT) as pods:
        worker = await pods.command("exec sleep 1000")
        await pods.kill("node-0")
        os.killpg(pods.agents["node-0"].pid, signal.SIGKILL)
        left = await asyncio.to_thread(marked, pods.run, "node-0")
        for pid in left:
            with suppress(ProcessLookupError):  # some of them end with the agent
                os.kill(pid, signal.SIGKILL)
        status, _, err = await finished(worker)
        assert status == 255
        assert b"is no present member of the job" in err


@pytest.fixture
def node() -> Iterator[CutNode]:
    with cut_node() as node:
        yield node


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace")
async def test_a_node_that_is_cut_off_loses_its_commands_and_nobody_elses(
    start_pods: StartPods, node: CutNode
) -> None:
    async with start_pods(SHORT, node) as pods:
        await pods.start_sidecar("node-1")
        await pods.start_agent("node-1")
        await pods.sidecars["launcher"].until_hosts(2)
        go = pods.directory / "go"
        other = await pods.command(f"while ! [ -e {go} ]; do sleep 0.05; done; exit 5", "node-1")
        silent = await pods.command("trap '' TERM; while :; do sleep 0.1; done")
        prints = await pods.command("while :; do echo it trains; sleep 0.1; done", slot=1)
        await asyncio.to_thread(node.cut)
        for lost in (silent, prints):
            status, _, err = await finished(lost)
            assert status == 255
            assert b"is no present member of the job" in err
        await pods.sidecars["launcher"].until_hosts(1)
        # Nothing tells the node, which has lost the store as well: that the path carries nothing is
        # noticed late, and then the commands have their lease, and 5 s.
        await until(pods.no_command, 2 * PATIENCE_S)
        await asyncio.to_thread(node.mend)
        await pods.sidecars["launcher"].until_hosts(2)
        assert await finished(await pods.command("exit 3")) == (3, b"", b"")
        await pods.touch(go)
        assert await finished(other) == (5, b"", b"")
