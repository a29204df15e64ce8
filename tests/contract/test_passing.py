# SPDX-License-Identifier: Apache-2.0
"""Commands about a job in a cluster, which a sidecar of it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.job.jobs import JobTable
from console.job.rows import not_running
from console.remote import get, passing
from console.remote.passing import Passed
from console.remote.sidecar import SHELL
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterRefused, ClusterUnavailable, ConfigError, JobNotFound
from tests.support.cluster_api import FakeApi
from tests.support.containers import Answer, Asked
from tests.support.waiting import DEADLINE_S

HERE = ClusterOptions(namespace="team")
STATUS = Passed("status", ("status",))
AS_JSON = Passed("status", ("status", "--json"), as_json=True)
FOLLOWED = Passed("history", ("history", "--watch"), follows=True)
DRAIN = Passed("drain", ("drain", "--wait", "--", "digits-0"), member="digits-0", follows=True)


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as api:

        @asynccontextmanager
        async def cluster(options: ClusterOptions) -> AsyncIterator[ClusterApi]:
            async with ClusterApi(api.access, options.namespace) as opened:
                yield opened

        monkeypatch.setattr(passing, "cluster", cluster)
        monkeypatch.setattr(get, "cluster", cluster)
        monkeypatch.setattr(passing, "AGAIN_S", 0.01)
        for name in ("digits-0", "digits-1"):
            await api.put(f"/api/v1/namespaces/team/pods/{name}", pod())
        yield api


def pod(job: str = "digits", phase: str = "Running", image: str = "muster:1") -> dict[str, Any]:
    state = {"running": {}} if phase == "Running" else {"waiting": {"reason": "PodInitializing"}}
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
    return {
        "metadata": {"namespace": "team", "labels": {"muster.dev/job": job}},
        "spec": {"initContainers": [{"name": "muster", "image": image}], "containers": []},
        "status": {
            "phase": phase,
            "initContainerStatuses": [{"name": "muster", "state": state}],
            "conditions": conditions if phase == "Pending" else [],
        },
    }


async def run(passed: Passed, job: str | None = "digits") -> int:
    async with asyncio.timeout(DEADLINE_S):
        return await passing._pass_on(HERE, job, passed)


@pytest.mark.parametrize("said", ["no JSON\n", "[]\n"])
async def test_a_status_that_is_none_is_no_traceback(fake: FakeApi, said: str) -> None:
    fake.containers.execute = lambda asked: Ran(0, said, "")
    with pytest.raises(ClusterUnavailable, match="is no status"):
        await run(AS_JSON)


async def test_the_output_and_the_status_are_those_of_the_sidecar(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.containers.execute = lambda asked: Ran(3, "to stdout\n", "to stderr\n")
    assert await run(DRAIN) == 3
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("to stdout\n", "to stderr\n")
    (asked,) = fake.containers.asked
    words = asked.argv[asked.argv.index("--") + 1 :]
    assert words == ["drain", "--wait", "--", "digits-0"]
    assert any(word.startswith("MUSTER_ASKED_BY=") for word in asked.argv)


async def test_a_pod_that_is_to_go_is_asked_last(fake: FakeApi) -> None:
    await run(DRAIN)
    await run(STATUS)
    assert [asked.pod for asked in fake.containers.asked] == ["digits-1", "digits-0"]


async def test_the_next_pod_is_asked_if_a_sidecar_does_not_answer(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(asked: Asked) -> Answer:
        return Ran(0, "here\n", "") if asked.pod == "digits-1" else "no such container"

    fake.containers.execute = execute
    assert await run(STATUS) == 0
    assert capsys.readouterr().out == "here\n"


async def test_no_sidecar_that_answers_is_said_with_each_reason(fake: FakeApi) -> None:
    fake.containers.execute = lambda asked: f"trouble of {asked.pod}"
    with pytest.raises(ClusterUnavailable, match=r"trouble of digits-0.*trouble of digits-1"):
        await run(STATUS)


async def test_a_view_that_is_followed_goes_on_in_the_next_pod(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async def execute(asked: Asked) -> Answer:
        await asked.write(False, "first\n")
        if asked.pod == "digits-0":
            await fake.remove("/api/v1/namespaces/team/pods/digits-0")
            return Ran(137, "", "")
        return Ran(0, "second\n", "")

    fake.containers.execute = execute
    assert await run(FOLLOWED) == 0
    assert capsys.readouterr().out == "first\nsecond\n"


async def test_a_change_is_not_made_again_after_it_broke_off(fake: FakeApi) -> None:
    async def execute(asked: Asked) -> Answer:
        await asked.write(False, "saving\n")
        return None

    fake.containers.execute = execute
    with pytest.raises(ClusterUnavailable, match="what it has done is unknown: see muster status"):
        await run(DRAIN)
    assert len(fake.containers.asked) == 1


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(137, "", ""), "its sidecar may have too little memory"),
        (
            Ran(2, "", "muster: No such option: --new\n"),
            "pod digits-0 has a sidecar of the image muster:1",
        ),
    ],
    ids=["it was killed", "an older sidecar"],
)
async def test_a_command_that_fails_in_the_pod_says_why(
    fake: FakeApi, capsys: pytest.CaptureFixture[str], ran: Ran, why: str
) -> None:
    fake.containers.execute = lambda asked: ran
    assert await run(STATUS) == ran.status
    assert why in capsys.readouterr().err


async def test_pods_that_wait_are_shown_with_why(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    await fake.put("/api/v1/namespaces/team/pods/digits-2", pod(phase="Pending"))
    fake.containers.execute = lambda asked: Ran(0, '{"job": "digits"}\n', "")
    assert await run(STATUS) == 0
    assert "digits-2  pending" in (out := capsys.readouterr().out)
    assert "0/2 nodes are available" in out
    assert await run(AS_JSON) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"] == "digits"
    assert [(one["name"], one["why"]) for one in told["not_running"]] == [
        ("digits-2", "0/2 nodes are available")
    ]


def beside_of(asked: Asked) -> list[str]:
    """The names of the pods that came with a command."""
    return [one.name for one in not_running(dict(word.split("=", 1) for word in _set(asked)), 0.0)]


def _set(asked: Asked) -> list[str]:
    return [word for word in asked.argv[4 : asked.argv.index("--")] if "=" in word]


async def test_a_status_that_is_followed_is_drawn_again_beside_other_pods(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def execute(asked: Asked) -> Answer:
        await asked.write(False, "drawn\n")
        match beside_of(asked):
            case []:
                await fake.put("/api/v1/namespaces/team/pods/digits-2", pod(phase="Pending"))
            case ["digits-2"]:
                return Ran(0, "", "")
        await asyncio.Event().wait()
        return None

    fake.containers.execute = execute
    monkeypatch.setattr(passing, "PODS_LOOK_S", 0.0)
    assert await run(Passed("status", ("status", "--watch"), follows=True)) == 0
    assert [beside_of(asked) for asked in fake.containers.asked] == [[], ["digits-2"]]


async def test_a_status_that_is_followed_is_drawn_again_for_another_window(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["80"]

    async def execute(asked: Asked) -> Answer:
        await asked.write(False, "drawn\n")
        if "COLUMNS=40" in asked.argv:
            return Ran(0, "", "")
        columns[0] = "40"
        await asyncio.Event().wait()
        return None

    fake.containers.execute = execute
    monkeypatch.setattr(passing, "environment", lambda: {"COLUMNS": columns[0]})
    assert await run(Passed("status", ("status", "--watch"), follows=True)) == 0
    assert len(fake.containers.asked) == 2


async def test_a_job_without_a_running_pod_is_shown_by_its_pods(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    await fake.put("/api/v1/namespaces/team/pods/waits-0", pod("waits", "Pending"))
    assert await run(STATUS, "waits") == 0
    assert "no pod runs; 1 of 1 pod is pending: waits-0: 0/2 nodes" in capsys.readouterr().out
    with pytest.raises(ClusterUnavailable, match="muster drain needs a running sidecar of job wai"):
        await run(DRAIN, "waits")
    assert fake.containers.asked == []


async def test_a_job_that_is_not_there_has_a_hint(fake: FakeApi) -> None:
    with pytest.raises(
        JobNotFound, match=r"namespace team has no pod of a job digit: did you mean"
    ):
        await run(STATUS, "digit")


async def test_a_member_tells_the_job(fake: FakeApi) -> None:
    assert await run(DRAIN, None) == 0
    with pytest.raises(ConfigError, match="no job is named: namespace team has digits"):
        await run(STATUS, None)


@pytest.mark.parametrize(
    ("refused", "right"), [("pods", "list pods"), ("pods/digits-0/exec", "create pods/exec")]
)
async def test_a_user_without_rights_gets_one_sentence(
    fake: FakeApi, refused: str, right: str
) -> None:
    fake.refused.add(f"/api/v1/namespaces/team/{refused}")
    with pytest.raises(ClusterRefused) as error:
        await run(STATUS)
    said = str(error.value)
    assert said.startswith(f"muster status may not {right} in namespace team: ask for that right")
    assert said.endswith("(Kubernetes: no rights)")
    assert "\n" not in said


async def listed(job: str | None = None, **options: Any) -> None:
    table = JobTable(options.pop("form", "table"))
    await get._show(HERE, job, table, everywhere=False, interval_s=options.get("interval_s"))


TOLD = {
    "job": "digits",
    "min": 1,
    "max": 2,
    "verdict": {"state": "training"},
    "members": [{"name": "digits-0", "state": "listed", "doing": "training", "ranks": "0"}],
}


async def test_jobs_of_a_namespace_are_listed_by_their_pods(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    await fake.put("/api/v1/namespaces/team/pods/waits-0", pod("waits", "Pending"))
    fake.containers.execute = lambda asked: Ran(0, json.dumps(TOLD), "")
    await listed()
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["NAME", "PHASE", "NODES", "STEP"]
    assert [row.split()[:2] for row in rows] == [["digits", "training"], ["waits", "below"]]


async def test_one_job_is_shown_with_its_pods(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.containers.execute = lambda asked: Ran(0, json.dumps(TOLD), "")
    await listed("digits", form="json")
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["nodes"]) == ("training", 1)
    assert [one["name"] for one in told["pods"]] == ["digits-0", "digits-1"]
    with pytest.raises(JobNotFound):
        await listed("nope")


async def test_a_list_without_the_right_to_ask_sidecars_says_so_in_the_row(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refused.add("/api/v1/namespaces/team/pods/digits-0/exec")
    await listed()
    out = capsys.readouterr().out
    assert "digits  unknown" in out
    assert "create pods/exec in namespace team" in out


async def test_a_list_says_first_what_a_sidecar_says_first(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.containers.execute = lambda asked: Ran(69, "", "muster: no store\nmuster: worlds go on\n")
    await listed()
    assert capsys.readouterr().out.splitlines()[1].endswith("  no store")


async def test_a_list_that_is_followed_prints_what_changes(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = asyncio.Event()

    async def execute(asked: Asked) -> Answer:
        await asked.write(False, json.dumps(TOLD) + "\n")
        await saving.wait()
        await asked.write(False, json.dumps({**TOLD, "verdict": {"state": "saving"}}) + "\n")
        await asyncio.Event().wait()
        return None

    fake.containers.execute = execute
    following = asyncio.create_task(listed(form="json", interval_s=0.1))
    shown = ""
    async with asyncio.timeout(DEADLINE_S):
        while '"saving"' not in shown:
            shown += capsys.readouterr().out
            if '"training"' in shown:
                saving.set()
            await asyncio.sleep(0.05)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    phases = [json.loads(line)["state"] for line in shown.splitlines()]
    assert phases[-2:] == ["training", "saving"]


@pytest.fixture
def program(tmp_path: Path) -> dict[str, str]:
    """A ``muster`` for the shell that runs a line of Python."""
    (tmp_path / "muster").write_text(f'#!/bin/sh\nexec {sys.executable} -c "$@"\n')
    (tmp_path / "muster").chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_shell_passes_words_variables_and_the_status(program: dict[str, str]) -> None:
    line = "import os, sys; print(os.environ['A'], sys.argv[1:], sys.stdin.read()); sys.exit(7)"
    words = ["sh", "-c", SHELL, "muster", "A=x y", "--", line, "b c", "--", "$d"]
    read, held = os.pipe()
    try:
        done = subprocess.run(
            words, stdin=read, capture_output=True, text=True, env=program, timeout=DEADLINE_S
        )
    finally:
        os.close(read)
        os.close(held)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "x y ['b c', '--', '$d'] \n"


def test_the_command_ends_with_the_connection(program: dict[str, str]) -> None:
    line = "import time; print('here', flush=True); time.sleep(600)"
    with subprocess.Popen(
        ["sh", "-c", SHELL, "muster", "--", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=program,
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"here\n"
        shell.stdin.close()
        assert shell.stdout.read() == b""
        assert shell.wait(DEADLINE_S) == 128 + signal.SIGTERM
