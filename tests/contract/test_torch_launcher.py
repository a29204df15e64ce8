# SPDX-License-Identifier: Apache-2.0
"""torch's launcher as installed: its configuration, its options, and when it is passed over."""

from __future__ import annotations

import argparse
import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path

import pytest

import launcher_shim.pod.torchrun
from launcher_shim.exit_status import EXIT_USAGE
from launcher_shim.pod.torchrun import overruled, passes_over
from launcher_shim.tcpstore import wire
from launcher_shim.torchrun.launcher import OPTIONS, VARIABLES
from tests.support.sidecars.delivered_torchrun import DeliveredTorchrun

pytest.importorskip("torch.distributed.launcher.api")
from torch.distributed.launcher import api
from torch.distributed.run import get_args_parser

HERE = {VARIABLES["nnodes"]: "1:3", VARIABLES["local-addr"]: "10.1.0.7"} | {
    VARIABLES[name]: name for name in ("rdzv-backend", "rdzv-endpoint", "rdzv-id")
}


def test_the_configuration_has_each_field_that_changes() -> None:
    config = api.LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1)
    changes, _ = overruled(vars(config), HERE, ())
    assert changes.keys() <= {field.name for field in fields(config)}
    assert changes["local_addr"] == "10.1.0.7"


def test_the_launcher_calls_the_function_by_its_name_in_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = list(inspect.signature(api.launch_agent).parameters)
    assert parameters[:3] == ["config", "entrypoint", "args"]
    monkeypatch.setattr(api, "launch_agent", lambda *given, **_: given)
    config = api.LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1)
    assert api.elastic_launch(config, "python")("t.py") == (config, "python", ["t.py"])


TABLE = {option.name: option for option in OPTIONS}


def actions() -> list[argparse.Action]:
    return [action for action in get_args_parser()._actions if action.option_strings]


def long_name(action: argparse.Action) -> str:
    return action.option_strings[-1].lstrip("-").replace("_", "-")


def test_every_option_of_torchrun_is_in_the_table() -> None:
    assert {long_name(action) for action in actions()} <= {*TABLE}


@pytest.mark.parametrize("action", actions(), ids=long_name)
def test_an_option_takes_a_value_in_the_table_as_in_torchrun(action: argparse.Action) -> None:
    option = TABLE[long_name(action)]
    assert option.switch == (action.nargs == 0)
    shorts = {name[1:] for name in action.option_strings if not name.startswith("--")}
    assert shorts == ({option.short} if option.short else set())


@pytest.mark.parametrize("name", ["nnodes", "rdzv-endpoint", "rdzv-id", "max-restarts"])
def test_an_option_has_the_variable_that_torchrun_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[name], "7")
    default = next(action.default for action in actions() if long_name(action) == name)
    assert str(default) == "7"


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
