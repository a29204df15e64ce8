# SPDX-License-Identifier: Apache-2.0
"""docs/machines.md on machines that are network namespaces: its own commands, files and units.

What the page calls ``/etc/muster`` and so on lies in a folder of the test, one for each machine.
Of systemd only this is done here: a unit's variables, its commands, and SIGTERM to the main one.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.rundir.reports import read_lines
from tests.support.sources import ROOT
from tests.support.store.etcd_cluster import find_etcd
from tests.support.training.machines import END_TIMEOUT_S, Network, network
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.etcd, pytest.mark.timeout(1200)]

PAGE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
STORE, STORE_ADDRESS = "store", "10.0.0.10"
WORLD_TIMEOUT_S = 400.0
STEPS_BETWEEN = 10
ENOUGH = "1000000"
"""Steps: training does not end by itself."""
_STARTS = re.compile(r"rank 0 of (\d+) starts at step (\d+)")


def block(first_line: str) -> str:
    """The one block of the page that begins so."""
    (found,) = (
        text
        for text in re.findall(r"^```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        if text.startswith(f"# {first_line}")
    )
    return str(found)


class Cluster:
    """A store and machines, set up as the page has it."""

    def __init__(self, directory: Path, network: Network) -> None:
        self._directory, self.network = directory, network
        self.keys, self.shared = directory / "keys", directory / "shared"
        self._programs = directory / "bin"
        for folder in (self.keys, self.shared, self._programs):
            folder.mkdir()
        self._furnish()
        self._trains: dict[str, subprocess.Popen[bytes]] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def _furnish(self) -> None:
        shutil.copy(ROOT / "examples" / "torch_ddp.py", self.shared / "train.py")
        lines = {
            "muster": f'PYTHONPATH={ROOT} exec {sys.executable} -P -m console.main "$@"',
            "torchrun": f'exec {Path(sys.executable).parent}/torchrun "$@"',
            "etcd": f'exec {find_etcd()} "$@"',
            "etcdctl": f'exec {find_etcd().with_name("etcdctl")} "$@"',
        }
        for name, line in lines.items():
            (self._programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (self._programs / name).chmod(0o755)

    def here(self, text: str, name: str) -> str:
        """What the page says, with the folders that a machine has here."""
        of_machine = self._directory / name
        for folder, place in {
            "/etc/muster": of_machine / "etc",
            "/run/muster": of_machine / "run",
            "/var/lib/etcd": of_machine / "etcd",
            "/shared": self.shared,
            "/opt/muster/bin": self._programs,
        }.items():
            text = text.replace(folder, str(place))
        return text

    @property
    def environ(self) -> dict[str, str]:
        """What a shell of the page has."""
        return {"PATH": f"{self._programs}:/usr/sbin:/usr/bin:/bin", "HOME": str(self._directory)}

    def add(self, name: str, address: str, keys: tuple[str, ...]) -> Path:
        """Connect a machine that has these of the keys; return its ``/etc/muster``."""
        self.network.add(name, address)
        place = self._directory / name / "etc"
        place.mkdir(parents=True)
        (self._directory / name / "run").mkdir()
        for key in keys:
            shutil.copy(self.keys / key, place)
        return place

    def shell(self, name: str, script: str) -> str:
        """Run a script on a machine, where the keys are, to its end; return what it prints."""
        with (self._directory / "shell.out").open("w+b") as output:
            command = ("sh", "-euc", self.here(script, name))
            process = self.network.start(name, command, self.environ, output, self.keys)
            status = process.wait(END_TIMEOUT_S)
            output.seek(0)
            said = output.read().decode()
        assert status == 0, said
        return said

    def start_store(self) -> None:
        """Make the certificates, start etcd, and give the job a user."""
        self.network.add(STORE, STORE_ADDRESS)
        self.shell(STORE, block("certificates:"))
        place = self._directory / STORE / "etc"
        place.mkdir(parents=True)
        for key in ("ca.pem", "store.pem", "store-key.pem"):
            shutil.copy(self.keys / key, place)
        with (self._directory / "etcd.log").open("wb") as log:
            words = ("sh", "-c", self.here(block(f"on {STORE_ADDRESS}"), STORE))
            self.network.start(STORE, words, self.environ, log)
        wait = "until etcdctl endpoint health; do sleep 1; done\n"
        exports, _, commands = block("once, where root.pem").partition("etcdctl")
        self.shell(STORE, f"{exports}{wait}etcdctl{commands}")

    def start_machine(self, name: str, address: str) -> None:
        """``systemctl start muster-train``."""
        place = self.add(name, address, ("ca.pem", "digits.pem", "digits-key.pem"))
        (place / "digits.env").write_text(self.here(block("/etc/muster/digits.env"), name))
        text = block("/etc/muster/machine.env")
        (place / "machine.env").write_text(re.sub(r"10\.\d+\.\d+\.\d+", address, text))
        self._agents[name] = self._start_unit(name, "muster-agent", MUSTER_GATHER="1s")
        quick = {"OMP_NUM_THREADS": "1", "STEPS": ENOUGH}
        self._trains[name] = self._start_unit(name, "muster-train", **quick)

    def _start_unit(self, name: str, unit: str, **more: str) -> subprocess.Popen[bytes]:
        settings = [
            (key, self.here(value, name))
            for line in block(f"/etc/systemd/system/{unit}.service").splitlines()
            for key, found, value in [line.partition("=")]
            if found
        ]
        environ = {"PATH": "/usr/sbin:/usr/bin:/bin", **more}
        for key, value in settings:
            lines = {"Environment": [value]}.get(key, [])
            if key == "EnvironmentFile":
                lines = Path(value).read_text().splitlines()
            environ |= dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        before = [value for key, value in settings if key == "ExecStartPre"]
        (command,) = (value for key, value in settings if key == "ExecStart")
        script = " && ".join([*before, f"exec {command}"])
        with self.log(name, unit).open("ab") as output:
            return self.network.start(name, ("sh", "-c", script), environ, output)

    def stop_machine(self, name: str) -> tuple[int, int]:
        """``systemctl stop muster-train``: to muster-run alone, then the agent is not needed."""
        statuses = []
        for process in (self._trains[name], self._agents[name]):
            process.terminate()
            statuses.append(process.wait(END_TIMEOUT_S))
        return statuses[0], statuses[1]

    def log(self, name: str, unit: str) -> Path:
        return self._directory / name / f"{unit}.log"

    def step(self, name: str, size: int) -> int | None:
        """The step that a machine's rank reports, if it trains in a world of this size."""
        lines = read_lines(self._directory / name / "run" / "digits" / "progress")
        return next((line.step for line in lines if line.world_size == size), None)

    def trains_in(self, size: int, *names: str) -> None:
        """Wait until these have made steps in a world of so many."""
        since: dict[str, int] = {}

        def does(name: str) -> bool:
            step = self.step(name, size)
            return step is not None and step >= since.setdefault(name, step) + STEPS_BETWEEN

        wait_until(
            lambda: [does(name) for name in names].count(True) == len(names),
            WORLD_TIMEOUT_S,
            f"{', '.join(names)} train in a world of {size}",
            self.story,
        )

    def starts(self) -> list[tuple[int, int]]:
        """The size of each world that has begun, and the step that it began from."""
        logs = [log.read_text() for log in sorted(self._directory.glob("*/muster-train.log"))]
        begun = [(int(size), int(step)) for log in logs for size, step in _STARTS.findall(log)]
        return sorted(begun, key=lambda world: world[1])

    def history(self) -> list[dict[str, object]]:
        """What has happened, by the page's own user."""
        settings = " && ".join(("set -a", ". /etc/muster/digits.env", "set +a"))
        told = self.shell("vm3", f"{settings} && muster history --json")
        return [json.loads(line) for line in told.splitlines()]

    def story(self) -> str:
        """The last lines of every log."""
        logs = [self._directory / "etcd.log", *sorted(self._directory.glob("*/muster-*.log"))]
        tails = [(log, log.read_text(errors="replace").splitlines()[-25:]) for log in logs]
        return "\n".join("\n".join([f"-- {log}", *lines]) for log, lines in tails)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with network() as made:
        yield Cluster(tmp_path, made)


def test_the_page_s_machines_lose_no_step_at_a_join_and_a_drain(cluster: Cluster) -> None:
    cluster.start_store()
    cluster.start_machine("vm1", "10.0.0.11")
    cluster.start_machine("vm2", "10.0.0.12")
    cluster.trains_in(2, "vm1", "vm2")
    cluster.start_machine("vm3", "10.0.0.13")
    cluster.trains_in(3, "vm1", "vm2", "vm3")
    assert cluster.stop_machine("vm2") == (143, 0), cluster.story()
    cluster.trains_in(2, "vm1", "vm3")

    log = cluster.log("vm1", "muster-agent").read_text()
    agreed = re.findall(r"all save step (\d+): (newcomers join|vm2 leaves)", log)
    assert [why for _, why in agreed[-2:]] == ["newcomers join", "vm2 leaves"], cluster.story()
    worlds = cluster.starts()
    assert [step for _, step in worlds] == [0, *(int(step) for step, _ in agreed)], worlds
    assert [size for size, _ in worlds[-2:]] == [3, 2], worlds

    cluster.network.power_off("vm1")
    cluster.trains_in(1, "vm3")
    told = [(one["what"], one["member"]) for one in cluster.history()]
    assert ("lost", "vm1") in told
    drains = [one for one in cluster.history() if one["what"] == "drain"]
    assert [(one["member"], one["details"]["outcome"]) for one in drains] == [  # type: ignore[index]
        ("vm2", "committed")
    ]


def test_the_page_s_store_lets_in_nobody_without_a_certificate(cluster: Cluster) -> None:
    """And the job's own user reaches no other job's records."""
    cluster.start_store()
    plain = cluster.shell(STORE, f"etcdctl --endpoints http://{STORE_ADDRESS}:2379 get x || true")
    assert "Error" in plain or "deadline" in plain
    asked = (
        f"export ETCDCTL_ENDPOINTS=https://{STORE_ADDRESS}:2379 ETCDCTL_CACERT=ca.pem\n"
        "etcdctl get x || true\n"
        "export ETCDCTL_CERT=digits.pem ETCDCTL_KEY=digits-key.pem\n"
        "etcdctl get --prefix /muster/v1/default/digits/ && etcdctl put x y || true\n"
    )
    said = cluster.shell(STORE, asked)
    assert "certificate required" in said or "bad certificate" in said or "deadline" in said
    assert "permission denied" in said
