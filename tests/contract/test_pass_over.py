# SPDX-License-Identifier: Apache-2.0
"""The delivered ``torchrun`` beside a sidecar that does not answer, or says to ask again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import launcher_shim.pod.torchrun
from launcher_shim.exit_status import EXIT_USAGE
from launcher_shim.pod.torchrun import passes_over
from launcher_shim.tcpstore import wire
from tests.support.sidecars.delivered_torchrun import DeliveredTorchrun

PATIENCE_S = 150.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

QUESTION = wire.encode(wire.CompareSet(wire.STAGE + b"digits", b"", b"line"))


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[int]:
    """Serve a loopback port, which is given."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what comes, and answer nothing."""
    await reader.read()
    writer.close()


async def test_a_sidecar_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher_shim.pod.torchrun, "ANSWER_TIMEOUT_S", 0.2)
    async with served(silent) as port, asyncio.timeout(PATIENCE_S):
        assert not await asyncio.to_thread(passes_over, port, "digits", b"line")
    (record,) = caplog.records
    assert "starting torchrun" in record.getMessage()


@pytest.mark.parametrize(("last", "passes"), [(wire.PASSED, True), (b"", False)])
async def test_it_asks_again_for_as_long_as_it_is_told_to(
    last: bytes, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(wire.HANDSHAKE)) == wire.HANDSHAKE
        for answer in (wire.AGAIN, wire.AGAIN, last):
            assert await reader.readexactly(len(QUESTION)) == QUESTION
            writer.write(wire.vec(answer))
        await silent(reader, writer)

    async with served(serve) as port, asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(passes_over, port, "digits", b"line") == passes
    assert len([r for r in caplog.records if "drained" in r.getMessage()]) == 1


async def test_what_starts_no_job_asks_nobody(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(1))
        await silent(reader, writer)

    torchrun = await asyncio.to_thread(DeliveredTorchrun, tmp_path)
    async with served(serve) as port:
        assert await torchrun.run(port, "--help") == (7, "--help\n")
    assert asked == []


async def test_the_images_torchrun_gets_no_option_of_another_rendezvous(tmp_path: Path) -> None:
    line = ["--nproc-per-node=8", "--nnodes=2", "--node_rank=1", "--master_addr=h", "t.py", "--x"]
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(len(wire.HANDSHAKE) + len(QUESTION)))
        writer.write(wire.vec(b""))
        await silent(reader, writer)

    torchrun = await asyncio.to_thread(DeliveredTorchrun, tmp_path)
    async with served(serve) as port:
        kept = "--nproc-per-node=8 t.py --x\n"
        assert await torchrun.run(port, *line) == (7, kept)
        assert len(asked) == 1
        assert await torchrun.run(port, *line, MUSTER_KEEP_FLAGS="1") == (7, " ".join(line) + "\n")
        nested = {"TORCHELASTIC_RUN_ID": "digits"}
        assert await torchrun.run(port, *line, **nested) == (7, " ".join(line) + "\n")
        status, _ = await torchrun.run(port, *line, MUSTER_KEEP_FLAGS="yes")
        assert status == EXIT_USAGE
