# SPDX-License-Identifier: Apache-2.0
"""A torchrun that goes past Muster is named, until it is started right: log, status and metric.

Which launchers are named, and how, is in ``tests/unit/test_launcher_watch.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.support.training.job import FORM_TIMEOUT_S, Job
from tests.support.training.pods import ROOT, Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def told(job: Job, node: Node) -> tuple[str, str]:
    """What ``muster status`` says of a member's launcher: the kind as JSON has it, and why.

    A question mark while the store does not answer, or does not list the member.
    """
    settings = {
        "MUSTER_NAMESPACE": job.keys.namespace,
        "MUSTER_JOB": job.name,
        "MUSTER_ETCD_ENDPOINTS": ",".join(job.endpoints),
    }
    shown = subprocess.run(
        [sys.executable, "-m", "console.main", "status", "--json"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    members = json.loads(shown.stdout)["members"] if shown.returncode == 0 else []
    found = [(one["launcher"], one["why"]) for one in members if one["name"] == node.name]
    return found[0] if found else ("?", shown.stderr)


def kinds(node: Node) -> dict[str, float]:
    """The metric, by kind."""
    lines = node.ask("metrics")[1].splitlines()
    found = [line for line in lines if line.startswith("muster_launcher_bypass{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_one_that_was_pointed_elsewhere_is_named_until_it_is_started_right(
    run_job: Callable[..., AbstractContextManager[Job]], embedded: list[str]
) -> None:
    with run_job(embedded, least=1, most=2, wrapped=True) as job:
        (node,) = job.add(launch=False)
        # Its rendezvous is a port where nobody listens: it waits there, as it would for another.
        job.start_launcher(node, shell="{}", options=["--rdzv-endpoint=localhost:1"])
        why = ""

        def named() -> bool:
            nonlocal why
            kind, why = told(job, node)
            return kind == "elsewhere"

        job.until(named, FORM_TIMEOUT_S, "it is named")
        assert "given the rendezvous endpoint localhost:1, not localhost:" in why
        assert node.sidecar_log().count(why) == 1
        others = ("unseen", "absent", "run_id", "nnodes")
        assert kinds(node) == {**dict.fromkeys(others, 0.0), "elsewhere": 1.0}
        job.kill_agent_with_workers(node)
        job.start_launcher(node)
        job.until(lambda: told(job, node) == ("", ""), FORM_TIMEOUT_S, "it is named no longer")
        assert set(kinds(node).values()) == {0.0}
