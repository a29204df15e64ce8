# SPDX-License-Identifier: Apache-2.0
"""The controller's pages: all jobs for a browser, and the metrics."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from controller.admission.injector import AdmissionMetrics
from controller.certificates import make_pair
from controller.jobs import Jobs
from controller.metrics import SeenMetrics
from controller.owners import PodSeen, pod_seen
from controller.page import serving_page
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.drain import Commit, LastCommit
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.records import drain, member
from tests.support.shown import Shown

KEYS = JobKeys("team", "digits")
LIVE = KEYS.in_generation(1)
PATIENCE_S = 150.0


async def told(stream: aiohttp.StreamReader) -> Any:
    while not (line := await stream.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


async def test_a_browser_is_shown_every_job_and_each_change() -> None:
    store = MemoryStore()
    world = Round(3, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
    names = [replace(member(name, at), version="0.2.0") for at, name in enumerate("abc", 1)]
    await store.txn(
        [],
        [
            Put(KEYS.job, Job(JobPolicy(1, 2), desired=2).to_json()),
            *(Put(LIVE.member(one.name), one.to_json()) for one in names),
            Put(LIVE.run("digits").round, world.to_json()),
            Put(LIVE.run("digits").value(b"/round"), b"\xff"),
            Put(KEYS.last_commit, LastCommit(46, 1, 1).to_json()),
        ],
    )
    async with (
        asyncio.timeout(PATIENCE_S),
        Jobs(store, time.monotonic, Random(1)).following() as jobs,
        serving_page(jobs, 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as browser,
    ):
        await jobs.changed_after(0)
        async with browser.get("/") as answer:
            document = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "://" not in document, "nothing is loaded from elsewhere"
        async with browser.get("/jobs", headers={"Host": "example.org"}) as answer:
            assert answer.status == 403
        async with browser.get("/jobs/stream") as answer:
            (job,) = await told(answer.content)
            assert [(one["name"], one["state"]) for one in job["members"]] == [
                ("a", "trains"),
                ("b", "trains"),
                ("c", "standby"),
            ]
            assert job["worlds"] == [
                {"run": "digits", "round": 3, "complete": True, "closed": "", "nodes": ["a", "b"]}
            ]
            assert job["last_commit"]["step"] == 46
            held = replace(drain("b", source="controller"), reason="node north is cordoned")
            await store.txn([], [Put(LIVE.drain("uid-b"), held.to_json())])
            (job,) = await told(answer.content)
            (shown,) = job["drains"]
            assert (shown["member"], shown["phase"]) == ("b", "draining")
            assert shown["reason"] == "node north is cordoned"
            ends = replace(world, finishing=True)
            await store.txn([], [Put(LIVE.run("digits").round, ends.to_json())])
            (job,) = await told(answer.content)
            assert job["drains"][0]["phase"] == "finishing"
            assert "nothing is to be saved" in job["drains"][0]["sentence"]


NOW = datetime(2026, 11, 28, tzinfo=UTC)
GRACES_S = (("a", 30), ("b", 60))

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(metrics: AdmissionMetrics) -> Samples:
    """Every sample of the page, by its name and the values of its labels, which are sorted."""
    return {
        (one.name, tuple(one.labels[key] for key in sorted(one.labels))): one.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for one in family.samples
    }


def pod(name: str, grace_s: int) -> PodSeen:
    metadata = {"name": name, "uid": f"uid-{name}", "namespace": "team"}
    spec = {"terminationGracePeriodSeconds": grace_s}
    labels = {"muster.dev/job": "digits"}
    return pod_seen({"metadata": {**metadata, "labels": labels}, "spec": spec})


async def test_what_the_controller_sees_is_on_its_page() -> None:
    metrics, seen = AdmissionMetrics(), SeenMetrics(lambda: NOW, of_jobs=True)
    metrics.registry.register(seen)
    pair = make_pair(None, ("localhost",), NOW - timedelta(days=10))
    seen.certificates["webhook"] = lambda: pair.certificate
    seen.certificates["store"] = lambda: None
    first = samples(metrics)
    left = first.pop(("muster_controller_certificate_seconds_left", ("webhook",)))
    assert left == timedelta(days=80).total_seconds()
    assert not [name for name, _ in first if "certificate" in name or "job" in name]

    uninjected: Any = SimpleNamespace(pods=lambda: ["c"])
    store = MemoryStore()
    sitting = Round(7, complete=True, frozen=(Seat("a", "uid-a", 1),))
    await store.txn(
        [],
        [
            Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
            Put(LIVE.member("a"), member("a").to_json()),
            Put(LIVE.member("b"), member("b").to_json()),
            Put(LIVE.run("r").round, sitting.to_json()),
            Put(LIVE.commit, Commit(3, took_s=41.5).to_json()),
        ],
    )
    pods: Any = Shown(**{f"uid-{name}": pod(name, grace_s) for name, grace_s in GRACES_S})
    async with Jobs(store, time.monotonic, Random(1)).following() as jobs:
        await jobs.changed_after(0)
        seen.jobs, seen.pods, seen.uninjected = jobs, pods, uninjected
        of_job = ("digits", "team")
        found = samples(metrics)
        unnamed = AdmissionMetrics()
        nameless = SeenMetrics(lambda: NOW, of_jobs=False)
        nameless.jobs, nameless.pods, nameless.uninjected = jobs, pods, uninjected
        unnamed.registry.register(nameless)
        assert "digits" not in unnamed.text().decode()
        assert found["muster_controller_pods_without_sidecar", ()] == 1
        assert found["muster_controller_job_training", of_job] == 1
        assert found["muster_controller_job_save_seconds", of_job] == 41.5
        assert found["muster_controller_job_grace_seconds", of_job] == 25

        # The world ends, and the job is paused.
        sequence = jobs.sequence
        await store.txn(
            [], [Put(LIVE.run("r").round, replace(sitting, closed="success").to_json())]
        )
        await jobs.changed_after(sequence)
        assert samples(metrics)["muster_controller_job_training", of_job] == 0
        sequence = jobs.sequence
        await store.txn([], [Put(KEYS.job, Job(JobPolicy(1, 4), paused=True).to_json())])
        await jobs.changed_after(sequence)
        assert ("muster_controller_job_training", of_job) not in samples(metrics)
