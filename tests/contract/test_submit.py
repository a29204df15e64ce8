# SPDX-License-Identifier: Apache-2.0
"""``muster submit`` and ``muster delete`` before an API server: what they make, follow, remove."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from console.remote.pods import ClusterOptions
from console.submit import command as submission
from console.submit import delete
from console.submit.delete import delete_job
from console.submit.following import Followed, Outputs, follow
from console.submit.manifest import create, gets_sidecar, has_mpi_jobs, objects, refuse_taken
from console.submit.submission import Submission, SubmitOptions, read_submission
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterRefused, ClusterUnavailable, ConfigError, JobNotFound
from tests.support.cluster_api import FakeApi, make_patient
from tests.support.containers import Asked
from tests.support.waiting import DEADLINE_S

Object = dict[str, Any]
JOBS = "/apis/batch/v1/namespaces/team/jobs"
PODS = "/api/v1/namespaces/team/pods"
SETS = "/apis/apps/v1/namespaces/team/statefulsets"
IMAGE = "example.org/digits:1.0"
FOLLOWED = Followed(
    "digits", "team", f"{JOBS}/digits", "batch.kubernetes.io/job-name=digits", "trainer"
)


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    make_patient(monkeypatch)
    async with FakeApi(tmp_path) as api:
        api.admits = with_sidecar
        monkeypatch.setattr("console.remote.pods.access_of", lambda *_: api.access)
        yield api


@pytest.fixture
async def api(fake: FakeApi) -> AsyncIterator[ClusterApi]:
    async with ClusterApi(fake.access, "team") as opened:
        yield opened


def with_sidecar(tried: Object) -> Object:
    return {**tried, "spec": {**tried["spec"], "initContainers": [{"name": "muster"}]}}


def job(*command: str, name: str = "digits") -> Submission:
    line = command or ("torchrun", "train.py")
    return read_submission(
        SubmitOptions(name=name, nodes="1:2", image=IMAGE, command=line), {}, str
    )


def pod(name: str, index: int = 0, *, ended: int | None = None, **status: Any) -> Object:
    """A pod of Job digits; ``ended``: the exit status of its container."""
    state: Object = {"running": {}}
    if ended is not None:
        state = {"terminated": {"exitCode": ended, "finishedAt": f"2026-01-01T00:00:0{index}Z"}}
    phase = "Running" if ended is None else "Succeeded" if ended == 0 else "Failed"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": "u"}
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "labels": {
                "muster.dev/job": "digits",
                "batch.kubernetes.io/job-name": "digits",
                "batch.kubernetes.io/job-completion-index": str(index),
            },
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"initContainers": [{"name": "muster"}], "containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "initContainerStatuses": [{"name": "muster", "state": {"running": {}}}],
            "containerStatuses": [{"name": "trainer", "state": state}],
            **status,
        },
    }


def condition(kind: str, message: str = "") -> Object:
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


class Said:
    """What a command printed: lines of the training, and sentences."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sentences: list[str] = []
        self.twice = asyncio.Event()
        self.outputs = Outputs(self.lines.append, self._say)

    def _say(self, sentence: str) -> None:
        self.sentences.append(sentence)
        if len(self.sentences) == 2:
            self.twice.set()


# -- made, or not at all


@pytest.mark.parametrize(
    ("message", "known"),
    [
        ('pods is forbidden: User "u" cannot create resource "pods"', True),
        ('pods "digits-trial" is forbidden: exceeded quota: gpus', True),
        ('pods "digits-trial" is forbidden: violates PodSecurity', False),
        ('pods "digits-trial" is forbidden: no PriorityClass with name low was found', False),
    ],
)
async def test_a_trial_pod_that_is_refused(
    fake: FakeApi, api: ClusterApi, message: str, known: bool
) -> None:
    fake.admits = lambda tried: message
    (made,) = objects(job())
    tried = gets_sidecar(api, "team", "digits", made["spec"]["template"])
    if known:
        assert await tried is None
    else:
        with pytest.raises(ClusterRefused, match="forbidden"):
            await tried


async def test_a_name_that_is_taken_is_refused(fake: FakeApi, api: ClusterApi) -> None:
    made = objects(job())
    await refuse_taken(api, "team", "digits", made)
    await fake.put(f"{PODS}/digits-7f-x", pod("digits-7f-x"))
    with pytest.raises(ConfigError, match="pod digits-7f-x in namespace team is of a job digits"):
        await refuse_taken(api, "team", "digits", made)
    await fake.put(f"{JOBS}/digits", {"status": condition("Complete")})
    with pytest.raises(ConfigError, match=r"Job digits exists already .*\(complete\): muster del"):
        await refuse_taken(api, "team", "digits", made)


async def test_the_workers_belong_to_the_launcher(fake: FakeApi, api: ClusterApi) -> None:
    await create(api, "team", objects(job("horovodrun", "python", "t.py"), "StatefulSet"))
    (owner,) = fake.objects[f"{SETS}/digits-worker"]["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.objects[f"{JOBS}/digits"]["metadata"]["uid"]


async def test_nothing_stays_if_the_second_object_fails(fake: FakeApi, api: ClusterApi) -> None:
    fake.refused.add(SETS)
    made = objects(job("horovodrun", "python", "t.py"), "StatefulSet")
    with pytest.raises(ClusterRefused, match="no rights\nnothing is left: Job digits was removed"):
        await create(api, "team", made)
    assert fake.objects == {}


async def test_what_is_left_is_named(fake: FakeApi, api: ClusterApi) -> None:
    fake.refused |= {SETS, f"{JOBS}/digits"}
    made = objects(job("horovodrun", "python", "t.py"), "StatefulSet")
    with pytest.raises(ClusterRefused, match="look for what is left: Job digits in namespace team"):
        await create(api, "team", made)


async def test_an_unknown_outcome_is_no_failure(fake: FakeApi, api: ClusterApi) -> None:
    fake.busy.add(JOBS)
    with pytest.raises(ClusterUnavailable, match="whether Job digits was made is unknown"):
        await create(api, "team", objects(job()))


async def test_an_mpijob_is_made_where_its_kind_is(fake: FakeApi, api: ClusterApi) -> None:
    assert not await has_mpi_jobs(api)
    await fake.put("/apis/kubeflow.org/v1", {"resources": [{"name": "mpijobs"}]})
    assert await has_mpi_jobs(api)


async def submitted(*command: str, **how: Any) -> int:
    given = {"store": None, "detach": True, **how}
    options = ClusterOptions(namespace="team")
    return await submission.submit_job(options, job(*command), [], **given)


async def test_three_lines_say_what_was_made(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await submitted() == 0
    assert f"{JOBS}/digits" in fake.objects
    made, watch, stop = capsys.readouterr().out.splitlines()
    assert made == (
        "made   Job digits: 2 pods, 1 to 2 train; the cluster's controller adds the sidecar"
    )
    assert watch == "watch  muster get digits -n team -w, muster logs digits -n team -f"
    assert stop == "stop   muster delete digits -n team (saves first)"


async def test_without_a_controller_nothing_is_made(fake: FakeApi) -> None:
    fake.admits = lambda tried: tried
    with pytest.raises(ConfigError, match=r"no controller of Muster .*--etcd-endpoints"):
        await submitted()
    assert fake.objects == {}


async def test_submit_adds_the_sidecar(fake: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    store = submission.NamedStore("etcd:2379", "example.org/muster-sidecar:1")
    assert await submitted(store=store) == 0
    template = fake.objects[f"{JOBS}/digits"]["spec"]["template"]
    assert [one["name"] for one in template["spec"]["initContainers"]] == ["muster"]
    assert "submit added the sidecar, with the store at etcd:2379" in capsys.readouterr().out


@pytest.mark.parametrize("may_delete", [True, False])
async def test_the_workers_of_a_horovodrun_go_with_its_end(
    fake: FakeApi, capsys: pytest.CaptureFixture[str], may_delete: bool
) -> None:
    if not may_delete:
        fake.refused_methods.add(("DELETE", f"{SETS}/digits-worker"))
    line = ("horovodrun", "python", "t.py")
    following = asyncio.create_task(submitted(*line, detach=False))
    await fake.until(f"{SETS}/digits-worker", lambda made: True)
    made = fake.objects[f"{JOBS}/digits"]
    await fake.put(f"{JOBS}/digits", {**made, "status": condition("Complete")})
    async with asyncio.timeout(DEADLINE_S):
        assert await following == 0
    assert (f"{SETS}/digits-worker" in fake.objects) == (not may_delete)
    said = "deleted StatefulSet digits-worker" if may_delete else "muster delete digits -n team"
    assert said in capsys.readouterr().err


# -- followed


async def test_a_job_is_followed_to_its_end(fake: FakeApi, api: ClusterApi) -> None:
    said = Said()
    await fake.put(f"{JOBS}/digits", {"spec": {"parallelism": 1}})
    followed = asyncio.create_task(follow(api, FOLLOWED, said.outputs))
    await fake.put(f"{PODS}/digits-0", pod("digits-0"))
    await fake.containers.log("team", "digits-0", "trainer", "step 1", "step 2")
    await fake.containers.end_log("team", "digits-0", "trainer")
    await fake.put(f"{PODS}/digits-0", pod("digits-0", ended=0))
    await fake.put(f"{JOBS}/digits", {"status": condition("Complete")})
    async with asyncio.timeout(DEADLINE_S):
        assert await followed == 0
    assert said.lines == ["[digits-0] step 1", "[digits-0] step 2"]
    assert said.sentences[-1] == "the job is complete"


async def test_a_failed_job_ends_with_its_pods_status(fake: FakeApi, api: ClusterApi) -> None:
    said = Said()
    for index, status in ((0, 143), (1, 77), (2, 1)):
        name = f"digits-{index}"
        await fake.put(f"{PODS}/{name}", pod(name, 0 if status == 1 else index, ended=status))
        error = "ValueError: no data" if status == 77 else "KeyError: 'x'"
        await fake.containers.log("team", name, "trainer", error, "torch.ChildFailedError: ")
        await fake.containers.end_log("team", name, "trainer")
    await fake.put(f"{JOBS}/digits", {"status": condition("Failed", "too many failed indexes")})
    async with asyncio.timeout(DEADLINE_S):
        assert await follow(api, FOLLOWED, said.outputs) == 77
    assert said.sentences == [
        "the job has failed: too many failed indexes",
        "container trainer of pod digits-1 ended with 77",
        "its last error: ValueError: no data",
    ]


async def test_a_missing_right_to_logs_is_told_once(fake: FakeApi, api: ClusterApi) -> None:
    said = Said()
    await fake.put(f"{JOBS}/digits", {"spec": {"parallelism": 1}})
    await fake.put(f"{PODS}/digits-0", pod("digits-0"))
    fake.refused.add(f"{PODS}/digits-0/log")
    followed = asyncio.create_task(follow(api, FOLLOWED, said.outputs))
    async with asyncio.timeout(DEADLINE_S):
        await said.twice.wait()
        await fake.put(f"{JOBS}/digits", {"status": condition("Complete")})
        assert await followed == 0
    assert sum("no further lines are shown" in one for one in said.sentences) == 1


async def test_following_outlives_an_outage(fake: FakeApi, api: ClusterApi) -> None:
    said = Said()
    await fake.put(f"{JOBS}/digits", {"spec": {"parallelism": 1}})
    fake.busy_once.add(f"{JOBS}/digits")
    followed = asyncio.create_task(follow(api, FOLLOWED, said.outputs))
    async with asyncio.timeout(DEADLINE_S):
        await said.twice.wait()
        assert said.sentences[0].endswith("trying again")
        await fake.remove(f"{JOBS}/digits")
        with pytest.raises(JobNotFound, match="was deleted before its end"):
            await followed


# -- deleted


async def deleted(name: str = "digits", **how: Any) -> None:
    given = {"now": False, "timeout_s": DEADLINE_S, "yes": False, **how}
    await delete_job(ClusterOptions(namespace="team"), name, **given)


@pytest.fixture
async def running(fake: FakeApi, api: ClusterApi) -> FakeApi:
    """The fake with a job of submit's that trains in two pods, which go with it."""
    await create(api, "team", objects(job()))
    for index in (0, 1):
        await fake.put(f"{PODS}/digits-{index}", pod(f"digits-{index}", index))
    fake.goes_with[f"{JOBS}/digits"] = [f"{PODS}/digits-0", f"{PODS}/digits-1"]
    return fake


async def test_a_deleted_job_saves_first(
    running: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    running.containers.execute = lambda asked: Ran(0, "saved      all ranks saved step 45\n", "")
    await deleted()
    (asked,) = running.containers.asked
    assert asked.argv[asked.argv.index("pause") :][:3] == ["pause", "digits", "--wait"]
    assert running.objects == {}
    shown = capsys.readouterr().out
    assert "all ranks saved step 45" in shown
    assert "deleted Job digits, with 2 pods" in shown
    assert "what stays: the job's records in the store" in shown


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        (Ran(4, "", ""), "job digits was resumed meanwhile: job digits is not deleted"),
        (Ran(69, "", ""), "the save ended with 69: job digits is not deleted; --now"),
        ("no such program", "it may be paused: muster resume digits lets it train on"),
    ],
)
async def test_without_a_save_the_job_stays(running: FakeApi, ran: Any, said: str) -> None:
    before = dict(running.objects)
    running.containers.execute = lambda asked: ran
    with pytest.raises(ClusterUnavailable, match=said):
        await deleted()
    assert running.objects == before


async def test_a_job_that_may_not_be_deleted_is_not_paused(running: FakeApi) -> None:
    running.refused_methods.add(("DELETE", f"{JOBS}/digits"))
    with pytest.raises(ClusterRefused, match="no rights"):
        await deleted()
    assert running.containers.asked == []


async def test_the_words_of_a_pod_neither_act_on_the_terminal_nor_keep_its_job(
    running: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    running.containers.execute = lambda asked: Ran(4, "\x1b]0;mine\x07\n", "")
    with pytest.raises(ClusterUnavailable):
        await deleted()
    assert "\x1b" not in capsys.readouterr().out
    running.containers.execute = lambda asked: Ran(0, "", "")
    await deleted(now=True)
    assert running.objects == {}


async def test_now_says_what_is_lost(running: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    def execute(asked: Asked) -> Ran:
        assert asked.argv[-3:] == ["status", "digits", "--json"]
        save = {"steps_at_risk": 12, "step_of_all_ranks": 1300}
        return Ran(0, json.dumps({"last_save": save}) + "\n", "")

    running.containers.execute = execute
    await deleted(now=True)
    assert running.objects == {}
    assert "lost: 12 steps; the last save is of step 1,300" in capsys.readouterr().out


async def test_what_submit_has_not_made_is_asked_for(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delete, "is_terminal", lambda: False)
    bare = pod("digits-0")
    del bare["metadata"]["ownerReferences"]
    await fake.put(f"{PODS}/digits-0", bare)
    with pytest.raises(ConfigError, match="has not made Pod digits-0: --yes deletes it"):
        await deleted()
    await deleted(yes=True)
    assert fake.objects == {}
    assert fake.containers.asked == []
    assert "its pods save as they end, within their grace" in capsys.readouterr().err


async def test_a_job_that_has_ended_is_deleted_without_a_save(running: FakeApi) -> None:
    path = f"{JOBS}/digits"
    await running.put(path, {**running.objects[path], "status": condition("Complete")})
    await deleted()
    assert running.objects == {}
    assert running.containers.asked == []


async def test_a_job_without_pods_is_found_by_its_name(fake: FakeApi, api: ClusterApi) -> None:
    await create(api, "team", objects(job()))
    await deleted()
    assert fake.objects == {}
    with pytest.raises(JobNotFound, match="there is no job digits in namespace team"):
        await deleted()


async def test_pods_of_an_unknown_kind_are_left(fake: FakeApi) -> None:
    made = pod("digits-0")
    made["metadata"]["ownerReferences"][0] |= {"apiVersion": "example.org/v1", "kind": "Train"}
    await fake.put(f"{PODS}/digits-0", made)
    with pytest.raises(ConfigError, match="are of Train digits, a kind that muster delete does"):
        await deleted(yes=True)
    assert f"{PODS}/digits-0" in fake.objects
