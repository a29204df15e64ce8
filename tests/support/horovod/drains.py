# SPDX-License-Identifier: Apache-2.0
"""Ends pods of a Horovod job as the kubelet does, and says what became of their drains."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from console.local.processes.marked import marked, send
from launcher_shim.horovod.hosts import SETTLE_S
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain
from tests.support.horovod.cluster import END_TIMEOUT_S, ROOT, HorovodCluster, Node
from tests.support.training.background import Background
from tests.support.training.witness import Witness

DRAINED_STATUS = 143
DELISTED_S = 120.0
"""For the host list to follow a notice; how soon it does is measured with the benchmarks."""
LOOK_S = 0.02
AT_ONCE_LOOKS = 500
"""For it to follow where another host is settled: in fewer looks than one needs to settle.

Counted in looks: while the machine stands still, nobody could.
"""


@dataclass(frozen=True, slots=True)
class Going:
    """A pod that is being ended; ``asked_s``, monotonic, is when its sidecar had the notice."""

    node: Node
    asked_s: float
    replaced: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """One that has ended; durations in seconds since the notice.

    It was still listed at ``delisted_s``, if at all, and its drain was over by ``over_s``.
    """

    delisted_s: float
    over_s: float
    released_s: float
    drain: Drain


class Drains:
    """What befalls a job whose pods are drained; every host list that it has seen is kept."""

    def __init__(self, job: HorovodCluster, witness: Witness) -> None:
        self.job = job
        self.told: list[Drained] = []
        self._witness = witness
        self._lists: list[tuple[float, frozenset[str]]] = []
        self._over_s: dict[str, float] = {}

    def delete(self, *names: str, replaced: bool = True) -> list[Going]:
        """Begin to end pods: each sidecar's preStop hook, and SIGTERM to each container.

        They must go from the host list at once, or if none but them is settled on it, once one
        is. Where nobody is there yet to replace them, they need not.
        """
        settled = self._settled()
        nodes = [self.job.nodes.pop(name) for name in names]
        for node in nodes:
            self.job.tell(f"{node.name}: the pod is deleted")
        hooks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "console.main", "notice"),
                    *("--run-dir", str(node.pod.run_dir)),
                ],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
            )
            for node in nodes
        ]
        for hook in hooks:
            assert hook.wait(60) == 0
        going = [Going(node, time.monotonic(), replaced) for node in nodes]
        for node in nodes:
            assert node.main is not None
            send({node.main.pid}, signal.SIGTERM)
        leaving = {pod.node.host for pod in going}
        if replaced:
            self.job.until(lambda: not leaving & self.tokens(), DELISTED_S, "they are delisted")
            if settled - leaving:
                self._delisted_at_once(going)
        return going

    def _settled(self) -> set[str]:
        """Hosts that have been on the list for so long that horovodrun surely uses them."""
        since_s: dict[str, float] = {}
        for at_s, tokens in tuple(self._lists):
            for host in tokens:
                since_s.setdefault(host, at_s)
        before_s = time.monotonic() - SETTLE_S
        return {host for host in self.tokens() if since_s.get(host, math.inf) < before_s}

    def _delisted_at_once(self, going: Sequence[Going]) -> None:
        """Assert that nobody who is going was still listed for many looks."""
        for pod in going:
            looks = sum(
                at_s > pod.asked_s and pod.node.host in tokens
                for at_s, tokens in tuple(self._lists)
            )
            assert looks < AT_ONCE_LOOKS, f"{pod.node.name} was still listed in {looks} looks"

    def _last_listed_s(self, host: str) -> float:
        """When a host was last seen on the list."""
        return max((at_s for at_s, tokens in self._lists if host in tokens), default=-math.inf)

    def gone(self, *going: Going) -> list[Drained]:
        """Wait until the containers have ended; end the rest of their pods."""
        told = [self._gone(pod) for pod in going]
        self.told += told
        return told

    def _gone(self, pod: Going) -> Drained:
        node = pod.node
        assert node.main is not None
        assert node.sidecar is not None
        self.job.until(
            lambda: node.main is not None and node.main.poll() is not None,
            END_TIMEOUT_S,
            f"the container of {node.name} ends",
        )
        released_s = time.monotonic() - pod.asked_s
        self.job.tell(f"{node.name}: its container ended with {node.main.returncode}")
        assert node.main.returncode == DRAINED_STATUS
        assert self._notes(node) == []
        left = self.job.workers(node) - marked(self.job.run, "launcher")
        assert not left, f"{node.name} has ended, its processes {left} have not"
        self.job.until(
            lambda: node.pod.uid in self._over_s,
            END_TIMEOUT_S,
            f"the outcome of {node.name} is on record",
        )
        drain = self.drain_of(node)
        assert drain is not None
        node.sidecar.terminate()
        assert node.sidecar.wait(END_TIMEOUT_S) == 0
        delisted_s = max(0.0, self._last_listed_s(node.host) - pod.asked_s)
        over_s = self._over_s[node.pod.uid] - pod.asked_s
        if pod.replaced and drain.outcome == "committed":
            assert delisted_s < over_s, f"{node.name} was let go while it was still listed"
        return Drained(delisted_s, over_s, released_s, drain)

    def replace(self, *names: str) -> None:
        """Drain pods that train, and once they have gone start others of the same names."""
        stay = {*self.job.training()} - {*names}
        self.gone(*self.delete(*names))
        self.job.until_world(*stay)
        self.job.add(*names)
        self.job.until_world(*stay, *names)

    def pause(self, duration_s: float) -> None:
        """Let so much time go by."""
        end_s = time.monotonic() + duration_s
        self.job.until(lambda: time.monotonic() >= end_s, duration_s + 5, "time goes by")

    def open_gate(self, node: Node) -> None:
        """Let a worker join that ``shut_gate`` of the job keeps, also when its node is going."""
        (self.job.directory / "gates" / node.host).unlink()

    def stay(self, *going: Going, duration_s: float = 3.0) -> None:
        """Assert that these containers are held for so long, with their workers in them."""
        self.pause(duration_s)
        for pod in going:
            assert pod.node.main is not None
            assert pod.node.main.poll() is None
            assert self._notes(pod.node)

    def all_committed(self, drains: int) -> None:
        """Assert that so many pods were drained, and that no step was lost or made twice."""
        self.job.goes_on(10)
        assert [told.drain.outcome for told in self.told] == ["committed"] * drains
        self.job.assert_nothing_lost_or_doubled()
        for told in self.told:
            self.job.tell(
                f"{told.drain.member}: delisted after {told.delisted_s:.2f} s,"
                f" released after {told.released_s:.2f} s"
            )

    @staticmethod
    def _notes(node: Node) -> list[Path]:
        """The notes of worker commands that run in a pod."""
        return list((node.pod.run_dir / "workers").glob("*.json"))

    def drain_of(self, node: Node) -> Drain | None:
        """The pod's drain, as the store has it."""
        return self._witness.sight.membership.drains.get(node.pod.uid)

    def tokens(self) -> frozenset[str]:
        """The hosts that the launcher's list gives slots."""
        text = (self.job.launcher.pod.run_dir / "hosts").read_text()
        lines = text.splitlines()
        assert lines[-1].startswith("rev-"), text
        return frozenset(line.partition(":")[0] for line in lines[:-1])

    def watch(self, over: threading.Event) -> None:
        """Note every look at the host list, and when drains were seen to be over."""
        while not over.wait(LOOK_S):
            self._lists.append((time.monotonic(), self.tokens()))
            for uid, drain in self._witness.sight.membership.drains.items():
                if drain.outcome:
                    self._over_s.setdefault(uid, time.monotonic())


@contextmanager
def draining(
    directory: Path,
    folder: str,
    endpoints: Sequence[str],
    background: Background,
    *,
    grace_s: float = 30.0,
    **settings: Any,
) -> Iterator[Drains]:
    """Run a job, with a look at the store, and with the host list watched."""
    with HorovodCluster(directory, folder, endpoints, **settings) as job:
        job.settings = replace(job.settings, grace_s=grace_s)
        keys = JobKeys(job.settings.namespace, job.settings.job)
        witness = Witness(background, endpoints, keys)
        drains = Drains(job, witness)
        over = threading.Event()
        watching = threading.Thread(target=drains.watch, args=(over,), name="host list")
        try:
            job.start()
            watching.start()
            yield drains
        finally:
            over.set()
            if watching.ident is not None:
                watching.join()
            witness.close()
