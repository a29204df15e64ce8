# SPDX-License-Identifier: Apache-2.0
"""Real torchrun jobs that save periodically, and one whose pod ends amid the last upload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training.job import Job, RunJob, draining_job
from tests.support.training.pods import END_TIMEOUT_S

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

EVERY = 20


def last_commit(job: Job) -> int:
    """The step that is on record as saved by all ranks; 0 for none."""
    kv = job.witness.kvs().get(job.keys.last_commit)
    return 0 if kv is None else int(json.loads(kv.value)["step"])


def test_after_kill_9_of_all_nodes_it_goes_on_from_the_newest_periodic_save_of_all(
    run_job: RunJob, embedded: list[str]
) -> None:
    saves = {"DRAIN_LOOP_ALL_EVERY": str(EVERY)}
    with draining_job(
        run_job, embedded, least=2, most=2, script_environ=saves, lease_s=10.0
    ) as job:
        nodes = job.add(2)
        world = job.world_of(nodes)
        job.until(lambda: last_commit(job) >= EVERY, 120, "a periodic save is on record")
        job.kill_nodes(*nodes)
        step = last_commit(job)
        assert step % EVERY == 0
        again = job.add(2)
        job.goes_on(job.world_of(again, not_=world))
        assert {job.first_step(node) for node in again} == {step + 1}
        told = [int(node.metric("muster_last_commit_step")) for node in again]
        assert all(one >= step for one in told)


SCRIPT = """
import os, pathlib, time
import torch.distributed as dist
import muster
dist.init_process_group("gloo")
with muster.drain() as drain:
    for step in range(1, 11):
        dist.barrier()
        assert not drain.commit_due(step)
rank = dist.get_rank()
dist.destroy_process_group()
folder = pathlib.Path({folder!r})
if rank == 0:
    (folder / "begun").write_text(os.environ["STEP_LOOP_NODE"])
    while not (folder / "may-end").exists():
        time.sleep(0.05)
    (folder / "uploaded").touch()
"""


def test_a_last_upload_ends_under_sigterm_and_so_does_the_job(
    run_job: RunJob, embedded: list[str], tmp_path: Path
) -> None:
    script, begun = tmp_path / "upload.py", tmp_path / "begun"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    with draining_job(run_job, embedded, least=2, most=2, script=script) as job:
        nodes = job.add(2)
        job.until(lambda: begun.exists() and begun.read_text(), 240, "rank 0 uploads")
        job.until(lambda: job.round.finishing, 120, "the other rank has ended")
        uploads = job.nodes[begun.read_text()]
        job.sigterm(uploads)
        job.until(lambda: job.drain_of(uploads) is not None, 60, "the drain is stored")
        assert "the job is finishing: nothing is to be saved" in job.muster("status")
        assert not (tmp_path / "uploaded").exists()
        (tmp_path / "may-end").touch()
        for node in nodes:
            launcher = node.launcher
            assert launcher is not None
            assert launcher.wait(END_TIMEOUT_S) == 0, node.launcher_log()
        assert (tmp_path / "uploaded").exists()
        assert job.round.closed == "success"
        told = uploads.launcher_log() + uploads.sidecar_log()
        assert "before all ranks had saved" not in told
        assert "expired" not in told
