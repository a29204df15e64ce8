# SPDX-License-Identifier: Apache-2.0
"""A job by ``muster submit`` in a real cluster: to its end, to a failure, left, and deleted."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.cluster.chart_release import ChartRelease
from tests.support.cluster.lab import (
    KUBECONFIG,
    ROOT,
    TRAINER_IMAGE,
    Kubelab,
    host_paths,
    python_paths,
)

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(1200)]

JOB = "digits"
TIMEOUT_S = 400.0
ENDLESS = ("examples/torch_steps.py", "--steps=1000000")
COMMITTED = re.compile(r"all ranks saved step (\d+)")


@pytest.fixture(scope="module")
def chart(kubelab: Kubelab, sidecar_in_lab: str) -> Iterator[ChartRelease]:
    with ChartRelease(kubelab) as chart:
        yield chart


@pytest.fixture
def team(chart: ChartRelease, tmp_path: Path) -> Iterator[Team]:
    team = Team(chart.lab, tmp_path)
    chart.lab.make_namespace(team.namespace)
    try:
        yield team
    finally:
        chart.lab.remove_namespace(team.namespace)


class Team:
    """A namespace with its user, who has this machine's Python in the pods."""

    def __init__(self, lab: Kubelab, directory: Path) -> None:
        self.lab = lab
        self.namespace = f"submit-{secrets.token_hex(4)}"
        self._pod = directory / "pod.json"
        self._checkpoints = directory / "checkpoints"
        self._checkpoints.mkdir()
        self._checkpoints.chmod(0o777)  # a volume that any user may write to
        volumes, mounts = host_paths(*python_paths([sys.prefix, sys.base_prefix]), (ROOT, False))
        container = {
            "name": "trainer",
            "image": TRAINER_IMAGE,
            "imagePullPolicy": "Never",
            "workingDir": str(ROOT),
            "volumeMounts": mounts,
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {"requests": {"cpu": "50m", "memory": "300Mi"}},
        }
        spec = {"enableServiceLinks": False, "containers": [container], "volumes": volumes}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}, "spec": spec}
        self._pod.write_text(json.dumps(pod))

    def muster(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command, as a user at a terminal does: Ctrl-C reaches it."""
        return subprocess.Popen(
            [sys.executable, "-m", "console.main", *words, "-n", self.namespace],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(KUBECONFIG)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_hears_ctrl_c,
        )

    def submit(self, *options: str, script: Sequence[str]) -> subprocess.Popen[str]:
        """``muster submit`` of a script of this project."""
        given = (f"--from={self._pod}", f"--volume={self._checkpoints}:/ck")
        variables = ("-eCHECKPOINT_DIR=/ck", f"-ePYTHONPATH={ROOT}")
        torchrun = (f"{sys.prefix}/bin/torchrun", "--nproc-per-node=1", *script)
        # In one word, as users of Arena write it.
        line = " ".join(torchrun)
        return self.muster("submit", *given, *variables, *options, f"--name={JOB}", line)


def _hears_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of a command, and all that it printed."""
    said, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, said


def test_a_job_is_followed_to_its_end_and_a_failure_is_its_status(team: Team) -> None:
    script = ["examples/torch_digits.py", "--epochs=3"]
    status, said = ended(team.submit("--nodes=2", script=script))
    assert status == 0, said
    assert "made   Job digits: 2 pods" in said
    assert "of 2 starts at step 0" in said
    assert said.rstrip().endswith("muster: the job is complete")

    status, said = ended(team.submit("--nodes=2", script=ENDLESS))
    assert status == 2
    assert "Job digits exists already" in said

    status, said = ended(team.muster("delete", JOB))
    assert (status, "pause" in said) == (0, False), said

    wrong = ("--nodes=1", "--retries=0", "-ePET_MAX_RESTARTS=1")
    status, said = ended(team.submit(*wrong, script=["examples/torch_steps.py", "--steps=many"]))
    assert status == 1, said
    assert "muster: the job has failed: " in said
    assert re.search(r"container trainer of pod digits-0-\w+ ended with 1", said)


def test_ctrl_c_leaves_the_job_and_delete_saves_it(team: Team) -> None:
    following = team.submit("--nodes=1:2", script=ENDLESS)
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
    following = team.submit("--nodes=1:2", script=ENDLESS)
    assert following.stdout is not None
    starts = (line for line in following.stdout if "starts at step" in line)
    assert next(starts).rstrip().endswith(f"starts at step {saved[1]}")
    following.send_signal(signal.SIGINT)
    assert ended(following)[0] == 130
    status, rest = ended(team.muster("delete", JOB, "--now"))
    assert status == 0, rest
    # Steps are reported every 30 s.
    assert re.search(r"^(lost: [\d,]+ steps?|what is lost is not known)", rest, re.MULTILINE), rest
