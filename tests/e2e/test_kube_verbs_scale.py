# SPDX-License-Identifier: Apache-2.0
"""``muster scaleout`` and ``scalein`` in the cluster, typed on a machine that knows no store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease, LabelledJob
from tests.support.cluster.lab import KUBECONFIG, NODES, Kubelab, Object
from tests.support.cluster.workload import Kind, Workload
from tests.support.programs import ran
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

ROOM = "muster.test/room"
"""A resource of the nodes: each pod takes one."""
VERB_TIMEOUT_S = 400.0
MOST = 8


class RoomyJob(LabelledJob):
    """A labelled job whose pods need room, and may be as many as ``MOST``."""

    def injected(self, manifest: str, *arguments: str) -> str:
        made: Object = json.loads(super().injected(manifest, *arguments))
        template = made["spec"]["template"]
        template["metadata"]["annotations"] = {
            "muster.dev/min": str(self.workload.least),
            "muster.dev/max": str(self.workload.most),
        }
        (container,) = template["spec"]["containers"]
        container["resources"]["limits"] = {ROOM: "1"}
        return json.dumps(made)

    def typed(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type a verb about the job."""
        verb, *rest = words
        words = (sys.executable, "-m", "console.main", verb, "trainer", "-n", self.namespace)
        began_s = time.monotonic()
        done = ran(*words, *rest, timeout_s=VERB_TIMEOUT_S, KUBECONFIG=str(KUBECONFIG))
        took_s = time.monotonic() - began_s
        shown = f"{done.stdout}{done.stderr}-> {done.returncode} after {took_s:.1f} s"
        self.tell(f"muster {verb} {' '.join(rest)}\n{shown}")
        return done

    def worlds(self) -> int:
        """How many worlds have formed."""
        shown = self.kubectl("exec", min(self.names()), "-c", "muster", "--", "muster", "history")
        return sum(line.split()[1:2] == ["round"] for line in shown.splitlines())

    def train(self, nodes: int) -> None:
        """Wait until a world of so many nodes trains."""
        wait_until(lambda: self._world() == nodes, 240, f"a world of {nodes}")

    def _world(self) -> int:
        told = ("-c", "muster", "--", "muster", "status", "--json")
        shown = json.loads(self.kubectl("exec", min(self.names()), *told))
        return sum(one["doing"] == "training" for one in shown["members"])


@pytest.fixture(scope="module")
def lab(kubelab: Kubelab) -> Iterator[Kubelab]:
    """The lab with the chart, and room for six pods."""
    with ChartRelease(kubelab):
        for node in NODES:
            _room(kubelab, node, "3")
        try:
            yield kubelab
        finally:
            for node in NODES:
                _room(kubelab, node, None)


def _room(lab: Kubelab, node: str, places: str | None) -> None:
    change = json.dumps({"status": {"capacity": {ROOM: places}, "allocatable": {ROOM: places}}})
    lab.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", change)


def of(kind: Kind, replicas: int) -> Workload:
    return Workload(kind, replicas, least=1, most=MOST, grace_s=60, step_s=0.2, cpu="10m")


def test_what_has_room_stays_and_a_middle_pod_goes(lab: Kubelab, tmp_path: Path) -> None:
    with RoomyJob(lab, tmp_path, of("Deployment", 4)) as job:
        job.train(4)
        before = job.worlds()
        nothing = job.typed("scaleout", "--to", "8", "--all-or-nothing", "--timeout", "20s")
        assert nothing.returncode == 4, nothing.stderr
        assert (len(job.names()), job.worlds()) == (4, before)
        some = job.typed("scaleout", "--to", "8", "--timeout", "45s")
        assert some.returncode == 3, some.stderr
        assert "6 of 8 stay; 2 pods withdrawn" in some.stdout
        job.train(6)
        middle = sorted(job.names())[2]
        others = job.names() - {middle}
        gone = job.typed("scalein", middle)
        assert gone.returncode == 0, gone.stderr
        assert "all ranks saved step" in gone.stdout
        assert job.names() == others


def test_a_middle_pod_of_a_stateful_set_is_refused(lab: Kubelab, tmp_path: Path) -> None:
    with RoomyJob(lab, tmp_path, of("StatefulSet", 3)) as job:
        job.train(3)
        refused = job.typed("scalein", "trainer-1")
        assert refused.returncode == 2
        assert "trainer-2 would go, and not trainer-1" in refused.stderr
        highest = job.typed("scalein", "--count", "1")
        assert highest.returncode == 0, highest.stderr
        assert job.names() == {"trainer-0", "trainer-1"}
        more = job.typed("scaleout", "--count", "1")
        assert more.returncode == 0, more.stderr
        job.train(3)
