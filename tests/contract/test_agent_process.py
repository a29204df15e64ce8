# SPDX-License-Identifier: Apache-2.0
"""``muster agent`` as a real process, against the embedded store."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agent.rundir.files import RunDir
from muster import __version__
from rdzv.keys import JobKeys
from rdzv.membership import snapshot_of
from rdzv.records.drain import Drain
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.ports import free_ports
from tests.support.programs import ran
from tests.support.records import member
from tests.support.sidecars.listeners import listening
from tests.support.sidecars.processes import PATIENCE_S, ROOT, Sidecar, muster, sidecar, until

KEYS = JobKeys("default", "digits")


Start = Callable[..., AbstractAsyncContextManager[Sidecar]]


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Start:
    """Runs a sidecar in a folder of the test's own, as ``sidecar`` does, until it is ready."""

    @asynccontextmanager
    async def ready(folder: str = "", *how: Any, **environ: str) -> AsyncIterator[Sidecar]:
        async with sidecar(server.endpoint, tmp_path / folder, *how, **environ) as one:
            await one.until_ready()
            yield one

    return ready


async def seen(server: EmbeddedServer) -> Snapshot:
    store = MemoryStore(server.engine)
    return snapshot_of(KEYS, await store.range(KEYS.prefix, prefix=True))


async def the_member(server: EmbeddedServer, name: str = "node-0") -> Member:
    return (await seen(server)).members[name]


async def member_that_comes(server: EmbeddedServer) -> Member:
    """The member as soon as it is registered, for one whose short lease may just have ended."""
    found: list[Member] = []

    async def there() -> bool:
        members = (await seen(server)).members
        found[:] = [members["node-0"]] if "node-0" in members else []
        return bool(found)

    await until(there)
    return found[0]


async def test_it_registers_delivers_and_starts_again_as_the_same_pod(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    async with start(MUSTER_SLOTS="2", MUSTER_LEASE_TLL="1") as one:
        assert (await one.until_logged("start"))["fresh"] is True
        assert "MUSTER_LEASE_TTL" in (await one.until_logged("unknown_variable"))["message"]
        before, hosts = await the_member(server), await one.hosts()
        assert (before.slots, before.address, before.role) == (2, "127.0.0.1", "worker")
        assert before.version == __version__
        host, last = hosts.splitlines()
        assert host.startswith("node-0.")
        assert host.endswith(":2")
        assert last.startswith("rev-")
        await asyncio.to_thread(check_delivery, one.run_dir, one.c10d_port)
        await check_metrics(one)
        await one.end(signal.SIGKILL)
    async with start(MUSTER_SLOTS="2") as again:
        assert (await again.until_logged("start"))["fresh"] is False
        after = await the_member(server)
        assert after.pod_uid == before.pod_uid
        assert after.incarnation > before.incarnation
        job = (await seen(server)).job
        assert job is not None
        assert job.generation == 1
        assert await again.hosts() == hosts
        await again.end()
    assert await asyncio.to_thread(lambda: list(tmp_path.rglob("*.tmp"))) == []
    await asyncio.to_thread((tmp_path / "state.json").write_text, "{")
    async with start() as fresh:
        assert (await fresh.until_logged("start"))["fresh"] is True
        assert await fresh.until_logged("state_unreadable")


def check_delivery(run_dir: Path, c10d_port: int) -> None:
    env = dict(line.split("=", 1) for line in (run_dir / "env").read_text().splitlines())
    assert env["PET_RDZV_ENDPOINT"] == f"localhost:{c10d_port}"
    assert (env["PET_NNODES"], env["PET_RDZV_ID"]) == ("1:4", "digits")
    assert "is_host=0" in env["PET_RDZV_CONF"]
    assert (run_dir / "c10d.sock").is_socket()
    assert stat.S_IMODE((run_dir / "progress").stat().st_mode) == 0o1777
    for name in ("env", "hosts", "state.json", "python/muster/__init__.py"):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o644
    assert stat.S_IMODE((run_dir / "discover_hosts.sh").stat().st_mode) == 0o755
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", "import muster; print(muster.__file__)"],
        env={"PYTHONPATH": str(run_dir / "python")},
        cwd=run_dir,
        capture_output=True,
        check=True,
        text=True,
    )
    assert loaded.stdout.startswith(str(run_dir))


async def check_metrics(one: Sidecar) -> None:
    status, text = await one.get("/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    metrics = dict(line.rsplit(" ", 1) for line in lines)
    assert metrics['muster_members{state="listed"}'] == "1.0"
    assert metrics["muster_registered"] == "1.0"
    assert 0 < float(metrics["muster_lease_remaining_seconds"]) <= 600
    assert metrics["muster_c10d_connections"] == "0.0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_it_leave(
    server: EmbeddedServer, start: Start, number: signal.Signals
) -> None:
    async with start() as one:
        assert await one.end(number) == 0
        snapshot = await seen(server)
        assert snapshot.members == {}
        assert snapshot.job is not None
        assert snapshot.job.vacated
        assert "Traceback" not in str(one.lines)


async def test_a_launcher_is_told_the_hosts_and_is_none_itself(
    server: EmbeddedServer, start: Start
) -> None:
    async with start("l", "launcher", MUSTER_ROLE="launcher") as one:
        assert (await the_member(server, "launcher")).slots == 0
        (alone,) = (await one.hosts()).splitlines()
        assert alone.startswith("rev-")
        async with start("w", "worker", MUSTER_SLOTS="3") as two:
            await one.until_hosts(1)
            host, last = (await one.hosts()).splitlines()
            assert host.startswith("worker.")
            assert host.endswith(":3")
            assert last != alone
            of_worker = await two.hosts()

            async def nudged() -> bool:
                now_host, now_last = (await one.hosts()).splitlines()
                return now_host == host and now_last != last

            await until(nudged)  # horovodrun may have missed it; no other launcher reads the list
            assert await two.hosts() == of_worker


async def test_a_bad_configuration_is_told_whole_and_without_a_traceback(tmp_path: Path) -> None:
    ended = await muster("agent", "--min", "9", "--max", "2", "--lease-ttl", "x")
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 3
    for flag in ("--job (MUSTER_JOB)", "--min (MUSTER_MIN)", "--lease-ttl (MUSTER_LEASE_TTL)"):
        assert flag in ended.err


async def test_a_run_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "file").write_text, "")
    async with sidecar("127.0.0.1:1", tmp_path / "file" / "run") as one:
        assert await asyncio.wait_for(one.process.wait(), PATIENCE_S) == 2
    assert "--run-dir (MUSTER_RUN_DIR)" in one.lines[-1]["message"]


def may_mount() -> bool:
    """Whether a mount in a namespace of its own works here, which takes root."""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o noexec none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(probe).returncode == 0


async def test_a_run_directory_that_runs_no_programs_is_told(tmp_path: Path) -> None:
    if not await asyncio.to_thread(may_mount):
        pytest.skip("mounting takes root")
    agent = (
        f"mount -t tmpfs -o noexec none {tmp_path} && exec {sys.executable} -m console.main agent"
        f" --job j --member m --min 1 --max 1 --etcd-endpoints 127.0.0.1:1 --run-dir {tmp_path}"
    )
    shell = ("unshare", "--mount", "sh", "-c", agent)
    ended = await asyncio.to_thread(ran, *shell, timeout_s=PATIENCE_S)
    assert ended.returncode == 2
    said = json.loads(ended.stderr.splitlines()[-1])["message"]
    assert f"--run-dir (MUSTER_RUN_DIR): {tmp_path} is on a volume that is mounted noexec" in said
    assert "Traceback" not in ended.stderr


async def test_a_taken_port_is_told(server: EmbeddedServer, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for variable in ("MUSTER_HTTP_PORT", "MUSTER_C10D_PORT"):
            async with sidecar(server.endpoint, tmp_path, **{variable: port}) as one:
                assert await asyncio.wait_for(one.process.wait(), PATIENCE_S) == 2
            errors = [line for line in one.lines if line["level"] == "error"]
            assert any(port in line["message"] for line in errors)
            assert "Traceback" not in str(one.lines)


async def test_a_store_that_is_not_there_at_a_first_start_ends_it_in_time(tmp_path: Path) -> None:
    async with sidecar("127.0.0.1:1", tmp_path, MUSTER_START_TIMEOUT="1") as one:
        assert await asyncio.wait_for(one.process.wait(), PATIENCE_S) == 69
    assert "could not be read within 1 s" in one.lines[-1]["message"]
    assert "--etcd-endpoints (MUSTER_ETCD_ENDPOINTS)" in one.lines[-1]["message"]


async def test_a_worker_of_horovod_registers_once_its_agent_listens(
    server: EmbeddedServer, start: Start
) -> None:
    """Its image may still be on its way: a horovodrun's worker would fail there until then."""
    tunnel = str(free_ports(1)[0])
    async with start(MUSTER_TUNNEL_PORT=tunnel) as one:
        # It is ready all the same: else its container would never be started.
        assert not (await seen(server)).members
        (one.run_dir / "exec.sock").touch()

        async def registered() -> bool:
            return "node-0" in (await seen(server)).members

        await until(registered)
        await one.until_ready()


async def test_i5_a_store_that_is_away_for_three_lease_times_changes_nothing(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        server = EmbeddedServer(f"127.0.0.1:{free_ports(1)[0]}")
        async with server:
            one = await stack.enter_async_context(
                sidecar(server.endpoint, tmp_path, MUSTER_LEASE_TTL="3")
            )
            await one.until_ready()
            hosts, before = await one.hosts(), await member_that_comes(server)
        for _ in range(18):
            assert (await one.get("/healthz"))[0] == 200
            assert (await one.get("/readyz"))[0] == 200
            assert await one.hosts() == hosts
            await asyncio.sleep(0.5)
        metrics = (await one.get("/metrics"))[1].splitlines()
        assert "muster_lease_remaining_seconds 0.0" in metrics
        assert "muster_registered 0.0" in metrics
        async with EmbeddedServer(server.endpoint, engine=server.engine) as server:

            async def registered_again() -> bool:
                members = (await seen(server)).members
                return "node-0" in members and members["node-0"].incarnation > before.incarnation

            await until(registered_again)
            after = await member_that_comes(server)
            assert after.pod_uid == before.pod_uid
            assert await one.hosts() == hosts
            job = (await seen(server)).job
            assert job is not None
            assert job.generation == 1
            assert await one.end() == 0


async def test_a_fenced_sidecar_parks_and_leaves_the_newcomer_alone(
    server: EmbeddedServer, start: Start
) -> None:
    async with start("old", MUSTER_POD_UID="old") as old, start("new", MUSTER_POD_UID="new"):
        line = await old.until_logged("fenced")
        assert "pod new" in line["message"]
        assert (await old.get("/readyz"))[0] == 503
        assert (await old.get("/healthz"))[0] == 200
        assert await old.end() == 0
        assert (await the_member(server)).pod_uid == "new"


async def answer_to(port: int, request: bytes) -> bytes:
    """How an answer begins; who has heard enough may end the connection before all is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    writer.write(request)
    with suppress(OSError):
        writer.write_eof()
    with suppress(ConnectionError):
        answer = await reader.read(100)
    writer.close()
    return answer


async def test_i8_hostile_records_and_requests_do_not_end_it(
    server: EmbeddedServer, start: Start
) -> None:
    store = MemoryStore(server.engine)
    here = KEYS.in_generation(1)
    junk = [
        Put(KEYS.history + "00.x", b'{"schema":1,"what":["?"],"at_unix_s":"never"}'),
        Put(KEYS.history + "01.x", b"\xff\x00"),
        Put(KEYS.incarnation("node-8"), b'{"schema":1,"number":"9"}'),
        Put(here.member("node-9"), b'{"schema":1,"name":"$(reboot)","slots":1}'),
        Put(here.drain("x"), b"[]"),
        # Every field is there, and a name of which no key, hash or host list can be made.
        Put(here.member("node-7"), member("node-7", uid="\ud800").to_json()),
        Put(here.member("node-6"), member("node-0").to_json()),
        Put(here.drain("y"), Drain("y", "", "", "operator", 0.0).to_json()),
    ]
    async with start("a") as one:
        await store.txn([], junk)
        for request in (b"\x00" * 4096, b"GET /" + b"a" * 100_000 + b"\r\n", b"GET"):
            assert b"200 OK" not in await answer_to(one.http_port, request)
        async with start("b", "node-1") as two:
            await one.until_hosts(2)
            assert await two.end() == 0
        await one.until_hosts(1)
        assert (await one.get("/healthz"))[0] == 200
        assert (await one.get("/nothing"))[0] == 404


FULL_DISK = (
    "-c",
    "import resource, console.main;"
    " most = resource.getrlimit(resource.RLIMIT_FSIZE)[1];"
    " resource.setrlimit(resource.RLIMIT_FSIZE, (0, most)); console.main.main()",
)
"""Runs the command line where files can be made, and nothing be written into them."""


def make_room(process: asyncio.subprocess.Process) -> None:
    """Let a process that runs on a full disk write again."""
    most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))


async def test_it_starts_again_while_the_disk_is_full(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    async with start() as before:
        port = str(before.c10d_port)
        await before.end(signal.SIGKILL)
    await asyncio.to_thread((tmp_path / "discover_hosts.sh").chmod, 0o700)
    async with sidecar(
        server.endpoint, tmp_path, "node-0", FULL_DISK, MUSTER_C10D_PORT=port
    ) as refused:
        async with asyncio.timeout(PATIENCE_S):
            assert await refused.process.wait() == 2, "what differs has to be written"
        assert "cannot be used (File too large)" in refused.lines[-1]["message"]
    await asyncio.to_thread((tmp_path / "discover_hosts.sh").chmod, 0o755)
    async with start("", "node-0", FULL_DISK, MUSTER_C10D_PORT=port) as again:
        await again.until_logged("state_not_kept")
        await again.until_hosts(1)
        make_room(again.process)
        await again.until_logged("state_kept")
        kept = await asyncio.to_thread((tmp_path / "state.json").read_text)
        assert json.loads(kept)["incarnation"] == (await the_member(server)).incarnation
        await again.end()
    assert await asyncio.to_thread(lambda: list(tmp_path.rglob("*.tmp"))) == []


@pytest.mark.parametrize("port", [True, False], ids=["a port", "the socket alone"])
async def test_i9_nothing_listens_beyond_loopback_but_health_and_metrics(
    start: Start, port: bool
) -> None:
    # 127.0.0.2 stands for the pod's address: another one than that of the loopback listeners.
    no_port = {} if port else {"MUSTER_C10D_PORT": "0"}
    async with start(MUSTER_ADDRESS="127.0.0.2", **no_port) as one:
        found = await asyncio.to_thread(listening, one.process.pid)
        loopback = {("127.0.0.1", one.c10d_port)} if port else set()
        assert found - {("::1", one.c10d_port)} == loopback | {("127.0.0.2", one.http_port)}
        assert await asyncio.to_thread((one.run_dir / "c10d.sock").is_socket)
        for path in ("/", "/hosts", "/drain", "/debug", "/metrics/../env"):
            assert (await one.get(path))[0] == 404


def test_the_sidecar_loads_no_table_or_chart_nor_the_library_that_it_delivers() -> None:
    code = (
        "import sys, console.main, console.agent;"
        " print(console.agent.delivered_version(), *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    version, *loaded = done.stdout.split()
    assert version == __version__
    assert "agent.process" in loaded
    tables = {"rich", "torch", "numpy", "console.local", "console.job.output"}
    heavy = {"muster", "prometheus_client", "statistics", "importlib.resources"}
    assert (tables | heavy).isdisjoint(loaded)


def test_a_state_is_of_one_pod_and_holds_no_more_than_it_says(tmp_path: Path) -> None:
    directory = RunDir(str(tmp_path))
    kept = directory.state("")
    assert directory.state("") == kept
    assert directory.state("another pod").pod_uid == "another pod"
    fields = {"schema", "pod_uid", "generation", "incarnation"}
    assert set(json.loads((tmp_path / "state.json").read_text())) == fields
