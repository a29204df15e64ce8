# SPDX-License-Identifier: Apache-2.0
"""A real horovodrun on a host list that a test writes with the renderer of the sidecar.

All hosts are names for this machine, so a stand-in for ``ssh`` runs their commands here. Every
process carries the mark of its job, so that nothing is left behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.rundir.files import RunDir
from launcher_shim.horovod import hosts
from rdzv.listing import Listing
from rdzv.records.job import Member
from tests.support.training.job import JOB_MARK, ROOT, end_all

SCRIPT = ROOT / "tests" / "support" / "scripts" / "horovod_steps.py"
LOOK = ROOT / "launcher_shim" / "pod" / "discover_hosts.sh"
FORM_TIMEOUT_S = 150.0
"""For a world to form: each of its processes imports torch, on cores that are shared."""
BETWEEN_LOOKS_S = 0.1
END_TIMEOUT_S = 120.0
"""For a process to end that was killed."""

_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
setsid /bin/sh -c "$*" &
worker=$!
trap 'kill -s KILL -- "-$worker"' TERM
wait "$worker"
"""

_LOOK = """#!/bin/sh
echo >>looks
./discover_hosts.sh | sed '{change}'
"""

_SWEEPER = """
import sys
from tests.support.training.job import end_all
sys.stdin.read()
end_all(sys.argv[1])
"""


def horovod_folder() -> str:
    """The folder of horovodrun and of a python that has it; builds it if it is not there."""
    named = os.environ.get("MUSTER_TEST_HOROVOD")
    if named:
        return named
    made = subprocess.run(
        [ROOT / "scripts" / "toolchain" / "horovod", sys.executable],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return made.stdout.strip()


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s or condition(), f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Step:
    """One step that one worker has applied."""

    at_s: float
    host: str
    pid: int
    rank: int
    size: int
    number: int
    weight: int


class HorovodJob:
    """One job on hosts that are named by letters; ``with HorovodJob(...) as job``.

    Without ``revisions`` the list reaches horovodrun without its ``rev-`` line.
    """

    def __init__(
        self, directory: Path, folder: str, first: str, least: int, most: int, *, revisions: bool
    ) -> None:
        self._token = secrets.token_hex(6)
        self._directory = directory
        self._steps, self._gates = directory / "steps", directory / "gates"
        self._run_dir = RunDir(str(directory))
        self._list = hosts.HostList(generation=1)
        self._changing = threading.Lock()
        self._over = threading.Event()
        for made in (self._steps, self._gates, directory / "bin"):
            made.mkdir(parents=True)
        shutil.copy(LOOK, directory / "discover_hosts.sh")
        self._write_script("look.sh", _LOOK.format(change="" if revisions else "/^rev-/d"))
        self._write_script("bin/ssh", _SSH)
        self.list(first)
        self._nudging = threading.Thread(target=self._nudge, name="nudging")
        self._sweeper = subprocess.Popen(
            [sys.executable, "-c", _SWEEPER, self._token],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        with (directory / "log").open("wb") as log:
            self._launcher = subprocess.Popen(
                [
                    *("horovodrun", "-np", str(len(first)), "--min-np", str(least)),
                    *("--max-np", str(most), "--network-interface", "lo"),
                    *("--gloo-timeout-seconds", "120"),
                    *("--host-discovery-script", "./look.sh"),
                    *("python", str(SCRIPT)),
                ],
                cwd=directory,
                env={
                    "PATH": f"{directory}/bin:{folder}:{os.environ['PATH']}",
                    "HOME": str(directory),
                    "OMP_NUM_THREADS": "1",
                    "STEPS_DIR": str(self._steps),
                    "GATES_DIR": str(self._gates),
                    JOB_MARK: self._token,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        self._nudging.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._nudging.join()
        end_all(self._token)
        self._launcher.wait(END_TIMEOUT_S)
        self._sweeper.communicate(timeout=END_TIMEOUT_S)

    # -- what befalls it

    def list(self, names: str) -> None:
        """List the hosts of these names, and no other."""
        with self._changing:
            now = time.monotonic()
            self._list = hosts.follow(
                self._list,
                Listing(self._list.revision + 1, tuple(_member(name) for name in names)),
                1,
                left=lambda host: True,
                now=now,
                healthy_for_s=now,
                heard_s=now,
            )
            self._run_dir.deliver_hosts(self._list.render())

    def _nudge(self) -> None:
        while not self._over.wait(0.1):
            with self._changing:
                nudged = self._list.nudged(time.monotonic())
                if nudged is not self._list:
                    self._list = nudged
                    self._run_dir.deliver_hosts(nudged.render())

    def shut_gate(self, name: str) -> None:
        """Keep a worker that is started on this host from joining."""
        (self._gates / _token(name)).touch()

    def open_gate(self, name: str) -> None:
        (self._gates / _token(name)).unlink()

    # -- what is seen of it

    def until_at_the_gate(self, name: str) -> None:
        waits = self._gates / f"{_token(name)}.waits"
        wait_until(waits.exists, FORM_TIMEOUT_S, f"a worker on {name} waits at the gate")

    def until_joined(self, name: str) -> None:
        joined = self._gates / f"{_token(name)}.joined"
        wait_until(joined.exists, FORM_TIMEOUT_S, f"a worker on {name} has joined")

    def until_looked(self, times: int = 2) -> None:
        """Wait until horovodrun has run the script this often, from its beginning."""
        # One run may be under way: it may have read the list already.
        wanted = self._looks() + times + 1
        wait_until(lambda: self._looks() >= wanted, 120, "horovodrun looks at the host list")

    def _looks(self) -> int:
        looks = self._directory / "looks"
        return looks.stat().st_size if looks.exists() else 0

    def until_world(self, names: str, timeout_s: float = FORM_TIMEOUT_S) -> None:
        """Wait until exactly these hosts make steps together."""
        since_s = time.monotonic()
        wait_until(
            lambda: self.world(since_s) == names, timeout_s, f"{names} train\n{self.last_words()}"
        )

    def world(self, since_s: float) -> str:
        """The hosts of the newest step since then that its whole world has applied."""
        recent: dict[int, list[Step]] = {}
        for step in self.steps():
            if step.at_s > since_s:
                recent.setdefault(step.number, []).append(step)
        for _, same in sorted(recent.items(), reverse=True):
            if len(same) == same[0].size:
                return "".join(sorted(step.host.partition(".")[0] for step in same))
        return ""

    def no_step_for(self, duration_s: float) -> bool:
        """Whether nobody applies a step for so long, from now on.

        Counted in looks: while the machine stands still, nobody could.
        """
        before = len(self.steps())
        for _ in range(round(duration_s / BETWEEN_LOOKS_S)):
            time.sleep(BETWEEN_LOOKS_S)
            if len(self.steps()) > before:
                return False
        return True

    def until_still(self) -> None:
        """Wait until all workers are in a reset: for some time, none applies a step."""
        wait_until(lambda: self.no_step_for(1.0), 120, "the workers stop for a reset")

    def steps(self) -> Sequence[Step]:
        """Every step that was applied, as its workers tell."""
        steps = []
        for path in self._steps.iterdir():
            host, _, pid = path.name.rpartition(".")
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    at_s, rank, size, number, weight = line.split()
                    steps.append(
                        Step(
                            float(at_s),
                            *(host, int(pid), int(rank), int(size)),
                            *(int(number), int(weight)),
                        )
                    )
        return steps

    def assert_nothing_lost_or_doubled(self) -> None:
        """Every step but the last was applied once by every worker of its world."""
        # Of one that somebody has applied by now, everybody has applied the one before: that is in
        # every file which is read after this. Later ones may be under way.
        newest = max(step.number for step in self.steps())
        steps = self.steps()
        assert [step for step in steps if step.weight != step.number] == []
        applied = Counter(step.number for step in steps if step.number < newest)
        sizes = {step.number: step.size for step in steps if step.number < newest}
        assert sorted(sizes) == list(range(1, newest))
        assert applied == sizes

    @property
    def ended(self) -> bool:
        return self._launcher.poll() is not None

    def last_words(self) -> str:
        log = (self._directory / "log").read_text(errors="replace")
        return "\n".join(log.splitlines()[-30:])

    def _write_script(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text(text)
        path.chmod(0o755)


def _member(name: str) -> Member:
    return Member(
        name=name,
        pod_uid=f"uid-{name}",
        incarnation=1,
        address="127.0.0.1",
        node="",
        role="worker",
        slots=1,
        min_workers=1,
        max_workers=9,
    )


def _token(name: str) -> str:
    host = hosts.host_of(_member(name))
    assert host is not None
    return host.token
