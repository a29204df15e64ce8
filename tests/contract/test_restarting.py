# SPDX-License-Identifier: Apache-2.0
"""``muster-run`` around a torchrun that ends again and again; processes that outlive a world."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from launcher_shim.pod import run as muster_run
from launcher_shim.pod.delivery import RunDirectory
from launcher_shim.pod.relay import Relay
from launcher_shim.tcpstore import wire
from muster.progress import ProgressFile
from rdzv.store.memory.server import EmbeddedServer
from tests.support.sidecars.pod_programs import deliver, started
from tests.support.sidecars.processes import until
from tests.support.sidecars.raw_client import connected
from tests.support.sidecars.relayed_pod import RelayedPod, relayed_pod
from tests.support.sources import ROOT

TORCHRUN = """#!{python}
import os, signal, subprocess, sys
sys.path.insert(0, {root!r})
from muster.progress import ProgressFile
lives = {directory!r} + "/lives"
with open(lives, "a") as file:
    file.write("x")
life = os.path.getsize(lives)
print("life", life, flush=True)
first, last, end = sys.argv[1:][life - 1].split(",")
subprocess.Popen(["sleep", "600"], start_new_session=True)
file = ProgressFile({directory!r} + "/progress", {{}})
for step in range(int(first), int(last) + 1):
    file.write(step)
if end == "told":
    os.kill(os.getppid(), signal.SIGTERM)
    sys.exit(1)
if end.startswith("-"):
    os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""
"""Each of its arguments is one life: the first and last step that it tells of, and its end."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as the sidecar delivers it, for a job with a small number of steps."""
    path = tmp_path / "run"
    (path / "bin").mkdir(parents=True)
    deliver(path)
    (path / "bin" / "torchrun").unlink()
    (path / "env").write_text("MUSTER_RESTART_STEPS=20\n")
    torchrun = path / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=sys.executable, root=str(ROOT), directory=str(path)))
    torchrun.chmod(0o755)
    return path


def tell(run_dir: Path) -> None:
    """Leave what a rank of another torchrun has told."""
    ProgressFile(str(run_dir / "progress"), {"LOCAL_RANK": "1"}).write(1000)


@pytest.mark.parametrize(
    ("lives", "lived", "status"),
    [
        (["1,21,1", "1,30,-9", "900,920,143", "1,20,3", "1,99,0"], 4, 3),
        (["1,21,1", "1,99,0"], 2, 0),
        (["1,0,2", "1,99,0"], 1, 2),
        (["1,20,1", "1,99,0"], 1, 1),
        (["1,99,0", "1,99,0"], 1, 0),
    ],
    ids=["until it makes too few", "until it ends well", "a wrong option", "one too few", "well"],
)
async def test_it_is_started_again_for_as_long_as_it_makes_steps(
    run_dir: Path, lives: list[str], lived: int, status: int
) -> None:
    await asyncio.to_thread(tell, run_dir)
    async with started(run_dir, "muster-run", "--", str(run_dir / "torchrun"), *lives) as run:
        assert await run.ended() == status
    assert run.out == [f"life {n}" for n in range(1, lived + 1)]
    again = [line for line in run.err.splitlines() if "it is started again" in line]
    assert len(again) == lived - 1
    if status == 1:
        assert "it is not started again, for that takes 20" in run.err
    if lives[0] == "1,21,1":
        assert again[0].startswith("muster-run: torchrun ended with 1 after 20 steps: ")


@pytest.mark.parametrize("delivered", ["MUSTER_RESTART_STEPS=0\n", None])
async def test_it_is_never_started_again_where_nobody_says_so(
    run_dir: Path, delivered: str | None
) -> None:
    env = run_dir / "env"
    await asyncio.to_thread(env.unlink)
    if delivered is not None:
        await asyncio.to_thread(env.write_text, delivered)
    async with started(run_dir, "muster-run", "--", str(run_dir / "torchrun"), "1,99,7") as run:
        assert await run.ended() == 7
    assert run.out == ["life 1"]


async def test_one_that_is_told_to_end_as_it_ends_is_not_started_again(run_dir: Path) -> None:
    lives = ["1,99,told", "1,99,0"]
    async with started(run_dir, "muster-run", "--", str(run_dir / "torchrun"), *lives) as run:
        assert await run.ended() in (1, 143)  # as it came before the end was seen, or after it
    assert run.out == ["life 1"]


# --- a signal at any moment ---


class FakeContainer:
    """In the place of the processes: each life of the command ends at once, with 1.

    ``moments`` are called by name; they may send signals, as the kernel would.
    """

    def __init__(self, moments: dict[str, Callable[[], object]]) -> None:
        self.status: int | None = None
        self.ended = asyncio.Event()
        self.lives = 0
        self.runs = False
        self.got: list[int] = []
        self._moments = moments
        self._on_signal: Callable[[signal.Signals], None] = lambda number: None

    def adopt(self, on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal

    def start(self, *_: object) -> None:
        self.lives += 1
        self.status, self.runs = None, True
        self.ended.clear()
        asyncio.get_running_loop().call_soon(self._live)

    def _live(self) -> None:
        self._at("runs")
        self.status, self.runs = 1, False
        self.ended.set()
        self._at("ended")

    def signal(self, number: signal.Signals) -> None:
        self.got.append(number)

    async def group_ended(self, deadline_s: float) -> None:
        self._at("group")

    async def kill_rest(self) -> None:
        await asyncio.sleep(0)
        self._at("rest")
        await asyncio.sleep(0)

    def _at(self, moment: str) -> None:
        number = self._moments.get(moment, lambda: None)()
        if isinstance(number, signal.Signals):
            self._on_signal(number)


class Delivered(RunDirectory):
    """A run directory of which nothing is on a disk."""

    def delivered(self) -> dict[str, str]:
        return {}

    def environment(
        self, environ: Mapping[str, str], delivered: Mapping[str, str]
    ) -> dict[str, str]:
        return dict(environ)


class Idle:
    """In the place of what looks at processes and files; ``steps`` are those of each life."""

    steps: Iterator[int]

    def __init__(self, path: str) -> None:
        self.path = path

    def look(self) -> float | None:
        return None

    def withdraw(self) -> None:
        return

    def made(self) -> int:
        return next(self.steps)


def kept(
    monkeypatch: pytest.MonkeyPatch, container: FakeContainer, *steps: int
) -> muster_run.CommandRun:
    """``muster-run`` around a torchrun whose lives make so many steps each."""
    monkeypatch.setattr(muster_run, "Container", lambda: container)
    monkeypatch.setattr(Idle, "steps", iter(steps), raising=False)
    for name in ("StepWatch", "Reporter"):
        monkeypatch.setattr(muster_run, name, Idle)
    return muster_run.CommandRun(["torchrun"], Delivered("/nowhere", expected=True))


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        ("runs", signal.SIGTERM, 1),
        ("runs", signal.SIGINT, 1),
        ("ended", signal.SIGTERM, 143),
        ("rest", signal.SIGTERM, 143),
        ("rest", signal.SIGINT, 130),
        ("rest", signal.SIGHUP, 129),
    ],
)
async def test_a_signal_to_end_wins_over_the_next_start(
    monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals, status: int
) -> None:
    container = FakeContainer({moment: lambda: number})
    assert await kept(monkeypatch, container, 1000).run() == status
    assert container.lives == 1
    assert container.got == ([number] if (moment, number) == ("runs", signal.SIGINT) else [])


class FakeRelay:
    """In the place of the rendezvous port."""

    renewed = 0

    def renew(self) -> None:
        self.renewed += 1

    async def close(self) -> None:
        return


async def test_each_start_is_that_of_a_container_of_its_own_for_the_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = kept(monkeypatch, container := FakeContainer({}), 1000, 1000, 3)
    relay = FakeRelay()

    async def serve() -> FakeRelay:
        return relay

    monkeypatch.setattr(one, "_serve_port", serve)
    assert await one.run() == 1
    assert (container.lives, relay.renewed) == (3, 2)
    real = Relay(1, "/nowhere")
    former, real.took_part = real._container, True
    real.renew()
    assert real._container != former
    assert not real.took_part


async def test_a_signal_that_ends_nothing_between_two_starts_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    container = FakeContainer({"rest": lambda: signal.SIGUSR1})
    assert await kept(monkeypatch, container, 1000, 1000, 3).run() == 1
    assert container.lives == 3


WORLD = {"TORCHELASTIC_RUN_ID": "digits", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"}
START = """
import os, subprocess, sys, time
folder, world = sys.argv[1], dict(pair.split("=") for pair in sys.argv[2:])
def start(name, environ, then="exec sleep 600"):
    writes = f"echo $$ > {folder}/{name}.new; mv {folder}/{name}.new {folder}/{name}; {then}"
    return subprocess.Popen(["sh", "-c", writes], env={**os.environ, **environ})
def leave(name, then):
    start("worker", world, f"setsid sh -c 'echo $$ > {folder}/{name}; {then}' & exit").wait()
start("beside", {})
start("of-operator", {**world, "TORCHELASTIC_RUN_ID": ""})
start("other", {**world, "TORCHELASTIC_RUN_ID": "other"})
leave("stubborn", "trap : TERM; while :; do sleep 1; done")
leave("tracker", "exec sleep 600")
while not os.path.exists(folder + "/go"):
    time.sleep(0.05)
leave("late", "exec sleep 600")
os.execvp("sleep", ["sleep", "600"])
"""
"""A command that starts processes of workers that have ended, and others; each writes its number.
``other`` is a worker of another torchrun, which is the command itself."""
STAY = {"beside", "of-operator", "other"}
ALL = {*STAY, "stubborn", "tracker"}

Start = Callable[..., AbstractAsyncContextManager[RelayedPod]]


def live(folder: Path) -> set[str]:
    """The names of those that have not ended."""
    found = set()
    for path in folder.iterdir():
        try:
            stat = Path(f"/proc/{int(path.read_text() or 0)}/stat").read_text()
        except (OSError, ValueError):
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found.add(path.name)
    return found


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Start:
    """Starts a pod with such a command; its container's environment has ``environ``."""
    (tmp_path / "pids").mkdir()

    @asynccontextmanager
    async def running(**environ: str) -> AsyncIterator[RelayedPod]:
        world = ["=".join(pair) for pair in WORLD.items()]
        command = (sys.executable, "-c", START, str(tmp_path / "pids"), *world)
        async with relayed_pod(
            server.endpoint, tmp_path / "run", *command, of_container=environ
        ) as pod:
            await until_live(tmp_path / "pids", ALL)
            yield pod

    return running


async def until_live(folder: Path, names: set[str]) -> None:
    async def there() -> bool:
        return await asyncio.to_thread(live, folder) == names

    await until(there)


MEETING = "/torch.rendezvous.digits.{}/{}"


@pytest.mark.parametrize("name", ["MASTER_ADDR", "torchelastic/role_info/0"])
async def test_what_outlived_its_world_has_ended_before_the_next_one_starts(
    start: Start, tmp_path: Path, name: str
) -> None:
    async with start() as pod, connected(pod.port) as torchrun:
        await torchrun.open_rendezvous("digits")
        key = MEETING.format(1, name).encode()
        await torchrun.ask(wire.Set(key, b"x"))
        assert await torchrun.ask(wire.Get(key)) == b"x"
        assert await asyncio.to_thread(live, tmp_path / "pids") == STAY


async def test_requests_of_a_running_world_end_nothing(start: Start, tmp_path: Path) -> None:
    async with start() as pod:
        async with connected(pod.port) as torchrun:
            await torchrun.open_rendezvous("digits")
            for key in (b"/torch.rendezvous.digits", b"/torch.rendezvous.digits.0/some/key"):
                await torchrun.ask(wire.Set(key, b"x"))
                assert await torchrun.ask(wire.Get(key)) is not None
        async with connected(pod.port) as another:
            assert await another.ask(wire.Get(b"/a")) == b""
        assert await asyncio.to_thread(live, tmp_path / "pids") == ALL


async def test_what_outlived_the_last_world_of_a_torchrun_ends_with_it(
    start: Start, tmp_path: Path
) -> None:
    """The command goes on after it, as a shell with a second stage does."""
    async with start(MUSTER_KEEP_ORPHANS="0") as pod:
        async with connected(pod.port) as torchrun:
            await torchrun.open_rendezvous("digits")
            key = MEETING.format(1, "MASTER_PORT").encode()
            await torchrun.ask(wire.Set(key, b"x"))
            assert await torchrun.ask(wire.Get(key)) == b"x"
            await asyncio.to_thread((tmp_path / "pids" / "go").touch)
            await until_live(tmp_path / "pids", {*STAY, "late"})
        await until_live(tmp_path / "pids", STAY)


async def test_orphans_are_kept_if_the_pod_says_so(start: Start, tmp_path: Path) -> None:
    async with start(MUSTER_KEEP_ORPHANS="1") as pod, connected(pod.port) as torchrun:
        await torchrun.open_rendezvous("digits")
        key = MEETING.format(1, "MASTER_ADDR").encode()
        await torchrun.ask(wire.Set(key, b"x"))
        assert await torchrun.ask(wire.Get(key)) == b"x"
        assert await asyncio.to_thread(live, tmp_path / "pids") == ALL
