# SPDX-License-Identifier: Apache-2.0
"""Nine incidents of the night with real torchruns: the verdict is right, and names the cure.

Each prints how long after the incident ``muster status`` is first seen to be right, and
``out/incidents.md`` keeps that as a row of a table. The same verdicts without a torchrun are in
``tests/contract/test_console_commands.py``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from time import time

import pytest

from tests.support.sidecars.processes import CONSOLE, PATIENT
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.full import SMALL, fill_at_once
from tests.support.training.job import FORM_TIMEOUT_S, Job, RunJob, draining_job
from tests.support.training.pods import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

SCRIPT = ROOT / "tests" / "support" / "scripts" / "incident.py"
RECORD = ROOT / "out" / "incidents.md"


@pytest.fixture
def small() -> Iterator[EtcdCluster]:
    """A store that is soon full, and that a test may kill."""
    with EtcdCluster(1, arguments=SMALL) as cluster:
        yield cluster


def printed(job: Job, *arguments: str, runner: tuple[str, ...] = PATIENT) -> str:
    """What a command on the job prints, whatever its exit status is."""
    environ = {
        "MUSTER_NAMESPACE": job.keys.namespace,
        "MUSTER_JOB": job.name,
        "MUSTER_ETCD_ENDPOINTS": ",".join(job.endpoints),
    }
    done = subprocess.run(
        [sys.executable, *runner, *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=FORM_TIMEOUT_S,
        check=False,
    )
    return done.stdout


def until_right(job: Job, incident: str, since_unix_s: float | None, *signs: str) -> str:
    """Wait until ``status`` shows all signs; record how long after the incident; return it.

    ``since_unix_s``: when it happened; None: the script has kept that.
    """
    text = ""

    def right() -> bool:
        nonlocal text
        # A user's limits: what is away is to be reported, not waited for.
        text = printed(job, "status", runner=CONSOLE)
        return all(sign in text for sign in signs)

    job.until(right, FORM_TIMEOUT_S, f"status shows {', '.join(signs)}")
    if since_unix_s is None:
        since_unix_s = float((job.directory / "incident").read_text())
    first = text.splitlines()[0].replace(job.name, "JOB").replace("|", "\\|")
    row = f"| {incident} | {time() - since_unix_s:.1f} | `{first}` |"
    log.warning("%s", row)
    RECORD.parent.mkdir(exist_ok=True)
    with RECORD.open("a") as record:
        record.write(f"{row}\n")
    return text


@pytest.mark.parametrize(
    ("incident", "member", "error", "cure"),
    [
        ("gpu", "node-1", "uncorrectable ECC", "replace the GPU of node-1"),
        ("crash", "node-1", "uncorrectable ECC", "replace the GPU of node-1"),
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
        until_right(job, incident, None, " is failing: ", error, cure)
        job.until(
            lambda: "in a row" in job.muster("status").splitlines()[0],
            FORM_TIMEOUT_S,
            "it has failed more than once, and each next world is no success",
        )
        first, do, *_ = job.muster("status").splitlines()
        assert " is failing: " in first
        assert error in first
        assert cure in do
        first, *_, last = printed(job, "doctor").splitlines()
        assert first.startswith("fault    rounds ")
        assert cure in last


def test_a_full_store_says_what_stands_still_and_how_to_make_room(
    run_job: RunJob, small: EtcdCluster
) -> None:
    with draining_job(run_job, small.endpoints) as job:
        job.trains(2)
        fill_at_once(small)
        until_right(job, "full store", time(), "the store takes no writes (NOSPACE)", "disarm")
        assert "etcdctl alarm disarm" in printed(job, "doctor").splitlines()[-1]


def test_a_store_that_is_away_says_what_it_means(run_job: RunJob, small: EtcdCluster) -> None:
    with draining_job(run_job, small.endpoints) as job:
        world = job.trains(2)
        small.kill(0)
        until_right(job, "store away", time(), "cannot reach", "worlds that train go on")
        job.undisturbed(world)
        small.start(0)


def test_min_that_is_never_met_says_how_many_are_missing(
    run_job: RunJob, embedded: list[str]
) -> None:
    with draining_job(run_job, embedded, least=2, most=2) as job:
        began_unix_s = time()
        job.add(1)
        signs = ("is below min: 1 of at least 2 pods can train", f"muster set {job.name} --min 1")
        until_right(job, "min never met", began_unix_s, *signs)
        assert f"muster set {job.name} --min 1" in printed(job, "doctor").splitlines()[-1]


def test_a_save_that_is_slower_than_the_grace_is_named_with_the_setting(
    run_job: RunJob, embedded: list[str]
) -> None:
    short = {"MUSTER_GRACE_S": "8"}
    with draining_job(run_job, embedded, least=1, most=2, sidecar_environ=short) as job:
        job.trains(2)
        with job.saves_held():
            asked_unix_s = time()
            job.muster("drain", "node-1", "--deadline", "5s")
            until_right(job, "slow save", asked_unix_s, "expired", "was not done")
        findings = json.loads(printed(job, "doctor", "--json"))["findings"]
    (expired,) = [
        one for one in findings if "the last drain, of node-1, expired" in one["sentence"]
    ]
    assert "MUSTER_GRACE_S" in expired["remedy"]
