# SPDX-License-Identifier: Apache-2.0
"""What a user is shown of workers that fail, and of a torchrun that goes past Muster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from launcher_shim.c10d.rounds.decision import FREE_STARTS
from rdzv.records.troubles import Bypass
from tests.support.training.job import FORM_TIMEOUT_S, Job, RunJob, draining_job
from tests.support.training.pods import ROOT, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "fails_at_step.py"
IMPORTS = ROOT / "tests" / "support" / "scripts" / "fails_to_import.py"
ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered, token=***"


def test_a_crash_loop_names_the_node_the_rank_and_the_error(
    run_job: RunJob, embedded: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    environ = {"FAILS_MEMBER": "node-1", "FAILS_WHILE": str(broken)}
    with draining_job(
        run_job, embedded, least=2, most=2, script=SCRIPT, script_environ=environ
    ) as job:
        good, bad = job.add(2)
        assert bad.name == "node-1"
        job.until(
            lambda: any("3rd in a row" in one.why for one in job.history("failed")),
            FORM_TIMEOUT_S,
            "it has failed thrice",
        )
        failed = [line for line in job.muster("history").splitlines() if "  failed " in line]
        assert all(f"  failed     {bad.name}: rank " in line for line in failed), failed
        assert all(f"{ERROR} (fails_at_step.py:" in line for line in failed), failed
        status = job.muster("status")
        first, do, *_ = status.splitlines()
        assert " is failing: " in first
        assert bad.name in first
        assert ERROR in first
        assert f"muster drain {bad.name}" in do
        assert good.name not in [line.split()[0] for line in status.splitlines() if ERROR in line]
        assert "s3cr3t" not in status


def test_a_worker_that_is_killed_is_named_without_an_error(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=2) as job:
        nodes = job.add(2)
        world = job.world_of(nodes)
        worker = world.workers[1]
        os.kill(worker.pid, signal.SIGKILL)
        job.until(lambda: job.history("failed"), FORM_TIMEOUT_S, "it is on record")
        (line,) = [one for one in job.muster("history").splitlines() if "  failed " in one]
        assert f"{worker.node}: a worker ended and reported no Python error" in line


def test_a_script_that_no_node_can_start_waits_between_tries(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=3, script=IMPORTS, max_restarts=100) as job:
        nodes = job.add(2)

        def waits() -> bool:
            """Each look at ``status`` is a process: it is the last thing to be asked."""
            return job.round.failed_starts >= FREE_STARTS and "alike" in job.muster("status")

        job.until(waits, FORM_TIMEOUT_S, "it waits")
        first, do, *_ = job.muster("status").splitlines()
        assert "is failing: " in first
        assert "ModuleNotFoundError: No module named 'numpyy'" in first
        assert "muster resume" in do
        longer = "waits 40 s before round"
        job.until(lambda: longer in job.muster("history"), FORM_TIMEOUT_S, "it waits longer")
        line = next(one for one in job.muster("history").splitlines() if longer in one)
        tries = int(line.partition(longer)[2].partition(":")[0])
        assert FREE_STARTS + 1 <= tries <= 2 * (FREE_STARTS + 1), f"{tries} tries before that wait"
        assert all(node.launcher is not None and node.launcher.poll() is None for node in nodes)
        assert "waits 20 s before round" in job.muster("history")
        job.muster("resume")
        job.until(lambda: job.round.number > tries, FORM_TIMEOUT_S, "it tries at once")
        job.add()
        job.until(lambda: job.round.number > tries + 1, FORM_TIMEOUT_S, "a new pod, a new try")


def told(job: Job, node: Node) -> tuple[str, str]:
    """What ``muster status`` says of a member's launcher: the kind as JSON has it, and why."""
    members = json.loads(job.muster("status", "--json"))["members"]
    (found,) = (one for one in members if one["name"] == node.name)
    return found["launcher"], found["why"]


def kinds(node: Node) -> dict[str, float]:
    """The metric, by kind."""
    lines = node.ask("metrics")[1].splitlines()
    found = [line for line in lines if line.startswith("muster_launcher_bypass{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_one_that_was_pointed_elsewhere_is_named_until_it_is_started_right(
    run_job: RunJob, embedded: list[str]
) -> None:
    with run_job(embedded, least=1, most=2, wrapped=True) as job:
        (node,) = job.add(launch=False)
        # Its rendezvous is a port where nobody listens: it waits there, as it would for another.
        options = ["--rdzv-endpoint=localhost:1"]
        job.start_launcher(node, shell="MUSTER_KEEP_FLAGS=1 {}", options=options)
        record = job.keys.in_generation(1).bypass(node.name)

        def kind() -> str:
            kv = job.witness.kvs().get(record)
            return Bypass.from_kv(kv).kind if kv else ""

        job.until(lambda: kind() == "elsewhere", FORM_TIMEOUT_S, "it is named")
        said, why = told(job, node)
        assert said == "elsewhere"
        assert "given the rendezvous endpoint localhost:1, not localhost:" in why
        assert node.sidecar_log().count(why) == 1
        others = ("unseen", "absent", "run_id", "nnodes", "slots", "plain")
        assert kinds(node) == {**dict.fromkeys(others, 0.0), "elsewhere": 1.0}
        job.kill_agent_with_workers(node)
        job.start_launcher(node)
        job.until(lambda: not kind(), FORM_TIMEOUT_S, "it is named no longer")
        assert told(job, node) == ("", "")
        assert set(kinds(node).values()) == {0.0}
