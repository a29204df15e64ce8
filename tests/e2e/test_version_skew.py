# SPDX-License-Identifier: Apache-2.0
"""A job in the middle of an upgrade: sidecars of the last release beside those of this version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import muster
from tests.support.releases.frozen import VERSION, unpack, version_of
from tests.support.training.job import DRAINED_STATUS, STEPS_BETWEEN, Job, RunJob, draining_job
from tests.support.training.pods import END_TIMEOUT_S, ROOT, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the last release's packages."""
    return unpack(tmp_path_factory.mktemp("release"))


def delivered(node: Node) -> str:
    """The version of what its sidecar has put into the run directory."""
    return version_of(node.run_dir / "python")


def in_the_world(job: Job, program: Path) -> set[str]:
    """Members of the newest world, as ``muster status`` of this Muster tells them."""
    (run,) = json.loads(job.muster("status", "--json", program=program))["runs"]
    return set(run["nodes"])


def versions(job: Job) -> dict[str, str]:
    """Of each sidecar, as this Muster tells them; the release has no such field."""
    members = json.loads(job.muster("status", "--json"))["members"]
    return {member["name"]: member["version"] for member in members}


def drains(job: Job, program: Path) -> list[str]:
    """How the drains ended, as ``muster history`` of this Muster tells them."""
    entries = map(json.loads, job.muster("history", "--json", program=program).splitlines())
    return [entry["details"]["outcome"] for entry in entries if entry["what"] == "drain"]


def hand_over(job: Job, node: Node, program: Path) -> None:
    """Replace the sidecar under a muster-run and ranks that stay, as an upgrade in place does."""
    job.stop_sidecar(node)
    node.program = program
    job.start_again(node)


def test_two_versions_share_a_job_in_either_order(
    run_job: RunJob, embedded: list[str], release: Path
) -> None:
    with draining_job(run_job, embedded, least=1, most=3) as job:
        (old,) = job.add(launch=False, program=release)
        (new,) = job.add(launch=False)
        assert (delivered(old), delivered(new)) == (VERSION, muster.__version__)
        for node in (old, new):
            job.start_launcher(node)
        world = job.world_of([old, new])
        job.goes_on(world, STEPS_BETWEEN)
        for program in (release, ROOT):
            assert in_the_world(job, program) == {old.name, new.name}

        hand_over(job, old, ROOT)
        hand_over(job, new, release)
        upgraded, downgraded = old, new
        assert versions(job) == {upgraded.name: muster.__version__, downgraded.name: ""}
        job.undisturbed(world)

        job.operator(upgraded, program=release)
        job.committed(upgraded, ranks=2)
        job.goes_on(job.world_of([downgraded], not_=world), STEPS_BETWEEN)
        job.kill_node(upgraded)

        (old,) = job.add(launch=False, program=release)
        (new,) = job.add(launch=False)
        for node in (old, new):
            job.start_launcher(node)
        world = job.world_of([downgraded, old, new])
        job.goes_on(world, STEPS_BETWEEN)

        # One save for both: each command is of the other version than the sidecar it is about.
        with job.saves_held():
            command = job.by_hand(downgraded)
            told, _ = command.communicate(timeout=END_TIMEOUT_S)
            assert command.returncode == 0, told
            job.terminate(new)
            leavers = (downgraded, new)
            job.all_noted(leavers)
        job.committed(*leavers, ranks=3)
        job.goes_on(job.world_of([old], not_=world), STEPS_BETWEEN)
        assert job.gone(new) == DRAINED_STATUS
        job.kill_node(downgraded)

        job.nothing_lost()
        for program in (release, ROOT):
            assert drains(job, program) == ["committed"] * 3
