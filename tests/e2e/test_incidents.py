# SPDX-License-Identifier: Apache-2.0
"""Incidents of the night with real torchruns: the verdict is right, and the doctor names the cure.

A store that is away or full, and pods that never come, are in ``tests/contract/test_incidents.py``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from time import time

import pytest

from tests.support.sidecars.processes import PATIENT
from tests.support.training.drain_job import draining_job, saves_held, trains
from tests.support.training.job import FORM_TIMEOUT_S, Job, RunJob
from tests.support.training.pods import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

SCRIPT = ROOT / "tests" / "support" / "scripts" / "incident.py"


def doctor(job: Job, *arguments: str) -> str:
    """What the doctor prints of the job, whatever its exit status is."""
    environ = {
        "MUSTER_NAMESPACE": job.keys.namespace,
        "MUSTER_JOB": job.name,
        "MUSTER_ETCD_ENDPOINTS": ",".join(job.endpoints),
    }
    done = subprocess.run(
        [sys.executable, *PATIENT, "doctor", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=FORM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def first_failure_unix_s(job: Job) -> float:
    """When the first failure was put on record."""
    entries = map(json.loads, job.muster("history", "--json").splitlines())
    return min(float(entry["at_unix_s"]) for entry in entries if entry["what"] == "failed")


@pytest.mark.parametrize(
    ("incident", "member", "error", "cure"),
    [
        ("gpu", "node-1", "uncorrectable ECC", "replace the GPU of node-1"),
        ("data", "", "FileNotFoundError", "volumes are mounted at the paths that the script opens"),
        ("image", "", "ModuleNotFoundError", "environment lacks it, or has another version"),
        ("interface", "", "Unable to find address for: eth9", "set GLOO_SOCKET_IFNAME and NCCL"),
    ],
)
def test_a_job_that_fails_names_the_error_and_the_cure(
    run_job: RunJob, embedded: list[str], incident: str, member: str, error: str, cure: str
) -> None:
    environ = {"INCIDENT": incident} | ({"FAILS_MEMBER": member} if member else {})
    with draining_job(
        run_job, embedded, least=2, most=2, script=SCRIPT, script_environ=environ
    ) as job:
        job.add(2)
        job.until(
            lambda: error in job.muster("status").splitlines()[0],
            FORM_TIMEOUT_S,
            "the first line names the error",
        )
        after_s = time() - first_failure_unix_s(job)
        log.warning("%s: named %.0f s after the first failure", incident, after_s)
        job.until(
            lambda: "in a row" in job.muster("status").splitlines()[0],
            FORM_TIMEOUT_S,
            "it has failed more than once, and each next world is no success",
        )
        first, do, *_ = job.muster("status").splitlines()
        assert " is failing: " in first
        assert error in first
        assert cure in do
        first, *_, last = doctor(job).splitlines()
        assert first.startswith("fault    rounds ")
        assert cure in last


def test_a_save_that_is_slower_than_the_grace_is_named_with_the_setting(
    run_job: RunJob, embedded: list[str]
) -> None:
    short = {"MUSTER_GRACE_S": "8"}
    with draining_job(run_job, embedded, least=1, most=2, sidecar_environ=short) as job:
        trains(job, 2)
        with saves_held(job):
            job.muster("drain", "node-1", "--deadline", "5s")
            job.until(
                lambda: "outcome=expired" in job.muster("history"),
                FORM_TIMEOUT_S,
                "the drain has expired",
            )
        findings = json.loads(doctor(job, "--json"))["findings"]
    (expired,) = [
        one for one in findings if "the last drain, of node-1, expired" in one["sentence"]
    ]
    assert "MUSTER_GRACE_S" in expired["remedy"]
