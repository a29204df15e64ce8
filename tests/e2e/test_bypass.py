# SPDX-License-Identifier: Apache-2.0
"""A torchrun that goes past Muster, or has another size, is named: in log, status and metric."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training.job import FORM_TIMEOUT_S, ROOT, Job, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RunJob = Callable[..., AbstractContextManager[Job]]


def told(job: Job, node: Node) -> tuple[str, str]:
    """What ``muster status`` says of a member's launcher: the kind as JSON has it, and why.

    A question mark while the store does not answer, or does not list the member.
    """
    shown = subprocess.run(
        [sys.executable, "-m", "console.main", "status", "--json"],
        cwd=ROOT,
        env={
            **os.environ,
            "MUSTER_NAMESPACE": job.keys.namespace,
            "MUSTER_JOB": job.name,
            "MUSTER_ETCD_ENDPOINTS": ",".join(job.endpoints),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if shown.returncode != 0:
        job.tell(f"muster status ended with {shown.returncode}: {shown.stderr.strip()}")
        return "?", ""
    members = {one["name"]: one for one in json.loads(shown.stdout)["members"]}
    if node.name not in members:
        return "?", ""
    return members[node.name]["launcher"], members[node.name]["why"]


def named(job: Job, node: Node, kind: str) -> str:
    """Wait until ``muster status`` names the member's launcher so; returns why."""
    why = ""

    def is_named() -> bool:
        nonlocal why
        now, why = told(job, node)
        return now == kind

    job.until(is_named, FORM_TIMEOUT_S, f"its launcher is named {kind}")
    return why


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
        job.start_launcher(node, shell="{}", options=["--rdzv-endpoint=localhost:1"])
        why = named(job, node, "elsewhere")
        assert "given the rendezvous endpoint localhost:1, not localhost:" in why
        assert node.sidecar_log().count(why) == 1
        assert kinds(node) == {
            **dict.fromkeys(("unseen", "absent", "run_id", "nnodes"), 0.0),
            "elsewhere": 1.0,
        }
        job.kill_agent_with_workers(node)
        job.start_launcher(node)
        job.until(lambda: told(job, node) == ("", ""), FORM_TIMEOUT_S, "it is named no longer")
        assert set(kinds(node).values()) == {0.0}


def test_one_with_another_size_is_named_with_it(run_job: RunJob, embedded: list[str]) -> None:
    with run_job(embedded, least=1, most=3, wrapped=True) as job:
        (node,) = job.add(launch=False)
        job.start_launcher(node, options=["--nnodes=1:2"])
        assert "--nnodes=1:2, but the job has 1:3" in named(job, node, "nnodes")
        job.until(lambda: bool(job.steps.worlds()), FORM_TIMEOUT_S, "it trains all the same")
        assert kinds(node)["nnodes"] == 1.0
