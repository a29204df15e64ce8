# SPDX-License-Identifier: Apache-2.0
"""``muster drain --node``: one save of each job for all that it has on the node."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from console.remote import node_drain
from console.whereabouts import ClusterOptions
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran
from rdzv.errors import ClusterRefused, JobNotFound
from rdzv.keys import JobKeys
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.cluster_api import FakeApi
from tests.support.containers import Answer, Asked
from tests.support.sidecars.drain_commands import Terminal, terminal
from tests.support.sidecars.drains import HERE
from tests.support.sidecars.processes import PATIENCE_S
from tests.support.waiting import DEADLINE_S

NODES = {"a": "north", "b": "north", "c": "south"}
ONE_A_WRITE = (
    "-c",
    "import console.job.drain_command; console.job.drain_command.TOGETHER_MOST = 1; "
    "from tests.support.sidecars.patient import main; main()",
)
"""Starts no more than one drain in a transaction."""

UNHURRIED = ("--deadline", "600s")


async def test_two_pods_of_a_node_leave_with_one_save() -> None:
    async with terminal("abc", trains="abc", nodes=NODES) as at:
        ended = await at.drain("--node", "north", "--wait", *UNHURRIED)
        first, *lines = ended.out.splitlines()
        assert (ended.status, first) == (0, "job digits: a, b leave node north; 1 of 3 stay")
        ((_, step),) = at.one.done
        for name in "ab":
            last = [line for line in lines if line.startswith(f"{name} ")][-1]
            assert last == f"{name}  released   {name} may go: all ranks saved step {step}"
        assert await writes_of_drains(at) == 1


async def test_more_than_one_write_takes_are_drained_by_several() -> None:
    async with terminal("abc", trains="abc", nodes=NODES) as at:
        arguments = ("--node", "north", "--wait", *UNHURRIED)
        async with at.begun_drain(*arguments, runner=ONE_A_WRITE) as process:
            async with asyncio.timeout(PATIENCE_S):
                out, _ = await process.communicate()
        assert process.returncode == 0
        released = [line for line in out.decode().splitlines() if "  released " in line]
        assert sorted(line[0] for line in released) == ["a", "b"]
        assert await writes_of_drains(at) == 2


async def test_a_drain_that_ends_badly_is_the_status() -> None:
    async with terminal("abc", least=2, trains="abc", nodes=NODES) as at:
        waiting = asyncio.create_task(
            at.drain("--node", "north", "--wait", "--json", "--deadline", "600s")
        )
        await at.one.until(lambda: {"uid-a", "uid-b"} <= {*at.one.snapshot.drains})
        assert (await at.drain("a", "--cancel")).status == 0
        ended = await waiting
        outcomes = {}
        for line in map(json.loads, ended.out.splitlines()):
            assert line["job"] == "digits"
            outcomes[line["member"]] = line["outcome"]
        assert (ended.status, outcomes) == (4, {"a": "cancelled", "b": "committed"})


async def test_without_a_job_all_of_the_namespace_are_drained() -> None:
    async with terminal("abc", trains="abc", nodes=NODES) as at:
        other = await second_job(at, "letters", "north")
        await second_job(at, "words", "south")
        del at.environ["MUSTER_JOB"]
        ended = await at.drain("--node", "north", *UNHURRIED)
        assert ended.status == 0, ended
        assert "job digits: a, b leave node north; 1 of 3 stay" in ended.out
        assert "job letters: x leaves node north; 0 of 1 stay" in ended.out
        assert "words" not in ended.out
        begun = other.in_generation(1).drain("uid-x")
        read = await MemoryStore(at.one.engine).range(begun, timeout_s=DEADLINE_S)
        assert [kv.key for kv in read.kvs] == [begun]
        await at.one.until(lambda: len(at.one.snapshot.drains) == 2)


async def test_an_empty_node_is_no_error() -> None:
    async with terminal("abc", nodes=NODES) as at:
        ended = await at.drain("--node", "east", "--wait")
        assert (ended.status, ended.out) == (
            0,
            "nothing to drain: job digits has no pod on node east: they are on north, south\n",
        )
        del at.environ["MUSTER_JOB"]
        ended = await at.drain("--node", "east", "--json")
        assert (ended.status, ended.out) == (0, "")
        assert "namespace team has no pod on node east: they are on north, south" in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'MEMBER', or --node"),
        (["a", "--node", "north"], "--node is for all on a node: leave MEMBER out"),
        (["--node", ""], "--node: expected the name of a node"),
        (["--node", "north", "--cancel"], "--cancel takes one drain back: name its MEMBER"),
        (["--node", "north", "--deadline", "soon"], "--deadline: 'soon' is wrong"),
    ],
)
async def test_a_mistake_drains_nothing(arguments: list[str], says: str) -> None:
    async with terminal("abc", nodes=NODES) as at:
        ended = await at.drain(*arguments)
        assert ended.status == 2
        assert says in ended.err
        assert at.one.snapshot.drains == {}


async def writes_of_drains(at: Terminal) -> int:
    """How many writes have started the drains of a and b."""
    read = await MemoryStore(at.one.engine).range(HERE.drains, prefix=True, timeout_s=DEADLINE_S)
    assert {kv.key for kv in read.kvs} == {HERE.drain("uid-a"), HERE.drain("uid-b")}
    return len({kv.create_revision for kv in read.kvs})


async def second_job(at: Terminal, name: str, node: str) -> JobKeys:
    """Another job of the namespace, with one member and without a sidecar."""
    keys, job = JobKeys("team", name), at.one.snapshot.job
    assert job is not None
    only = replace(at.one.snapshot.members["a"], name="x", pod_uid="uid-x", node=node)
    await at.one.put(Put(keys.job, job.to_json()))
    await at.one.put(Put(keys.in_generation(job.generation).member("x"), only.to_json()))
    return keys


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as api:

        @asynccontextmanager
        async def cluster(options: ClusterOptions) -> AsyncIterator[ClusterApi]:
            async with ClusterApi(api.access, options.namespace) as opened:
                yield opened

        monkeypatch.setattr(node_drain, "cluster", cluster)
        for name, node in (("digits-0", "north"), ("digits-1", "south"), ("letters-0", "north")):
            await api.put(f"/api/v1/namespaces/team/pods/{name}", pod(name, node))
        yield api


def pod(name: str, node: str, *, runs: bool = True) -> dict[str, Any]:
    state = {"running": {}} if runs else {"waiting": {"reason": "PodInitializing"}}
    return {
        "metadata": {"namespace": "team", "labels": {"muster.dev/job": name.partition("-")[0]}},
        "spec": {
            "nodeName": node,
            "initContainers": [{"name": "muster", "image": "muster:1"}],
            "containers": [],
        },
        "status": {
            "phase": "Running" if runs else "Pending",
            "initContainerStatuses": [{"name": "muster", "state": state}],
        },
    }


def phase(member: str, outcome: str) -> str:
    said = {"job": member[:-2], "member": member, "phase": "released", "sentence": "it may go"}
    return json.dumps({**said, "outcome": outcome}) + "\n"


async def run(job: str | None = None, node: str = "north", *, as_json: bool = False) -> int:
    words = ["drain", "--node", node, "--json", "--wait"]
    async with asyncio.timeout(DEADLINE_S):
        options = ClusterOptions(namespace="team")
        return await node_drain._drain(options, job, node, words, as_json=as_json)


async def test_a_sidecar_of_each_job_drains_the_pods_of_the_node(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(asked: Asked) -> Answer:
        job = asked.pod.partition("-")[0]
        return Ran(0, phase(f"{job}-0", "committed"), "")

    fake.containers.execute = execute
    assert await run() == 0
    # Its own pod is asked only by the job that has no other one.
    assert sorted(asked.pod for asked in fake.containers.asked) == ["digits-1", "letters-0"]
    for asked in fake.containers.asked:
        words = asked.argv[asked.argv.index("--") + 1 :]
        assert words == ["drain", "--node", "north", "--json", "--wait"]
        assert any(word.startswith("MUSTER_ASKED_BY=") for word in asked.argv)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "job digits: digits-0 leaves node north; 1 of 2 stay",
        "job letters: letters-0 leaves node north; 0 of 1 stay",
    ]
    assert sorted(lines[2:]) == [
        "digits-0  released   it may go",
        "letters-0  released   it may go",
    ]


NO_OPTION = Ran(2, "", "muster: No such option: --node\n")
UNKNOWN = "what was done is unknown: see muster status letters"
NO_PHASE = "job letters: what its sidecar says is no phase of a drain"


async def drained(
    fake: FakeApi, capsys: pytest.CaptureFixture[str], letters: Answer
) -> tuple[int, dict[str, str], str]:
    """The status, the outcome of each member and the errors, if digits has saved."""
    digits = Ran(0, phase("digits-0", "committed"), "")
    fake.containers.execute = lambda asked: letters if asked.pod == "letters-0" else digits
    status = await run(as_json=True)
    shown = capsys.readouterr()
    told = map(json.loads, shown.out.splitlines())
    return status, {one["member"]: one["outcome"] for one in told}, shown.err


async def test_the_worst_job_is_the_status(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = Ran(3, phase("letters-0", "expired"), "")
    status, outcomes, _ = await drained(fake, capsys, letters)
    assert (status, outcomes) == (3, {"digits-0": "committed", "letters-0": "expired"})


@pytest.mark.parametrize(
    ("letters", "status", "said"),
    [
        (None, 69, UNKNOWN),
        (NO_OPTION, 2, "drain each of letters-0 by muster drain POD"),
        (Ran(0, "[]\n", ""), 69, NO_PHASE),
        (Ran(0, "nonsense\n", "a \x1b[2J line\n"), 69, NO_PHASE),
        (Ran(0, '{"member": "letters-0"}\n', ""), 69, NO_PHASE),
        (Ran(0, f"{phase('x', '')[:-3]}\n", ""), 69, NO_PHASE),
    ],
    ids=["no answer", "an older sidecar", "a list", "no JSON", "no phase", "half of one"],
)
async def test_a_job_whose_sidecar_tells_no_phase_stops_no_other(
    fake: FakeApi, capsys: pytest.CaptureFixture[str], letters: Answer, status: int, said: str
) -> None:
    found, outcomes, err = await drained(fake, capsys, letters)
    assert (found, outcomes) == (status, {"digits-0": "committed"})
    assert said in err
    assert "\x1b" not in err


async def test_one_job_alone_is_drained_if_it_is_named(fake: FakeApi) -> None:
    assert await run("letters") == 0
    assert [asked.pod for asked in fake.containers.asked] == ["letters-0"]
    with pytest.raises(JobNotFound, match="no pod of a job leters: did you mean letters"):
        await run("leters")


async def test_a_pod_that_has_not_started_is_named(
    fake: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/api/v1/namespaces/team/pods/words-0"
    await fake.put(path, pod("words-0", "east", runs=False))
    assert await run(node="east") == 0
    assert fake.containers.asked == []
    said = "pod words-0 of job words has no running sidecar: nothing saves for it"
    assert said in capsys.readouterr().err


async def test_a_user_without_the_right_gets_one_sentence(fake: FakeApi) -> None:
    fake.refused.add("/api/v1/namespaces/team/pods/digits-1/exec")
    with pytest.raises(ClusterRefused, match="muster drain may not create pods/exec"):
        await run("digits")
