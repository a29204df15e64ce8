# SPDX-License-Identifier: Apache-2.0
"""Containers behind the API server of ``tests.support.cluster_api``: commands in them, and logs."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from controller.cluster.executed import ERR, OUT, PROTOCOLS, STATUS, Ran

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of each log's first line; the others follow by the second."""


@dataclass(frozen=True)
class Asked:
    """A command that is to run; ``write`` sends output of it before it ends."""

    namespace: str
    pod: str
    container: str
    argv: list[str]
    write: Callable[[bool, str], Awaitable[None]]


Answer = Ran | str | None
"""How a command ends: with a status and (the rest of) its output; with a sentence, if it cannot
run there; None breaks the connection off."""


class Containers:
    """What runs in the pods. ``execute`` answers each command; it may be a coroutine function."""

    def __init__(self) -> None:
        self.execute: Callable[[Asked], Answer | Awaitable[Answer]] = lambda asked: Ran(0, "", "")
        self.asked: list[Asked] = []
        self._logs: dict[tuple[str, str, str, bool], list[str]] = {}
        self._over: set[tuple[str, str, str, bool]] = set()
        self._changed = asyncio.Condition()

    async def log(
        self, namespace: str, pod: str, container: str, *lines: str, previous: bool = False
    ) -> None:
        """Let a container write lines; ``previous``: the one before its last restart."""
        async with self._changed:
            self._logs.setdefault((namespace, pod, container, previous), []).extend(lines)
            self._changed.notify_all()

    async def end_log(self, namespace: str, pod: str, container: str) -> None:
        """End a container, so that whoever follows its log has all of it."""
        async with self._changed:
            self._over.add((namespace, pod, container, False))
            self._changed.notify_all()

    def answers(self, request: web.Request) -> bool:
        """Whether a request is for a container."""
        return request.path.rpartition("/")[2] in ("exec", "log")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for ``…/namespaces/NAMESPACE/pods/POD/exec`` or ``…/log``."""
        *_, namespace, _, pod, what = request.path.split("/")
        container = request.query.get("container", "")
        if what == "log":
            return await self._log(request, namespace, pod, container)
        if "upgrade" not in request.headers.get("Connection", "").lower():
            body = {"kind": "Status", "message": "Upgrade request required", "code": 400}
            return web.json_response(body, status=400)
        return await self._exec(request, namespace, pod, container)

    async def _exec(
        self, request: web.Request, namespace: str, pod: str, container: str
    ) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=PROTOCOLS)
        await socket.prepare(request)

        async def send(channel: int, text: str) -> None:
            await socket.send_bytes(bytes([channel]) + text.encode())

        async def write(is_stderr: bool, text: str) -> None:
            await send(ERR if is_stderr else OUT, text)

        asked = Asked(namespace, pod, container, request.query.getall("command"), write)
        self.asked.append(asked)
        answer = self.execute(asked)
        ended = await answer if inspect.isawaitable(answer) else answer
        if ended is None:
            assert request.transport is not None
            request.transport.abort()
            return socket
        if isinstance(ended, Ran):
            await write(False, ended.out)
            await write(True, ended.err)
        await send(STATUS, json.dumps(status_of(ended)))
        await socket.close()
        return socket

    async def _log(
        self, request: web.Request, namespace: str, pod: str, container: str
    ) -> web.StreamResponse:
        asked = request.query
        key = (namespace, pod, container, asked.get("previous") == "true")
        if key not in self._logs:
            message = f'container "{container}" in pod "{pod}" is waiting to start'
            body = {"kind": "Status", "message": message, "code": 400}
            return web.json_response(body, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        there = len(self._logs[key])
        sent = max(0, there - int(asked.get("tailLines", there)))
        while True:
            for number, line in enumerate(self._logs[key][sent:], sent):
                at = f"{BEGAN + timedelta(seconds=number):%Y-%m-%dT%H:%M:%S.%f000Z} "
                stamp = at if asked.get("timestamps") == "true" else ""
                await response.write(f"{stamp}{line}\n".encode())
                sent = number + 1
            if asked.get("follow") != "true" or key in self._over:
                return response
            await self._more(key, sent)

    async def _more(self, key: tuple[str, str, str, bool], sent: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._logs[key]) > sent or key in self._over)


def status_of(ended: Ran | str) -> dict[str, Any]:
    """The Status object by which the API server says how a command has ended."""
    if isinstance(ended, str):
        return {"kind": "Status", "status": "Failure", "reason": "InternalError", "message": ended}
    if not ended.status:
        return {"kind": "Status", "metadata": {}, "status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(ended.status)}]
    return {
        "kind": "Status",
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {ended.status}",
        "details": {"causes": causes},
    }
