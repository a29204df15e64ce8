# SPDX-License-Identifier: Apache-2.0
"""A job by ``muster submit`` in a real cluster: to its end, to a failure, left, and deleted."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease
from tests.support.cluster.lab import KubectlFailed, Kubelab, Object
from tests.support.cluster.team import TIMEOUT_S, Team, ended, torchrun
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

JOB = "digits"
ENDLESS = ("examples/torch_steps.py", "--steps=1000000")
COMMITTED = re.compile(r"all ranks saved step (\d+)")


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


@pytest.fixture
def team(chart: ChartRelease, tmp_path: Path) -> Iterator[Team]:
    with Team(chart.lab, tmp_path) as team:
        yield team


def submit(team: Team, *options: str, script: Sequence[str]) -> subprocess.Popen[str]:
    """``muster submit`` of a script of this project."""
    return team.submit(*options, f"--name={JOB}", line=torchrun(*script))


def test_a_job_is_followed_to_its_end_and_a_failure_is_its_status(team: Team) -> None:
    script = ["examples/torch_digits.py", "--epochs=3"]
    status, said = ended(submit(team, "--nodes=2", script=script))
    assert status == 0, said
    assert "made   Job digits: 2 pods" in said
    assert "of 2 starts at step 0" in said
    assert said.rstrip().endswith("muster: the job is complete")

    status, said = ended(submit(team, "--nodes=2", script=ENDLESS))
    assert status == 2
    assert "Job digits exists already" in said

    status, said = ended(team.muster("delete", JOB))
    assert (status, "pause" in said) == (0, False), said

    wrong = ("--nodes=1", "--retries=0", "-ePET_MAX_RESTARTS=1")
    status, said = ended(submit(team, *wrong, script=["examples/torch_steps.py", "--steps=many"]))
    assert status == 1, said
    assert "muster: the job has failed: " in said
    assert re.search(r"container trainer of pod digits-0-\w+ ended with 1", said)


def test_ctrl_c_leaves_the_job_and_delete_saves_it(team: Team) -> None:
    following = submit(team, "--nodes=1:2", script=ENDLESS)
    assert following.stdout is not None
    said = []
    for line in following.stdout:
        said.append(line)
        if "starts at step 0" in line:
            following.send_signal(signal.SIGINT)
            break
    status, rest = ended(following)
    assert status == 130, (said, rest)
    assert "muster: job digits goes on: " in rest
    assert team.lab.get(team.namespace, "job", JOB)["status"]["active"] == 2

    status, rest = ended(team.muster("delete", JOB))
    assert status == 0, rest
    saved = COMMITTED.search(rest)
    assert saved is not None, rest
    assert team.lab.pods(team.namespace, f"muster.dev/job={JOB}") == []

    # It goes on from there under the same name.
    following = submit(team, "--nodes=1:2", script=ENDLESS)
    assert following.stdout is not None
    starts = (line for line in following.stdout if "starts at step" in line)
    assert next(starts).rstrip().endswith(f"starts at step {saved[1]}")
    following.send_signal(signal.SIGINT)
    assert ended(following)[0] == 130
    status, rest = ended(team.muster("delete", JOB, "--now"))
    assert status == 0, rest
    # Steps are reported every 30 s.
    assert re.search(r"^(lost: [\d,]+ steps?|what is lost is not known)", rest, re.MULTILINE), rest


LOOKS: Object = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
FIRST, SECOND = "first", "second"


@pytest.mark.long
def test_others_see_what_they_may_and_a_node_is_drained_by_one_save_of_each_job(
    team: Team, tmp_path: Path
) -> None:
    by_node = begun(team, FIRST, "--nodes=1:3")
    node = max(by_node, key=lambda one: len(by_node[one]))  # of two nodes: two pods at least
    begun(team, SECOND, "--nodes=1:2", f"--selector=kubernetes.io/hostname={node}")
    for job, size in ((FIRST, 3), (SECOND, 2)):
        until_trains(team, job, size)
    others_see_what_they_may(team, tmp_path)

    status, said = ended(team.muster("drain", "--node", node, "--deadline=300s", "--wait"))
    assert status == 0, said
    stay = 3 - len(by_node[node])
    assert f"leave node {node}; {stay} of 3 stay" in said
    assert f"leave node {node}; 0 of 2 stay" in said
    for job, leave in ((FIRST, len(by_node[node])), (SECOND, 2)):
        saved = re.findall(rf"^{job}-\d-\w+  released .* all ranks saved step (\d+)$", said, re.M)
        assert len(saved) == leave, said
        assert len(set(saved)) == 1, said
    if stay:
        until_trains(team, FIRST, stay)
        status, said = ended(team.muster("logs", FIRST))
        assert re.search(rf"── world 3 → {stay} at step .* 0 lost \(round 1\) ──", said), said


def begun(team: Team, job: str, *options: str) -> dict[str, list[str]]:
    """Submit an endless job; return its pods by node, once all have one."""
    status, said = ended(team.submit(f"--name={job}", *options, "-d", line=torchrun(*ENDLESS)))
    assert status == 0, said
    by_node: dict[str, list[str]] = {}

    def placed() -> bool:
        by_node.clear()
        for pod in team.lab.pods(team.namespace, f"muster.dev/job={job}"):
            by_node.setdefault(pod["spec"].get("nodeName", ""), []).append(pod["metadata"]["name"])
        return bool(by_node) and "" not in by_node

    wait_until(placed, TIMEOUT_S, f"the pods of {job} have nodes")
    return by_node


def until_trains(team: Team, job: str, size: int) -> None:
    """Wait until the lines of a job say that a world of so many has begun."""
    lines = ("-n", team.namespace, "logs", f"--selector=muster.dev/job={job}", "--tail=-1")

    def trains() -> bool:
        try:
            return f"of {size} starts at step" in team.lab.kubectl(*lines, "-c", "trainer")
        except KubectlFailed:
            return False  # a container that has not started yet

    wait_until(trains, TIMEOUT_S, f"{size} pods of {job} train")


def others_see_what_they_may(team: Team, directory: Path) -> None:
    """A user without pods/exec, and one of another namespace: one sentence each, and no more."""
    looks = team.other_user("looks", LOOKS)
    status, said = ended(team.muster("get", FIRST, kubeconfig=looks))
    assert status == 0, said
    assert re.search(rf"^{FIRST} +unknown .* forbidden: ", said, re.MULTILINE), said
    assert said.count("forbidden") == 1, said
    for line in (f"status {FIRST}", f"drain {FIRST}-0 --job {FIRST}"):
        status, said = ended(team.muster(*line.split(), kubeconfig=looks))
        assert (status, said.count("\n")) == (69, 1), said
        assert "may not create pods/exec in namespace" in said, said

    theirs = directory / "theirs"
    theirs.mkdir()
    with Team(team.lab, theirs) as other:
        tenant = other.other_user("tenant", LOOKS, {**LOOKS, "resources": ["pods/exec"]})
        for line in ("list", f"get {FIRST}", f"status {FIRST}"):
            status, said = ended(team.muster(*line.split(), kubeconfig=tenant))
            assert (status, said.count("\n")) == (69, 1), said
            assert "may not list pods in namespace" in said, said
        status, said = ended(other.muster("list", kubeconfig=tenant))
        assert (status, FIRST in said) == (0, False), said
