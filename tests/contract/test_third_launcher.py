# SPDX-License-Identifier: Apache-2.0
"""A launcher besides torchrun and horovodrun: one class, which all parts of Muster then ask."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from rdzv.keys import JobKeys
from rdzv.records.job import Member
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.ports import free_ports
from tests.support.sidecars.processes import PATIENCE_S, ended, started

TOY = """
import sys
from launcher_shim.pod import launchers
from launcher_shim.launcher import Launcher

class Toy(Launcher):
    name = "toyrun"
    library = "Toy"
    folder = "torchrun"
    agent = "horovod/exec"
    has_rounds = False
    is_central = True

    def started(self, own, words, environ, delivered, run_dir):
        hosts = run_dir + "/discover_hosts.sh"
        return [own, "--hosts", hosts, *words], dict(environ), ["toyrun gets the host list"]

launchers.CENTRAL = Toy()
launchers.LAUNCHERS.append(launchers.CENTRAL)
"""
PROGRAM = f"""#!{sys.executable}
import signal, subprocess, sys, time
def end(number, frame):
    print("toyrun ends", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("hosts:", subprocess.check_output(sys.argv[2]).decode().split(), flush=True)
while True:
    time.sleep(0.05)
"""
MUSTER = ("-P", "-c", TOY + "from console.main import main\nmain()")
MUSTER_RUN = ("-P", "-c", TOY + "from launcher_shim.pod.run import main\nsys.exit(main())")
FIRST = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(Path.cwd())!r})\n{TOY}"
FIRST += "from launcher_shim.pod.launchers import main\nsys.exit(main())\n"
MANIFEST = """\
{apiVersion: batch/v1, kind: Job, metadata: {name: digits}, spec: {template: {spec: {
  containers: [{name: main, image: toy, command: [toyrun, script]}]}}}}
"""
KEYS = JobKeys("default", "digits")
WORKER = Member("w", "uid-w", 9, "127.0.0.1", "", "worker", 1, 1, 2)


def put(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toyrun").write_text(text)
    (folder / "toyrun").chmod(0o755)
    return folder


async def holds(path: Path, text: str) -> None:
    """Wait until a file has ``text``."""

    def has() -> bool:
        return path.exists() and text.encode() in path.read_bytes()

    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await asyncio.to_thread(has):
                return
            await asyncio.sleep(0.05)


async def line_of(stream: asyncio.StreamReader, text: str) -> str:
    """Wait for the line that has ``text``."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in (line := (await stream.readline()).decode()):
            assert line, text
    return line


async def test_a_third_launcher_is_started_served_named_and_drained(tmp_path: Path) -> None:
    run, image = tmp_path / "run", await asyncio.to_thread(put, tmp_path / "image", PROGRAM)
    relay, http, tunnel = map(str, free_ports(3))
    async with EmbeddedServer() as server:
        job = {"MUSTER_JOB": "digits", "MUSTER_ETCD_ENDPOINTS": server.endpoint}
        pod = {
            **{"MUSTER_MEMBER": "l", "MUSTER_POD_UID": "uid-l", "MUSTER_ADDRESS": "127.0.0.1"},
            **{"MUSTER_ROLE": "launcher", "MUSTER_MIN": "1", "MUSTER_MAX": "2"},
            **{"MUSTER_C10D_PORT": "0", "MUSTER_RELAY_PORT": relay, "MUSTER_HTTP_PORT": http},
            **{"MUSTER_TUNNEL_PORT": tunnel, "MUSTER_RUN_DIR": str(run), "MUSTER_GRACE_S": "600"},
        }
        sidecar = await started(("agent",), {**job, **pod}, MUSTER)
        command = None
        try:
            await holds(run / "hosts", "rev-")
            await holds(run / "bin/toyrun", "")
            await asyncio.to_thread(put, run / "bin", FIRST)  # the delivered archive has no toy
            key = KEYS.in_generation(1).member("w")
            await MemoryStore(server.engine).txn([], [Put(key, WORKER.to_json())])
            await holds(run / "hosts", "w.")
            environ = {"MUSTER_RUN_DIR": str(run), "PATH": f"{image}:/usr/bin:/bin"}
            command = await started(("--", "toyrun", "script"), environ, MUSTER_RUN)
            assert command.stdout is not None
            assert "w." in await line_of(command.stdout, "hosts:")
            await holds(run / "launch/launcher.json", '"toyrun"')
            status = await ended(("status",), job, MUSTER)
            assert "no rank that toyrun starts has reported yet" in status.out, status
            command.send_signal(signal.SIGTERM)
            await line_of(command.stdout, "toyrun ends")
            async with asyncio.timeout(PATIENCE_S):
                _, log = await command.communicate()
            assert command.returncode == 0
            assert b"toyrun gets the host list" in log
            assert b"SIGTERM is held" in log
        finally:
            for process in (command, sidecar):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.communicate()


async def test_a_third_launcher_is_named_by_inject_and_checked_by_local(tmp_path: Path) -> None:
    image = await asyncio.to_thread(put, tmp_path / "image", PROGRAM)
    manifest = tmp_path / "job.yaml"
    await asyncio.to_thread(manifest.write_text, MANIFEST)
    store = ("--etcd-endpoints", "etcd:2379", "--image", "muster-sidecar")
    role = ("--horovod", "launcher", "--min", "1", "--max", "2")
    injected = await ended(("inject", str(manifest), *role, *store), {}, MUSTER)
    assert "container main: the toyrun in it gets Muster's host list" in injected.err, injected
    environ = {"PATH": f"{image}:/usr/bin:/bin"}
    local = await ended(("local", "--compare", "--", "toyrun", "script"), environ, MUSTER)
    assert "toyrun does not train without hosts" in local.err, local
