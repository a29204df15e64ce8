# SPDX-License-Identifier: Apache-2.0
"""A torchrun that goes past Muster is named, until it is started right: log, status and metric.

Which launchers are named, and how, is in ``tests/unit/test_launcher_watch.py``.
"""

from __future__ import annotations

import json

import pytest

from rdzv.records.troubles import Bypass
from tests.support.training.job import FORM_TIMEOUT_S, Job, RunJob
from tests.support.training.pods import Node

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


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
