# SPDX-License-Identifier: Apache-2.0
"""The four walks of docs/architecture.md, run on the memory store between an event and its effect.

Each counts the product's files whose functions ran meanwhile, whatever woke them, and the deepest
stack of own frames: so no walk grows unseen. ``-s`` prints the files.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from types import CodeType, FrameType

import pytest

from agent.hosts import HostDelivery
from injection.injection import Request, inject
from launcher_shim.c10d.state_codec import SENTINEL, Flavour, NodeDesc, TorchState, encode
from launcher_shim.tcpstore import wire
from rdzv.reconcile import Kernel
from rdzv.records.job import Job
from rdzv.records.policy import JobPolicy
from rdzv.store import Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.clocks.virtual import now
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS
from tests.support.records import member
from tests.support.sidecars.drains import HERE, job
from tests.support.sidecars.endpoints import pod
from tests.support.sidecars.jobs import KEYS, client
from tests.support.sidecars.raw_client import connected
from tests.support.sidecars.run_dir import MemoryRunDir
from tests.support.sources import PACKAGES, ROOT, relative
from tests.support.tasks import beside

ELSEWHERE = ("muster/", "launcher_shim/pod/", "rdzv/store/", "rdzv/dataclass.py")
"""What runs in the users' containers, the store, whose place the memory store takes, and what
compiles a comparison when it is first used."""


class Walk:
    """What ran in a block: the calls of each file, and the most own frames at once.

    ``played``: folders that only the test's own parts use.
    """

    def __init__(self, name: str, *played: str) -> None:
        self._name = name
        self._elsewhere = (*ELSEWHERE, *played)
        self._files: dict[CodeType, str] = {}

    def __enter__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._depth = 0
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def stays_within(self, *, files: int, depth: int) -> None:
        """Print what ran, and raise if it is more than these bounds."""
        calls = self._calls.total()
        head = f"{self._name}: {len(self._calls)} files, {calls} calls, {self._depth} deep"
        lines = [f"  {calls:6} {file}" for file, calls in sorted(self._calls.items())]
        sys.stdout.write("\n".join(["", head, *lines, ""]))
        assert len(self._calls) <= files
        assert self._depth <= depth

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := self._file(frame)):
            self._calls[name] += 1
            depth, at = 0, frame
            while at is not None:
                depth, at = depth + bool(self._file(at)), at.f_back  # type: ignore[assignment]
            self._depth = max(self._depth, depth)

    def _file(self, frame: FrameType) -> str:
        """The product's file that a frame is of; empty for any other."""
        code = frame.f_code
        if code not in self._files:
            path = Path(code.co_filename)
            name = relative(path) if path.is_relative_to(ROOT) else ""
            ours = name.partition("/")[0] in PACKAGES and not name.startswith(self._elsewhere)
            self._files[code] = name if ours else ""
        return self._files[code]


@pytest.mark.virtual
async def test_from_an_event_of_the_store_to_horovods_host_list() -> None:
    walk, run_dir = Walk("event of the store -> host list"), MemoryRunDir()
    async with client(MemoryEngine()) as one:
        kernel = Kernel(one, tuple, asyncio.Event().wait, now, Random(1))
        registered = asyncio.Event()
        registered.set()
        delivery = HostDelivery(kernel, run_dir, 1, registered)
        await one.store.txn([], [Put(KEYS.job, Job(JobPolicy(1, 4)).to_json())])
        async with beside(delivery.run()):
            await delivery.delivered.wait()
            with walk:
                await one.store.txn([], [Put(HERE.member("a"), member("a").to_json())])
                while "a." not in run_dir.hosts():
                    run_dir.written.clear()
                    await run_dir.written.wait()
    walk.stays_within(files=13, depth=12)


@pytest.mark.virtual
async def test_from_sigterm_to_the_release() -> None:
    # The launcher is played: how its rounds are read from the store is the next walk's.
    walk = Walk("SIGTERM -> all saved -> release", "launcher_shim/c10d/")
    async with job("ab", trains="ab") as one:
        with walk:
            last = await one.pods["b"].notice("sigterm", 120).last()
        assert last.outcome == "committed"
    walk.stays_within(files=25, depth=12)


async def test_from_a_torchruns_compare_and_set_to_its_answer() -> None:
    walk = Walk("a torchrun's join")
    me = NodeDesc("10.0.0.1", 7, 0)
    beats = {me: datetime(2026, 1, 1, tzinfo=UTC)}
    first = encode(TorchState(participants={me: 0}, last_heartbeats=beats), Flavour(aware=True))
    async with pod(MemoryEngine(), "a") as one, connected(one.port) as raw:
        await raw.open_rendezvous("digits")
        with walk:
            assert await raw.ask(wire.CompareSet(b"/torch.rendezvous.digits", SENTINEL, first))
    walk.stays_within(files=35, depth=15)


def test_from_a_manifest_to_one_with_the_sidecar() -> None:
    walk = Walk("muster inject")
    with walk:
        assert inject(CORPUS["elastic-pytorch-job"], Request(FLAGS, {})).chosen == 1
    walk.stays_within(files=22, depth=18)
