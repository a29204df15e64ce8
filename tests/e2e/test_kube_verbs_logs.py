# SPDX-License-Identifier: Apache-2.0
"""``muster logs`` and ``muster top`` of a job in a real cluster, through a join and a drain."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import KUBECONFIG, Kubelab
from tests.support.cluster.workload import GRACE_S, NAME, Workload
from tests.support.programs import ran

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

SHOWN_S = 180.0
"""For a line to come: a command starts in a sidecar, on cores that are shared."""
STEP = re.compile(r"^\[(\d)\] rank (\d) of (\d) at step \d+$", re.MULTILINE)


def muster(job: KubeJob, *words: str) -> list[str]:
    verb, *more = words
    cluster = (f"--kubeconfig={KUBECONFIG}", f"--namespace={job.namespace}")
    return [sys.executable, "-m", "console.main", verb, NAME, *more, *cluster]


@contextmanager
def following(job: KubeJob, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``muster logs -f``, into a file."""
    with output.open("wb") as file, subprocess.Popen(muster(job, "logs", "-f"), stdout=file) as run:
        try:
            yield run
        finally:
            run.kill()


def test_lines_have_their_ranks_through_a_join_and_a_drain(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    workload = Workload(replicas=2, least=1, most=3, grace_s=GRACE_S, prints=5)
    output = tmp_path / "lines.txt"
    with KubeJob(kubelab, tmp_path, workload, muster=True) as job, following(job, output) as run:

        def until(line: str) -> None:
            shown = re.compile(line, re.MULTILINE)
            job.until(lambda: shown.search(output.read_text()), SHOWN_S, line)

        world = job.world_of(2)
        until(r"^\[1\] rank 1 of 2 ")
        job.scale(3)
        world = job.world_of(3, not_=world)
        until(rf"^── world 2 → 3 at step [\d,]+: {NAME}-2 joined, 0 lost \(round 1\) ──$")
        until(r"^\[2\] rank 2 of 3 ")
        job.scale(2)
        job.world_of(2, not_=world)
        until(rf"^── world 3 → 2 at step [\d,]+: {NAME}-2 left, 0 lost \(round 2\) ──$")
        until(r"(?s)world 3 → 2.*^\[0\] rank 0 of 2 ")
        run.send_signal(signal.SIGINT)
        assert run.wait(SHOWN_S) == 130

        text = output.read_text()
        steps = [found[0] for found in STEP.finditer(text)]
        assert steps
        assert len(steps) == len(set(steps))  # none comes twice, also from a new connection
        assert all(rank == printed for rank, printed, _ in STEP.findall(text))

        done = ran(*muster(job, "logs", "--world=1"), timeout_s=SHOWN_S)
        assert done.returncode == 0, done.stderr
        gone = re.search(rf"the pod that was {NAME}-2, \[(\d)\] in world 1, is gone", done.stderr)
        assert gone, done.stderr
        stayed = {"0", "1", "2"} - {gone[1]}
        assert {(rank, size) for rank, _, size in STEP.findall(done.stdout)} == {
            (rank, "3") for rank in stayed
        }, f"{done.stdout}{done.stderr}\nfollowed before:\n{text}"

        rank = min(stayed)
        done = ran(*muster(job, "logs", f"--rank={rank}", "--world=1"), timeout_s=SHOWN_S)
        assert done.returncode == 0, done.stderr
        assert {(rank, size) for rank, _, size in STEP.findall(done.stdout)} == {(rank, "3")}
        assert "is gone" not in done.stderr

        done = ran(*muster(job, "top"), timeout_s=SHOWN_S)
        assert done.returncode == 0, done.stderr
        assert f"{job.namespace}/{NAME} training" in done.stdout
        assert f"{NAME}-1 " in done.stdout
        assert "drain" in done.stdout
