# SPDX-License-Identifier: Apache-2.0
"""The socket that takes notices, with clients of every kind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.drain import notice as notice_socket
from agent.drain.notice import (
    CONNECTIONS_MAX,
    LINE_LENGTH,
    Notice,
    NoticeSocket,
    Phase,
    read_notice,
)
from rdzv.errors import ConfigError, RecordError
from tests.support.tasks import beside
from tests.support.waiting import DEADLINE_S

GOOD = b'{"notice":"sigterm","reason":"why","seconds_left":20}\n'
NOTED = Phase("noted", "noted")
RELEASED = Phase("released", "it may go", "committed", 45)

BAD = [
    b"\n",
    b"null\n",
    b"[]\n",
    b"{}\n",
    b"\xff\xfe\n",
    b"{" * 3000 + b"\n",
    b"[" * 4000 + b"\n",
    b'{"notice":"sigkill","reason":"","seconds_left":1}\n',
    b'{"notice":["sigterm"],"reason":"","seconds_left":1}\n',
    b'{"notice":"sigterm","reason":7,"seconds_left":1}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":"1"}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":true}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":NaN}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":Infinity}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":-1}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":1e999}\n',
    b'{"notice":"sigterm","reason":"","seconds_left":' + b"9" * 2000 + b"}\n",
    b"x" * (2 * LINE_LENGTH),
]


class Desk:
    """Takes notices, and stands where the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[Notice] = []
        self._phase: Phase | None = None
        self._moved = asyncio.Event()
        self.socket = NoticeSocket(path, self.notices.append, self._phase_after)

    def stand(self, phase: Phase) -> None:
        self._phase = phase
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _phase_after(self, known: Phase | None) -> Phase:
        while self._phase is None or self._phase == known:
            await self._moved.wait()
        return self._phase

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.path))

    async def say(self, line: bytes) -> bytes:
        """Say it; return the first line of the answer, empty where none came."""
        reader, writer = await self.connect()
        try:
            writer.write(line)
            async with asyncio.timeout(DEADLINE_S):
                return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def taken(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.notices) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    """One that waits for a line as long as the test does."""
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="notice"))
    one = Desk(directory / "notice.sock")
    try:
        with patch.object(notice_socket, "LINE_TIMEOUT_S", DEADLINE_S):
            async with beside(one.socket.run()):
                await one.socket.listening.wait()
                yield one
    finally:
        await asyncio.to_thread(shutil.rmtree, directory)


async def test_each_phase_is_a_line_and_the_last_one_ends_it() -> None:
    async with desk() as one:
        reader, writer = await one.connect()
        writer.write(GOOD)
        await one.taken(1)
        for phase in (NOTED, Phase("saving", "all save"), RELEASED):
            one.stand(phase)
            told = json.loads(await reader.readline())
            assert (told["phase"], told["sentence"]) == (phase.name, phase.sentence)
        assert (told["outcome"], told["step"]) == ("committed", 45)
        assert await reader.read() == b""
        writer.close()
        assert one.notices == [Notice("sigterm", "why", 20)]


@pytest.mark.parametrize("line", BAD)
async def test_i8_a_bad_line_is_refused_and_ends_nothing(line: bytes) -> None:
    async with desk() as one:
        told = json.loads(await one.say(line))
        assert told["phase"] == "refused"
        assert one.notices == []
        one.stand(NOTED)
        assert json.loads(await one.say(GOOD))["phase"] == "noted"


@given(st.one_of(st.binary(max_size=200), st.text().map(str.encode)))
def test_i8_any_bytes_are_a_notice_or_refused(line: bytes) -> None:
    try:
        notice = read_notice(line)
    except RecordError:
        return
    assert notice.reason.isprintable()


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists))
def test_i8_any_field_is_taken_or_refused(value: object) -> None:
    for name in ("notice", "reason", "seconds_left"):
        fields = {"notice": "hold", "reason": "r", "seconds_left": 3, name: value}
        try:
            notice = read_notice(json.dumps(fields).encode())
        except RecordError:
            continue
        assert notice.seconds_left is None or 0 <= notice.seconds_left < 1e10


async def test_what_the_client_calls_the_reason_is_one_short_line() -> None:
    notice = read_notice(
        json.dumps({"notice": "hold", "reason": "a\n\x1b[2J" + "b" * 999}).encode()
    )
    assert notice.reason.startswith("a  [2Jbbb")
    assert len(notice.reason) == 200


async def test_clients_that_say_nothing_or_leave_disturb_nobody() -> None:
    async with desk() as one:
        random = Random(5)
        for n in range(40):
            _, writer = await one.connect()
            writer.write(GOOD[: random.randrange(len(GOOD) + 1)] if n % 4 else GOOD)
            if n % 2:
                writer.transport.abort()
            else:
                writer.close()
        one.stand(NOTED)
        assert json.loads(await one.say(GOOD))["phase"] == "noted"


async def test_beyond_its_bound_a_client_is_sent_away_and_may_come_back() -> None:
    async with desk() as one:
        clients = [await one.connect() for _ in range(CONNECTIONS_MAX)]
        for _, writer in clients:
            writer.write(GOOD)
        await one.taken(CONNECTIONS_MAX)
        assert await one.say(GOOD) == b""
        clients[0][1].close()
        one.stand(NOTED)
        async with asyncio.timeout(DEADLINE_S):
            while not (line := await one.say(GOOD)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert json.loads(line)["phase"] == "noted"
        for _, writer in clients:
            writer.close()


async def test_a_path_too_long_for_a_socket_is_the_users_mistake() -> None:
    one = Desk(Path("/tmp") / ("x" * 100) / "notice.sock")
    with pytest.raises(ConfigError, match="choose a shorter run directory"):
        await one.socket.run()


async def test_every_user_of_the_pod_may_give_notice() -> None:
    async with desk() as one:
        mode = (await asyncio.to_thread(os.stat, one.path)).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o666
