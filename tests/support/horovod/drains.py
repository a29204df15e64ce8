# SPDX-License-Identifier: Apache-2.0
"""Ends pods of a Horovod job as the kubelet does, and says what became of their drains."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from console.local.processes import send
from console.local.settings import LAUNCHER
from launcher_shim.exit_status import EXIT_DONE
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain
from tests.support.horovod.cluster import HorovodCluster, token
from tests.support.training.background import Background
from tests.support.training.pods import END_TIMEOUT_S, Node
from tests.support.training.witness import Witness


class Drains:
    """What befalls a job whose pods are drained."""

    def __init__(self, job: HorovodCluster, witness: Witness) -> None:
        self.job = job
        self.told: list[Drain] = []
        self._witness = witness

    def delete(self, *names: str, replaced: bool = True) -> list[Node]:
        """Begin to end pods: each sidecar's preStop hook, and SIGTERM to each container.

        They must go from the host list before they are let go; where nobody is there yet to
        replace them, they need not.
        """
        nodes = [self.job.nodes.pop(name) for name in names]
        for node in nodes:
            self.job.tell(f"{node.name}: the pod is deleted")
            node.notify()
        for node in nodes:
            assert node.launcher is not None
            send({node.launcher.pid}, signal.SIGTERM)
        if replaced:
            self.job.until(
                lambda: not sum(map(self._listed, nodes)), END_TIMEOUT_S, "they are delisted"
            )
        return nodes

    def _listed(self, node: Node) -> bool:
        """Whether a pod is on the launcher's list still: then it may not have been let go."""
        drain = self.drain_of(node)  # looked at first
        listed = token(node) in self.job.launcher.tokens()
        over = drain is not None and drain.outcome == "committed"
        assert not (over and listed), f"{node.name} was let go while it was still listed"
        return listed

    def gone(self, *nodes: Node) -> list[Drain]:
        """Wait until the containers have ended; end the rest of their pods."""
        drains = [self._gone(node) for node in nodes]
        self.told += drains
        return drains

    def _gone(self, node: Node) -> Drain:
        launcher = node.launcher
        assert launcher is not None
        self.job.until(
            lambda: launcher.poll() is not None, END_TIMEOUT_S, f"the container of {node.name} ends"
        )
        assert launcher.returncode == EXIT_DONE  # a failed worker would end an MPIJob
        assert self._notes(node) == []
        left = self.job.workers(node) - self.job.processes(LAUNCHER)
        assert not left, f"{node.name} has ended, its processes {left} have not"
        drain = self.until_over(node)
        self.job.stop_sidecar(node)
        return drain

    def until_over(self, node: Node) -> Drain:
        """Wait until the outcome of a drain is on record."""
        drain: Drain | None = None

        def over() -> bool:
            nonlocal drain
            drain = self.drain_of(node)
            return drain is not None and bool(drain.outcome)

        self.job.until(over, END_TIMEOUT_S, f"the outcome of {node.name} is on record")
        assert drain is not None
        return drain

    def replace(self, *names: str) -> None:
        """Drain pods that train, and once they have gone start others of the same names."""
        stay = {*self.job.training()} - {*names}
        self.gone(*self.delete(*names))
        self.job.until_world(*stay)
        self.job.add(*names)
        self.job.until_world(*stay, *names)

    def held(self, *nodes: Node) -> list[Node]:
        """Assert that these containers are held; return those in which workers run."""
        for node in nodes:
            assert node.launcher is not None
            assert node.launcher.poll() is None
        return [node for node in nodes if self._notes(node)]

    def all_committed(self, drains: int) -> None:
        """Assert that so many pods were drained, and that no step was lost or made twice."""
        self.job.goes_on(10)
        assert [drain.outcome for drain in self.told] == ["committed"] * drains
        self.job.assert_nothing_lost_or_doubled()

    @staticmethod
    def _notes(node: Node) -> list[Path]:
        """The notes of worker commands that run in a pod."""
        return list((node.run_dir / "workers").glob("*.json"))

    def drain_of(self, node: Node) -> Drain | None:
        """The pod's drain, as the store has it."""
        return self._witness.sight.membership.drains.get(node.pod.uid)


@contextmanager
def draining(
    directory: Path, endpoints: Sequence[str], background: Background, **settings: Any
) -> Iterator[Drains]:
    """Run a job, with a look at the store."""
    job = HorovodCluster(directory, endpoints, **settings)
    keys = JobKeys(job.settings.namespace, job.settings.job)
    witness = Witness(background, endpoints, keys)
    try:
        with job:
            yield Drains(job, witness)
    finally:
        witness.close()
