# SPDX-License-Identifier: Apache-2.0
"""A defect of the relay: its client is told by the end of its connection, and does not hang."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from launcher_shim.pod.relay import Relay
from launcher_shim.tcpstore.requests import RelayLedger
from tests.support.ports import free_ports
from tests.support.sidecars.raw_client import connected
from tests.support.waiting import DEADLINE_S


async def test_a_relaying_that_fails_closes_its_connection_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ledger: RelayLedger) -> bytes:
        raise RuntimeError("a planted defect")

    monkeypatch.setattr(RelayLedger, "begin", fail)
    path, (port,) = str(tmp_path / "c10d.sock"), free_ports(1)
    relay = Relay(port, path)
    async with await asyncio.start_unix_server(lambda reader, writer: writer.close(), path):
        await relay.listen()
        try:
            async with connected(port) as client, asyncio.timeout(DEADLINE_S):
                assert await client.at_end()
        finally:
            await relay.close()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.name == "launcher_shim.pod.relay"
    assert "a planted defect" in str(record.exc_info)
