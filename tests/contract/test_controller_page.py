# SPDX-License-Identifier: Apache-2.0
"""The page of all jobs: what a browser gets, and what it is told as it happens."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import aiohttp

from controller.jobs import Jobs
from controller.page import serving_page
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.records.drain import LastCommit
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryStore
from tests.support.records import drain, member

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
