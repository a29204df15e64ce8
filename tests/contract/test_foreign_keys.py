# SPDX-License-Identifier: Apache-2.0
"""Keys below a job's prefix that are none of ours, and parts that fail on news, end no sidecar."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from agent.drain.decisions import DrainView
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.decision import DrainDecision
from rdzv.drain.transactions import transaction
from rdzv.records.drain import Commit
from rdzv.store import Put, WatchEvent
from rdzv.store.memory.client import MemoryEngine, MemoryStore
from tests.support.sidecars.endpoints import Pod, pod
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.run_dir import MemoryRunDir
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.virtual

LIFE = KEYS.in_generation(1)
RUN = LIFE.run("digits")

FOREIGN_KEYS = {
    "no UTF-8 in a key of a run": RUN.kv + "\udcff",
    "no UTF-8 in a key of the shared run": LIFE.run("~").kv + "\udcff",
    "no UTF-8 in a run id": LIFE.runs + "\udcff/round",
    "no run id": LIFE.runs + "/round",
    "no name of a member": LIFE.members,
    "no name of a node": RUN.nodes,
    "no adder": RUN.sums + "counter/",
    "no element": RUN.queues + "queue/",
    "no connection": RUN.operations,
    "no name of a pod": KEYS.incarnations,
    "no ASCII": KEYS.prefix + "é",
    "a line break": KEYS.prefix + "g/1/members/a\nb",
    "nothing below the prefix": KEYS.prefix,
}


async def both_listed(one: Pod) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while set(one.client.membership.snapshot().members) != {"w-0", "w-1"}:
            await one.client.mirror.changed_after(one.client.mirror.sequence)


@pytest.mark.parametrize("foreign_key", FOREIGN_KEYS.values(), ids=FOREIGN_KEYS.keys())
async def test_i8_a_foreign_key_is_skipped_and_said_once(
    foreign_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = MemoryEngine()
    writer = MemoryStore(engine)
    async with pod(engine, "w-0", c10d_port=None) as first:
        # With a run that every sidecar holds keys of.
        await writer.txn([], [Put(RUN.round, Round().to_json())])
        for value in (b"x", b"y"):
            await writer.txn([], [Put(foreign_key, value)])
        last = (await writer.txn([], [Put(RUN.value(b"mine"), b"1")])).revision
        async with asyncio.timeout(DEADLINE_S):
            await first.client.mirror.reached(last)
        assert foreign_key not in first.client.mirror.kvs
        assert RUN.value(b"mine") in first.client.mirror.kvs
        warnings = [record for record in caplog.records if record.name == "rdzv.mirror"]
        assert [record.levelname for record in warnings] == ["WARNING"]
        assert ascii(foreign_key)[1:-1] in warnings[0].getMessage()
        assert warnings[0].getMessage().isprintable()
        # And one that starts with it there.
        async with pod(engine, "w-1", c10d_port=None) as second:
            await both_listed(first)
            assert foreign_key not in second.client.mirror.kvs


@pytest.mark.parametrize("foreign_key", [LIFE.drains + "\udcff", LIFE.drains])
async def test_i11_a_foreign_key_among_the_drains_keeps_no_commit_from_being_written(
    foreign_key: str,
) -> None:
    engine = MemoryEngine()
    writer = MemoryStore(engine)
    async with pod(engine, "w-0", c10d_port=None) as one, asyncio.timeout(DEADLINE_S):
        run_dir = MemoryRunDir()
        sight = DrainView(one.client, one.endpoint, "uid-w-0", run_dir)
        # Nothing of the membership changes after it.
        written = await writer.txn([], [Put(foreign_key, b"x")])
        await one.client.mirror.reached(written.revision)
        seen = await sight.snapshot()
        compares, operations = transaction(
            KEYS, seen, DrainDecision(Commit(1, "digits", phase="hold"))
        )
        assert (await writer.txn(compares, operations)).succeeded


async def test_many_foreign_keys_are_no_flood_of_warnings(caplog: pytest.LogCaptureFixture) -> None:
    engine = MemoryEngine()
    writer = MemoryStore(engine)
    await writer.txn([], [Put(f"{KEYS.prefix}é{number}", b"") for number in range(100)])
    async with pod(engine, "w-0", c10d_port=None) as one:
        assert not any("é" in key for key in one.client.mirror.kvs)
    assert len([record for record in caplog.records if record.name == "rdzv.mirror"]) < 20


async def test_a_part_that_fails_on_news_takes_nobody_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = MemoryEngine()
    writer = MemoryStore(engine)
    seen: list[str] = []

    def fragile(events: Sequence[WatchEvent]) -> None:
        for event in events:
            if event.kv.key.endswith("/bad"):
                raise LookupError("no such thing")
            seen.append(event.kv.key.rpartition("/")[2])

    async with pod(engine, "w-0", c10d_port=None) as one:
        one.client.mirror.subscribe(fragile)
        names = ["good", "bad", "better"]
        await writer.txn([], [Put(KEYS.prefix + name, b"") for name in names])
        async with pod(engine, "w-1", c10d_port=None):
            await both_listed(one)
        assert {KEYS.prefix + name for name in names} <= set(one.client.mirror.kvs)
        # What came with it is not lost on the part that failed.
        assert {"good", "better"} <= set(seen)
        assert one.client.mirror.listener_errors == 1
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert "fragile" in errors[0].getMessage()
    assert KEYS.prefix + "bad" in errors[0].getMessage()
