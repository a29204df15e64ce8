# SPDX-License-Identifier: Apache-2.0
"""``muster-run`` in the pods of a Horovod job: what horovodrun becomes, and how a worker's ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from agent.config import Config
from agent.rundir.files import RunDir
from launcher_shim.hosts import token_of
from rdzv.settings import load
from tests.support.ports import free_ports
from tests.support.sidecars.notices import notice_server
from tests.support.sidecars.pod_programs import Started, started
from tests.support.sidecars.processes import until

SHOWS = """#!/bin/sh
printf '%s\\n' "$@"
printf 'ssh=%s\\n' "$(command -v ssh)"
env | grep -c -e SECRET -e OMPI_MCA
exit 7
"""
SCRIPT = """#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from horovod.runner.launch import run_commandline
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
"""
"""As pip writes it."""
ENTRY_POINT = """
import multiprocessing
import os
import sys
print("imported", flush=True)
def run_commandline():
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    with open("/proc/self/comm") as name:
        print(sys.path[0], child.exitcode, name.read().strip(), *sys.argv, sep="\\n")
    return 7
"""
"""horovodrun's module, which starts a child as it does for each look at the host list."""
KUBEXEC = """#!/bin/sh
printf 'kubexec %s\\n' "$@"
"""
POD_UID = "11111111-2222"
MEMBER = "job-worker-0"
HOST = token_of(MEMBER, POD_UID)


def delivered(path: Path, role: str) -> RunDir:
    """A run directory as the sidecar of such a pod has it."""
    run_dir = RunDir(str(path / role))
    run_dir.make()
    run_dir.deliver(config(path, role), HOST)
    return run_dir


def config(path: Path, role: str) -> Config:
    told = {
        **{"MUSTER_JOB": "job", "MUSTER_MEMBER": MEMBER, "MUSTER_ADDRESS": "127.0.0.1"},
        **{"MUSTER_MIN": "1", "MUSTER_MAX": "3", "MUSTER_ROLE": role, "MUSTER_SLOTS": "1"},
        **{"MUSTER_RUN_DIR": str(path / role), "MUSTER_ETCD_ENDPOINTS": "none:1"},
        "MUSTER_C10D_PORT": str(free_ports(1)[0]),
    }
    return load(Config, {}, told)


@pytest.fixture
def launcher(tmp_path: Path) -> RunDir:
    return delivered(tmp_path, "launcher")


@pytest.fixture
def worker(tmp_path: Path) -> RunDir:
    return delivered(tmp_path, "worker")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of an image with a horovodrun that shows what it is given."""
    folder = tmp_path / "image"
    folder.mkdir()
    program = folder / "horovodrun"
    program.write_text(SHOWS)
    program.chmod(0o755)
    return folder


async def ends(status: int, run_dir: RunDir, *command: str, **environ: str) -> Started:
    """Run ``muster-run`` around a command in the pod of that run directory."""
    async with started(run_dir.path, "muster-run", "--", *command, **environ) as run:
        assert await run.ended() == status
    return run


def before_others(image: Path) -> str:
    """The PATH of a container in which the image's programs are found first."""
    return f"{image}:{os.environ['PATH']}"


LINE = (
    *("horovodrun", "-np", "2", "--min-np", "1", "--max-np", "3"),
    *("--host-discovery-script", "/etc/mpi/discover_hosts.sh", "python", "train.py"),
)


@pytest.mark.parametrize("by", ["name", "path", "shell"])
async def test_horovodrun_gets_the_host_list_and_an_ssh_of_musters(
    launcher: RunDir, image: Path, by: str
) -> None:
    command = {
        "name": LINE,
        "path": (str(image / "horovodrun"), *LINE[1:]),
        "shell": ("sh", "-c", " ".join(LINE)),
    }[by]
    environ = {
        "PATH": os.environ["PATH"] if by == "path" else before_others(image),
        "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
        "SECRET_TOKEN": "hunter2",
    }
    run = await ends(7, launcher, *command, **environ)
    told = run.out
    assert told[told.index("--host-discovery-script") + 1] == f"{launcher.path}/discover_hosts.sh"
    assert told[told.index("--network-interface") + 1] == "lo"
    assert told[-4:] == ["python", "train.py", f"ssh={launcher.path}/remote-shell/ssh", "0"]
    assert "/etc/mpi/discover_hosts.sh is overruled" in run.err


@pytest.fixture
def modules(image: Path) -> Path:
    """A folder of Python's, with the module that the image's horovodrun, now a script, is of."""
    program, package = image / "horovodrun", image / "modules" / "horovod" / "runner"
    program.write_text(SCRIPT.format(python=sys.executable))
    package.mkdir(parents=True)
    (package / "launch.py").write_text(ENTRY_POINT)
    return image / "modules"


async def test_horovodruns_children_do_not_import_all_of_it_again(
    launcher: RunDir, image: Path, modules: Path
) -> None:
    environ = {"PATH": before_others(image), "PYTHONPATH": str(modules)}
    run = await ends(7, launcher, *LINE, **environ)
    assert run.out[:5] == ["imported", str(image), "0", "horovodrun", str(image / "horovodrun")]
    assert run.out[-2:] == ["python", "train.py"]


@pytest.fixture
def hook(launcher: RunDir) -> Path:
    """In the place of the hook: says what it is given."""
    path = launcher.path / "kubexec.sh"
    path.unlink(missing_ok=True)
    path.write_text(KUBEXEC)
    path.chmod(0o755)
    return path


async def test_that_ssh_calls_the_hook_with_what_it_is_given(launcher: RunDir, hook: Path) -> None:
    ssh = str(hook.parent / "remote-shell" / "ssh")
    run = await ends(0, launcher, ssh, "-o", "A=b", "w.1", "a b")
    assert run.out == ["kubexec -o", "kubexec A=b", "kubexec w.1", "kubexec a b"]


async def test_what_cannot_hold_ends_with_one_sentence(launcher: RunDir, image: Path) -> None:
    line = ("horovodrun", "-np", "2", "-H", "a:1,b:1", "python", "train.py")
    run = await ends(2, launcher, *line, PATH=before_others(image))
    (sentence,) = run.err.splitlines()
    assert "horovodrun's -H cannot hold" in sentence


async def test_what_was_delivered_must_be_readable_for_it(launcher: RunDir, image: Path) -> None:
    env = launcher.path / "env"
    spoilt_meanwhile = ("sh", "-c", f"rm {env}; mkdir {env}; exec {' '.join(LINE)}")
    run = await ends(2, launcher, *spoilt_meanwhile, PATH=before_others(image))
    assert run.out == []
    assert run.err.splitlines()[0].startswith(f"muster-run: {env} ")


@pytest.mark.parametrize(("role", "line"), [("worker", LINE), ("launcher", ("horovodrun", "-v"))])
async def test_elsewhere_it_is_the_images_own(
    launcher: RunDir, worker: RunDir, image: Path, role: str, line: tuple[str, ...]
) -> None:
    run_dir = launcher if role == "launcher" else worker
    run = await ends(7, run_dir, *line, PATH=before_others(image))
    assert run.out[: len(line) - 1] == list(line[1:])


async def test_a_drained_workers_container_ends_with_0(worker: RunDir) -> None:
    command = (str(worker.path / "bin" / "muster-exec"), "--", "/usr/sbin/sshd", "-De")
    async with (
        notice_server(worker.path) as server,
        started(worker.path, "muster-run", "--", *command, MUSTER_RUN_DIR=str(worker.path)) as run,
    ):
        await listening(worker)
        run.process.send_signal(signal.SIGTERM)
        await server.came()
        server.say("released", "it may go", outcome="committed")
        assert await run.ended() == 0


async def test_an_agent_that_was_killed_is_started_again(worker: RunDir) -> None:
    command = str(worker.path / "bin" / "muster-exec")
    async with started(
        worker.path, "muster-run", "--", command, MUSTER_RUN_DIR=str(worker.path)
    ) as run:
        before = await listening(worker)
        (agent,) = await asyncio.to_thread(children, run.process.pid)
        os.kill(agent, signal.SIGKILL)
        await listening(worker, not_=before.st_ino)
        run.process.send_signal(signal.SIGTERM)
        assert await run.ended() == 0


async def listening(run_dir: RunDir, not_: int = 0) -> os.stat_result:
    """The agent's socket, once it is there."""
    found: list[os.stat_result] = []

    def look() -> bool:
        with suppress(FileNotFoundError):
            found.append((run_dir.path / "exec.sock").stat())
        return bool(found) and found[-1].st_ino != not_

    async def there() -> bool:
        return await asyncio.to_thread(look)

    await until(there)
    return found[-1]


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in found.split()]
