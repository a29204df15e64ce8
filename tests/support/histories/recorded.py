# SPDX-License-Identifier: Apache-2.0
"""Histories of concurrent c10d clients, and the checker that says whether they can be right."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from launcher_shim.tcpstore import wire
from tests.support.sidecars.raw_client import RawClient, connected

ROOT = Path(__file__).parents[3]
Model = Literal["ordered", "membership"]


@dataclass(slots=True)
class Record:
    """One operation. Without ``return_ns`` nobody knows whether it was done."""

    client: int
    op: str
    key: str
    value: str = ""
    expected: str = ""
    delta: int = 0
    call_ns: int = 0
    return_ns: int | None = None
    output: str | None = None

    def line(self) -> str:
        words = asdict(self)
        words["call"], words["return"] = words.pop("call_ns"), words.pop("return_ns")
        return json.dumps({key: value for key, value in words.items() if value is not None})


class History:
    """What all clients did, in the order in which they began to."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._clients = 0

    def client(self) -> int:
        """Number the next client. One whose connection was lost never comes back."""
        self._clients += 1
        return self._clients - 1

    def begin(self, record: Record) -> Record:
        record.call_ns = time.monotonic_ns()
        self.records.append(record)
        return record

    @staticmethod
    def end(record: Record, output: str | None = None) -> None:
        record.return_ns = time.monotonic_ns()
        record.output = output

    def text(self) -> str:
        return "".join(record.line() + "\n" for record in self.records)


class HistoryClient:
    """One connection, whose operations go into a history."""

    def __init__(self, history: History, raw: RawClient) -> None:
        self.number = history.client()
        self._history = history
        self._raw = raw

    async def set(self, key: str, value: str) -> None:
        await self._silent("set", key, wire.Set(key.encode(), value.encode()), value)

    async def append(self, key: str, value: str) -> None:
        await self._silent("append", key, wire.Append(key.encode(), value.encode()), value)

    async def get(self, key: str) -> str | None:
        # As torch's client does after a WAIT. An empty answer is that of a missing key: no test
        # here sets an empty value.
        record = self._begin(wire.Get(key.encode()), "get", key)
        return self._end(record, (await self._raw.vec()).decode() or None)

    async def compare_set(self, key: str, expected: str, desired: str) -> None:
        request = wire.CompareSet(key.encode(), expected.encode(), desired.encode())
        record = self._begin(request, "cas", key, desired, expected)
        self._end(record, (await self._raw.vec()).decode())

    async def add(self, key: str, delta: int) -> None:
        record = self._begin(wire.Add(key.encode(), delta), "add", key, delta=delta)
        self._end(record, str(await self._raw.number()))

    async def delete(self, key: str) -> None:
        record = self._begin(wire.DeleteKey(key.encode()), "delete", key)
        self._end(record, str(await self._raw.number()))

    async def check(self, key: str) -> None:
        record = self._begin(wire.Check((key.encode(),)), "check", key)
        self._end(record, (await self._raw.byte()).decode())

    async def wait(self, key: str, patience_s: float) -> None:
        """Wait, and give it up as torch's client does."""
        record = self._begin(wire.Wait((key.encode(),)), "wait", key)
        answer = asyncio.ensure_future(self._raw.byte())
        done, _ = await asyncio.wait([answer], timeout=patience_s)
        if not done:
            self._raw.send(wire.CancelWait())
        if await answer == wire.STOP_WAITING:
            self._end(record)
            if not done:
                assert await self._raw.byte() == wire.WAIT_CANCELED

    async def _silent(self, op: str, key: str, request: wire.Request, value: str) -> None:
        """Send what has no answer; that of a later request says that it is done."""
        record = self._begin(request, op, key, value)
        self._raw.send(wire.Ping(self.number))
        assert await self._raw.four_bytes() == struct.pack("<I", self.number)
        self._end(record)

    def _begin(
        self,
        request: wire.Request,
        op: str,
        key: str,
        value: str = "",
        expected: str = "",
        delta: int = 0,
    ) -> Record:
        record = self._history.begin(Record(self.number, op, key, value, expected, delta))
        self._raw.send(request)
        return record

    def _end(self, record: Record, output: str | None = None) -> str | None:
        self._history.end(record, output)
        return output


@asynccontextmanager
async def history_client(history: History, port: int) -> AsyncIterator[HistoryClient]:
    """Connect a client to a sidecar."""
    async with connected(port) as raw:
        yield HistoryClient(history, raw)


@pytest.fixture(scope="session")
def porcupine() -> Path:
    """The checker; ``scripts/toolchain/porcupine`` builds it once."""
    if named := os.environ.get("MUSTER_TEST_PORCUPINE"):
        return Path(named)
    built = subprocess.run(
        [ROOT / "scripts" / "toolchain" / "porcupine"], stdout=subprocess.PIPE, check=True
    )
    return Path(built.stdout.decode().strip())


class Undecided(AssertionError):
    """The checker has not decided in time: the history proves nothing, which fails a test."""


async def verdict(
    porcupine: Path, history: History, model: Model, timeout_s: float = 150
) -> tuple[bool, str]:
    """Whether the history can have come from the model; and what the checker says of it.

    Raises ``Undecided``.
    """
    checking = await asyncio.create_subprocess_exec(
        porcupine,
        model,
        f"{timeout_s:g}s",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await checking.communicate(history.text().encode())
    if checking.returncode == 3:
        raise Undecided(said.decode())
    assert checking.returncode in (0, 1), said.decode()
    return checking.returncode == 0, said.decode()
