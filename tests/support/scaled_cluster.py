# SPDX-License-Identifier: Apache-2.0
"""A job on the API server of ``cluster_api``: its owner's controller, its nodes, its sidecars."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from console.remote.scaled_job import ScaledJob
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from tests.support.cluster_api import FakeApi
from tests.support.containers import Asked

NAMESPACE = "team"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
OF = f"/apis/apps/v1/namespaces/{NAMESPACE}"
COST = "controller.kubernetes.io/pod-deletion-cost"


class ScaledCluster:
    """A Deployment or StatefulSet ``digits``; its nodes have room for ``room`` pods.

    ``fails``: the exit status of a command, by its first word. ``said``: all commands that ran.
    ``silent``: it is a horovodrun's, and its script reports nothing.
    """

    def __init__(
        self, api: FakeApi, kind: str, replicas: int, *, room: int = 100, most: int = 8
    ) -> None:
        self.api = api
        self.kind = kind
        self.room = room
        self.values = {"min": 1, "max": most, "desired": None}
        self.fails: dict[str, int] = {}
        self.silent = False
        self.said: list[list[str]] = []
        self.worlds: list[int] = []
        """The size of each world that has formed."""
        self.path = f"{OF}/{kind.lower()}s/digits"
        self._replicas = replicas
        self._drained: set[str] = set()
        self._made = 0

    @property
    def names(self) -> list[str]:
        """The pods that are there."""
        return sorted(path.rpartition("/")[2] for path in self._pods())

    @property
    def ready(self) -> int:
        """How many of them are ready."""
        return len(self._able())

    @property
    def count(self) -> int:
        """The owner's count."""
        return int(self.api.objects[self.path]["spec"]["replicas"])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ScaledJob]:
        """Run the cluster; yield the job as a verb sees it."""
        await self.api.put(self.path, {"spec": {"replicas": self._replicas}})
        self.api.containers.execute = self._execute
        await self._reconcile()
        controller = asyncio.create_task(self._run())
        try:
            async with ClusterApi(self.api.access, NAMESPACE) as client:
                yield ScaledJob(client, "digits")
        finally:
            controller.cancel()
            await asyncio.wait((controller,))

    async def _run(self) -> None:
        while True:
            await self._reconcile()
            await asyncio.sleep(0.02)

    async def _reconcile(self) -> None:
        """Do what Kubernetes and Muster do of themselves."""
        while len(self._pods()) < self.count:
            await self._make()
        while len(self._pods()) > self.count:
            gone = self._first_to_go()
            self._drained.discard(gone)
            await self.api.remove(f"{PODS}/{gone}")
        running = [path for path, pod in self._pods().items() if pod["spec"].get("nodeName")]
        for path, pod in self._pods().items():
            if path not in running and len(running) < self.room:
                await self.api.put(path, {**pod, **_placed()})
                running.append(path)
        world = len(self._world())
        if world and self.worlds[-1:] != [world]:
            self.worlds.append(world)

    def _pods(self) -> dict[str, dict[str, Any]]:
        return {
            path: held for path, held in self.api.objects.items() if path.startswith(f"{PODS}/")
        }

    def _able(self) -> list[str]:
        """The members that take part, the oldest first."""
        placed = [p.rpartition("/")[2] for p, pod in self._pods().items() if _is_ready(pod)]
        return [name for name in placed if name not in self._drained]

    def _world(self) -> list[str]:
        return self._able()[: self.values["max"]]

    async def _make(self) -> None:
        indexes = {int(name.rpartition("-")[2]) for name in self.names}
        index = min(set(range(len(indexes) + 1)) - indexes)
        if self.kind == "Deployment":
            index = self._made
        self._made += 1
        name = f"digits-{index}"
        kind = "StatefulSet" if self.kind == "StatefulSet" else "ReplicaSet"
        maker = {"controller": True, "kind": kind, "name": "digits", "apiVersion": "apps/v1"}
        hashed = {}
        if kind == "ReplicaSet":
            hashed, maker["name"] = {"pod-template-hash": "h"}, "digits-h"
        labels = {"muster.dev/job": "digits", **hashed}
        metadata = {"namespace": NAMESPACE, "labels": labels, "ownerReferences": [maker]}
        metadata["creationTimestamp"] = f"2026-01-01T00:{self._made:02d}:00Z"
        await self.api.put(f"{PODS}/{name}", {"metadata": metadata, **_unplaced()})

    def _first_to_go(self) -> str:
        if self.kind == "StatefulSet":
            return max(self.names, key=lambda name: int(name.rpartition("-")[2]))

        def rank(path: str) -> tuple[object, ...]:
            pod = self._pods()[path]
            cost = int((pod["metadata"].get("annotations") or {}).get(COST) or 0)
            return bool(pod["spec"].get("nodeName")), _is_ready(pod), cost, path

        return min(self._pods(), key=rank).rpartition("/")[2]

    async def _execute(self, asked: Asked) -> Ran:
        begins = asked.argv.index("--") + 1 if "--" in asked.argv else 4
        words = asked.argv[begins:]
        self.said.append(words)
        if status := self.fails.get(words[0], 0):
            return Ran(status, "", "muster: it fails\n")
        match words:
            case ["status", *_]:
                return Ran(0, json.dumps(self._status()), "")
            case ["set", *values]:
                for flag, value in zip(values[::2], values[1::2], strict=True):
                    self.values[flag.removeprefix("--")] = int(value)
            case ["drain", name, "--cancel"]:
                self._drained.discard(name)
            case ["drain", name, *_]:
                self._drained.add(name)
                return Ran(0, f"released   {name} may go: all ranks saved step 45\n", "")
        return Ran(0, "", "")

    def _status(self) -> dict[str, Any]:
        members = []
        for name in [*self._able(), *self._drained]:
            state = "excluded" if name in self._drained else "listed"
            doing = "training" if name in self._world() else state
            if state == "listed" and doing != "training":
                state = doing = "standby"
            if self.silent and doing == "training":
                doing = "ready"
            members.append({"name": name, "state": state, "doing": doing})
        if self.silent:
            excluded = {"state": "excluded", "doing": "excluded"}
            members.append({"name": "digits-launcher", "role": "launcher", **excluded})
        return {**self.values, "sizes": [], "unit": 1, "paused": False, "members": members}


@asynccontextmanager
async def scaled(
    folder: Path, kind: str, replicas: int, **values: int
) -> AsyncIterator[tuple[ScaledCluster, ScaledJob]]:
    """Run a cluster with one job."""
    async with FakeApi(folder) as api:
        cluster = ScaledCluster(api, kind, replicas, **values)
        async with cluster.running() as job:
            yield cluster, job


def _is_ready(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"].get("nodeName"))


def _placed() -> dict[str, Any]:
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "initContainerStatuses": [{"name": "muster", "state": {"running": {}}}],
    }
    return {"spec": {"nodeName": "a", **_containers()}, "status": status}


def _unplaced() -> dict[str, Any]:
    told = {"type": "PodScheduled", "status": "False", "message": "no room"}
    return {"spec": _containers(), "status": {"phase": "Pending", "conditions": [told]}}


def _containers() -> dict[str, Any]:
    return {"initContainers": [{"name": "muster"}], "containers": [{"name": "trainer"}]}
