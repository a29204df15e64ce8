# SPDX-License-Identifier: Apache-2.0
"""``muster scaleout`` and ``scalein`` against an API server, a controller and sidecars."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import time
from typing import Any

import pytest

from console.remote import scalein, scaleout
from console.remote.scaled_owner import OperationClaim, claim_of
from console.remote.scalein import scale_in
from console.remote.scaleout import More, scale_out
from console.remote.scaling_plan import WhoLeaves
from rdzv.errors import ClusterRefused, ConfigError
from tests.support.containers import Asked
from tests.support.scaled_cluster import COST, PODS, ScaledCluster, scaled
from tests.support.waiting import DEADLINE_S

ENOUGH_S = 100.0


def times_out_with(monkeypatch: pytest.MonkeyPatch, cluster: ScaledCluster, ready: int) -> None:
    """Let no time pass until so many pods are ready, and then more than any time-out."""
    clock = lambda: 0.0 if cluster.ready < ready else 10 * ENOUGH_S  # noqa: E731
    monkeypatch.setattr(scaleout, "monotonic", clock)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scalein, scaleout):
        monkeypatch.setattr(module, "POLL_S", 0.05)


async def test_all_come_and_train(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 2) as (cluster, job):
        assert await scale_out(job, More(2, None, ENOUGH_S)) == 0
        assert cluster.count == 4
        assert cluster.values["desired"] == 4
        assert claim_of(cluster.api.objects[cluster.path]) is None


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
async def test_what_came_stays(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scaled(tmp_path, kind, 4, room=6) as (cluster, job):
        times_out_with(monkeypatch, cluster, 6)
        assert await scale_out(job, More(None, 8, ENOUGH_S)) == 3
        assert (cluster.count, cluster.values["desired"]) == (6, 6)
        assert "6 of 8 stay; 2 pods withdrawn" in capsys.readouterr().out


async def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scaled(tmp_path, "Deployment", 4, room=6) as (cluster, job):
        times_out_with(monkeypatch, cluster, 6)
        assert await scale_out(job, More(None, 8, ENOUGH_S, whole=True)) == 4
        assert (cluster.count, cluster.values["max"], cluster.worlds) == (4, 8, [4])
        monkeypatch.undo()
        cluster.room = 8
        assert await scale_out(job, More(None, 8, ENOUGH_S, whole=True)) == 0
        assert cluster.values["max"] == 8
        assert cluster.worlds[:2] in ([4], [4, 8])


@pytest.mark.parametrize("whole", [False, True])
async def test_a_horovodrun_without_reports_is_judged_by_its_hosts(
    tmp_path: Path, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scaled(tmp_path, "StatefulSet", 2) as (cluster, job):
        cluster.silent = True
        assert await scale_out(job, More(2, None, ENOUGH_S, whole=whole)) == 0
        out = capsys.readouterr().out
        assert "4 pods are ready and listed hosts of horovodrun; no rank on digits-0," in out
        assert cluster.values["desired"] == 4
        assert await scale_in(job, WhoLeaves(count=3), ENOUGH_S) == 0
        out = capsys.readouterr().out
        assert "gone after" in out
        assert "1 pod is ready and a listed host of horovodrun; no rank on digits-0 has" in out


async def test_max_is_raised_only_if_asked(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 2, most=2) as (cluster, job):
        with pytest.raises(ConfigError, match="max is 2"):
            await scale_out(job, More(1, None, ENOUGH_S))
        assert cluster.count == 2
        assert await scale_out(job, More(1, None, ENOUGH_S, raises_max=True)) == 0
        assert (cluster.count, cluster.values["max"]) == (3, 3)


async def test_a_middle_pod_of_a_deployment_goes_and_no_other(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 3) as (cluster, job):
        assert await scale_in(job, WhoLeaves(names=("digits-1",)), ENOUGH_S) == 0
        assert cluster.names == ["digits-0", "digits-2"]
        drains = [words for words in cluster.said if words[0] == "drain"]
        assert [words[:3] for words in drains] == [["drain", "digits-1", "--wait"]]


async def test_a_middle_pod_of_a_stateful_set_is_refused(tmp_path: Path) -> None:
    async with scaled(tmp_path, "StatefulSet", 3) as (cluster, job):
        with pytest.raises(ConfigError, match="digits-2 would go, and not digits-0"):
            await scale_in(job, WhoLeaves(names=("digits-0",)), ENOUGH_S)
        assert not any(words[0] == "drain" for words in cluster.said)
        assert await scale_in(job, WhoLeaves(names=("digits-0",)), ENOUGH_S, idle=True) == 0
        assert (cluster.count, len(cluster.names)) == (3, 3)
        assert await scale_in(job, WhoLeaves(count=1), ENOUGH_S) == 0
        assert cluster.names == ["digits-0", "digits-1"]


async def test_nothing_is_done_without_the_right_to_scale(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 3) as (cluster, job):
        cluster.api.refused.add(f"{cluster.path}/scale")
        with pytest.raises(ClusterRefused, match="no rights"):
            await scale_in(job, WhoLeaves(count=1), ENOUGH_S)
        assert not any(words[0] == "drain" for words in cluster.said)


async def test_a_drain_that_is_cancelled_undoes_all(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 3) as (cluster, job):
        cluster.fails["drain"] = 4
        assert await scale_in(job, WhoLeaves(names=("digits-1",)), ENOUGH_S) == 4
        assert (cluster.count, cluster.values["desired"]) == (3, 3)
        marked = cluster.api.objects[f"{PODS}/digits-1"]["metadata"].get("annotations") or {}
        assert COST not in marked


async def test_a_mark_that_is_refused_leaves_no_other_behind(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 4) as (cluster, job):
        cluster.api.refused_methods.add(("PATCH", f"{PODS}/digits-2"))
        with pytest.raises(ClusterRefused):
            await scale_in(job, WhoLeaves(names=("digits-1", "digits-2")), ENOUGH_S)
        marked = cluster.api.objects[f"{PODS}/digits-1"]["metadata"].get("annotations") or {}
        assert COST not in marked
        assert claim_of(cluster.api.objects[cluster.path]) is None


async def test_one_operation_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with scaled(tmp_path, "Deployment", 3) as (cluster, job):
        owner = (await job.look()).owner
        other = OperationClaim("scaleout to 8", "me@desk", time() + 60, "other")
        async with job.claimed(owner, other):
            assert await scale_in(job, WhoLeaves(count=1), ENOUGH_S) == 5
        assert "me@desk runs scaleout to 8" in capsys.readouterr().err
        assert cluster.count == 3


async def test_two_that_begin_at_once_do_not_both_run(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 2) as (cluster, job):
        both = (scale_out(job, More(None, 4, ENOUGH_S)), scale_out(job, More(None, 4, ENOUGH_S)))
        assert sorted(await asyncio.gather(*both)) == [0, 5]
        assert cluster.count == 4


async def test_what_was_cut_off_is_set_back_by_the_next(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 3, most=3) as (cluster, job):
        owner = (await job.look()).owner
        cut_off = OperationClaim("scaleout to 8", "me@desk", time() - 1, "old", most=8)
        await job.write_claim(owner, cut_off)
        assert await scale_out(job, More(None, 4, ENOUGH_S)) == 0
        assert cluster.values["max"] == 8


async def test_a_count_that_another_one_changes_is_left_alone(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 2, room=2) as (cluster, job):
        running = asyncio.create_task(scale_out(job, More(None, 4, ENOUGH_S)))
        await cluster.api.until(cluster.path, lambda held: held["spec"]["replicas"] == 4)
        held = cluster.api.objects[cluster.path]
        await cluster.api.put(cluster.path, {**held, "spec": {"replicas": 3}})
        assert await running == 5
        assert cluster.count == 3


async def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 3) as (cluster, job):
        before = list(cluster.api.calls)
        assert await scale_in(job, WhoLeaves(count=1), ENOUGH_S, dry_run=True) == 0
        assert await scale_out(job, More(1, None, ENOUGH_S, dry_run=True)) == 0
        made = {method for method, _ in cluster.api.calls[len(before) :]}
        assert made == {"GET"}


async def _until_said(capsys: pytest.CaptureFixture[str], words: str) -> None:
    said = ""
    async with asyncio.timeout(DEADLINE_S):
        while words not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out


async def test_a_roll_back_leaves_a_count_that_another_one_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaleout, "POLL_S", ENOUGH_S)
    async with scaled(tmp_path, "Deployment", 2, room=3) as (cluster, job):
        running = asyncio.create_task(scale_out(job, More(None, 4, ENOUGH_S, whole=True)))
        await _until_said(capsys, "of 4 take part")
        held = cluster.api.objects[cluster.path]
        await cluster.api.put(cluster.path, {**held, "spec": {"replicas": 3}})
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (cluster.count, cluster.values["max"]) == (3, 8)
        assert "was changed from 4 to 3" in capsys.readouterr().err
        assert _costs(cluster) == {}


def _costs(cluster: ScaledCluster) -> dict[str, str]:
    """The deletion costs of pods."""
    held = {name: cluster.api.objects[f"{PODS}/{name}"]["metadata"] for name in cluster.names}
    notes = {name: one.get("annotations") or {} for name, one in held.items()}
    return {name: one[COST] for name, one in notes.items() if COST in one}


async def test_a_claim_that_stays_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scaled(tmp_path, "Deployment", 2) as (cluster, job):
        running = asyncio.create_task(scale_out(job, More(None, 3, ENOUGH_S)))
        await cluster.api.until(cluster.path, lambda held: held["spec"]["replicas"] == 3)
        cluster.api.refused_methods.add(("PATCH", cluster.path))
        assert await running == 0
        assert "Deployment digits takes no other operation until" in capsys.readouterr().err


async def test_a_mark_that_stays_keeps_no_other_from_being_taken_back(tmp_path: Path) -> None:
    async with scaled(tmp_path, "Deployment", 4) as (cluster, job):
        drain = cluster.api.containers.execute

        def execute(asked: Asked) -> Any:
            if "drain" in asked.argv:
                cluster.api.refused_methods.add(("PATCH", f"{PODS}/digits-1"))
            return drain(asked)

        cluster.api.containers.execute = execute
        cluster.fails["drain"] = 4
        names = ("digits-1", "digits-2")
        assert await scale_in(job, WhoLeaves(names=names), ENOUGH_S) == 4
        assert list(_costs(cluster)) == ["digits-1"]
