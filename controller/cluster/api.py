# SPDX-License-Identifier: Apache-2.0
"""A client of the Kubernetes API for a dozen calls: plain objects, a timeout for each call.

The connection and the credentials are the package ``kubernetes``'s; of its generated models and
calls none is used, as typed objects of a large cluster do not fit into the controller's memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.utils import tcp_keepalive_socket_options

from controller.cluster import paths
from controller.cluster.access import ClusterAccess
from controller.cluster.executed import PROTOCOLS, Execution, Ran, Wrote
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, ConfigError

Object = dict[str, Any]
T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""Timeout of a call in the background; an admission allows less."""
WATCH_S = 300
"""Time after which the API server ends a watch."""
QUIET_S = 60.0
"""Time without an event after which a watch is replaced: nothing else tells that its connection
has died, if the API server's machine lost power, or a router forgot it."""

NOT_FOUND, CONFLICT, BUSY = 404, 409, 429
"""Statuses of HTTP: there is no such object; it exists, or has another version; ask later."""
JSON = "application/json"
MERGE = "application/merge-patch+json"

LOG_LINE_MAX = 2**20
"""Maximum size of one piece of a log's line, in bytes: a program may never end its line."""
LOG_BUFFER = 2**16
"""Bytes of one log that wait to be read: hundreds of logs may be followed at once."""


class ClusterApi:
    """Calls to one API server. Use it within a running event loop, as a context manager.

    ``namespace``: where its user's objects are, if not in the one that ``access`` names.
    """

    def __init__(self, access: ClusterAccess, namespace: str | None = None) -> None:
        self._access = access
        self._namespace = namespace
        self._client: ApiClient | None = None

    async def __aenter__(self) -> ClusterApi:
        try:
            client = await asyncio.to_thread(ApiClient, self._access.configuration)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificates by which the API server is reached cannot be used: {error}"
            ) from error
        client.user_agent = "muster"
        self._client = client
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._client is not None
        await self._client.close()

    @property
    def namespace(self) -> str:
        """The namespace as given, else of the kubeconfig's context, else of this pod."""
        return self._namespace or self._access.namespace

    async def get(
        self, path: str, timeout_s: float = CALL_TIMEOUT_S, *, accept: str = JSON
    ) -> Object:
        """Read an object or a list; raises ``ClusterRefused`` or ``ClusterUnavailable``."""
        return await self._call(_object, "GET", path, timeout_s=timeout_s, accept=accept)

    async def text(self, path: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Read a page, as a pod shows it through the API server; raises as ``get`` does."""
        return await self._call(_text, "GET", path, timeout_s=timeout_s, accept="text/plain")

    async def create(
        self, path: str, body: Mapping[str, Any], timeout_s: float = CALL_TIMEOUT_S
    ) -> Object:
        """Create an object; raises ``ClusterRefused`` with 409 if there is one of its name."""
        return await self._call(_object, "POST", path, body, timeout_s=timeout_s)

    async def replace(self, path: str, body: Mapping[str, Any]) -> Object:
        """Replace an object; raises ``ClusterRefused`` with 409 if its resourceVersion differs."""
        return await self._call(_object, "PUT", path, body)

    async def merge(self, path: str, body: Mapping[str, Any]) -> Object:
        """Change the fields in ``body`` and no others."""
        return await self._call(_object, "PATCH", path, body, MERGE)

    async def delete(self, path: str, version: str = "") -> None:
        """Delete an object, only at ``version`` if given.

        Raises ``ClusterRefused`` with 404 if it is gone, with 409 if it has another version.
        """
        body = {"preconditions": {"resourceVersion": version}} if version else None
        await self._call(_object, "DELETE", path, body)

    async def watch(self, path: str, version: str, *, accept: str = JSON) -> AsyncIterator[Object]:
        """Yield every event after ``version``, until the API server ends the watch or is quiet.

        An event of the type BOOKMARK has nothing but the newest version.
        Raises ``ClusterRefused`` with 410 if that version is no longer available: list again.
        """
        joined = "&" if "?" in path else "?"
        # Without bookmarks, the version of a quiet watch expires, and all is listed again.
        asked = (
            f"{path}{joined}watch=1&resourceVersion={version}&timeoutSeconds={WATCH_S}"
            "&allowWatchBookmarks=true"
        )
        limits = aiohttp.ClientTimeout(
            total=WATCH_S + CALL_TIMEOUT_S, sock_connect=CALL_TIMEOUT_S, sock_read=QUIET_S
        )
        try:
            async with await self._request("GET", asked, limits, accept=accept) as answer:
                if answer.status >= 400:
                    raise _refusal("GET", path, answer.status, await answer.read())
                async for line in _lines(answer):
                    event: Object = json.loads(line)
                    if event.get("type") == "ERROR":
                        failure = event.get("object") or {}
                        code = int(failure.get("code") or 500)
                        raise ClusterRefused(f"the watch of {path} ended: {failure}", code)
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ClusterUnavailable(
                f"the watch of {path} broke off: {str(error) or type(error).__name__}"
            ) from error

    async def run_in(
        self,
        namespace: str,
        pod: str,
        container: str,
        argv: Sequence[str],
        *,
        timeout_s: float | None,
        wrote: Wrote | None = None,
        held: bool = False,
    ) -> Ran:
        """Run a command in a container; return its exit status and its output.

        ``wrote`` gets each piece of output as it comes; then none is returned. ``timeout_s``:
        None waits for as long as the connection is alive. The command is not ended at a timeout,
        but can write no more. ``held``: its stdin ends when the connection does; else it has none.
        Raises ``ClusterRefused`` if it may not run, as for rights, or if there is no such pod, and
        ``ClusterUnavailable`` if it cannot run there, or what became of it is unknown.
        """
        asked = [("container", container), ("stdout", "true"), ("stderr", "true")]
        asked += [("stdin", "true")] * held
        query = urlencode([*asked, *(("command", word) for word in argv)])
        path = f"{paths.core(namespace, 'pods', pod)}/exec?{query}"
        what = f"a command in container {container} of pod {pod}"
        execution = Execution(wrote)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._socket(path) as socket:
                    async for message in socket:
                        if message.type is aiohttp.WSMsgType.BINARY:
                            execution.take(message.data)
        except aiohttp.WSServerHandshakeError as error:
            raise await self._why_not(path, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            why = str(error) or f"it took longer than {timeout_s or CALL_TIMEOUT_S:g} s"
            raise ClusterUnavailable(f"{what} gave no answer: {why}") from error
        ran = execution.ended()
        if isinstance(ran, str):
            raise ClusterUnavailable(f"{what} gave no answer: {ran}")
        return ran

    async def log_lines(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        tail: int | None = None,
        previous: bool = False,
        since_s: float | None = None,
        timestamps: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the lines of a container's log, without their ends; ``follow``: until it exits.

        A line of more than ``LOG_LINE_MAX`` bytes comes in pieces.

        ``previous``: of the container before its last restart. Raises as ``get`` does, with 400 if
        the container has not started.
        """
        asked = {
            "container": container,
            "follow": "true" if follow else None,
            "tailLines": tail,
            "previous": "true" if previous else None,
            "sinceSeconds": None if since_s is None else max(1, math.ceil(since_s)),
            "timestamps": "true" if timestamps else None,
        }
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        path = f"{paths.core(namespace, 'pods', pod)}/log?{query}"
        # A container may write nothing for hours: probes of TCP find out whether anybody is there.
        quiet_s = None if follow else QUIET_S
        limits = aiohttp.ClientTimeout(sock_connect=CALL_TIMEOUT_S, sock_read=quiet_s)
        try:
            _, url, headers, *_ = await self._asked("GET", path, {"Accept": "*/*"})
            session, way = self._session()
            request = session.get(
                url, headers=headers, timeout=limits, read_bufsize=LOG_BUFFER, **way
            )
            async with request as answer:
                if answer.status >= 400:
                    raise _refusal("GET", path, answer.status, await answer.read())
                if follow:
                    _keep_alive(answer)
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    *full, rest = _cut(rest)
                    for cut in (*(cut for line in lines for cut in _cut(line)), *full):
                        yield cut.decode("utf-8", "replace")
                if rest:
                    yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ClusterUnavailable(f"the log of pod {pod} broke off: {why}") from error

    @asynccontextmanager
    async def _socket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        _, url, headers, *_ = await self._asked("GET", path, {})
        session, way = self._session()
        async with session.ws_connect(
            url, protocols=PROTOCOLS, headers=headers, heartbeat=QUIET_S, max_msg_size=0, **way
        ) as opened:
            yield opened

    def _session(self) -> tuple[aiohttp.ClientSession, dict[str, Any]]:
        """Return the package's connections and the way to the API server, as it takes it itself.

        It opens no websocket by a proxy, and bounds no buffer.
        """
        assert self._client is not None
        configuration, rest = self._client.configuration, self._client.rest_client
        if rest.pool_manager is None:
            rest.pool_manager = rest._create_pool_manager()
        return rest.pool_manager, {
            "proxy": configuration.proxy,
            "proxy_headers": configuration.proxy_headers,
            "server_hostname": configuration.tls_server_name,
        }

    async def _why_not(self, path: str, error: aiohttp.WSServerHandshakeError) -> ClusterError:
        """Return why the API server opened no websocket: the reason is in an answer without one.

        That request runs nothing: a command needs the websocket.
        """
        try:
            await self.get(path)
        except ClusterRefused as refused:
            if refused.status == error.status:
                return refused
        except ClusterUnavailable as away:
            return away
        return _refusal("GET", path, error.status, str(error.message).encode())

    async def _call(
        self,
        read: Callable[[bytes], T],
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        timeout_s: float = CALL_TIMEOUT_S,
        accept: str = JSON,
    ) -> T:
        limits = aiohttp.ClientTimeout(total=timeout_s)
        try:
            request = self._request(method, path, limits, body, content_type, accept)
            async with await request as answer:
                content: bytes = await answer.read()
                if answer.status >= 400:
                    raise _refusal(method, path, answer.status, content)
                return read(content)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            why = str(error) or f"it took longer than {timeout_s:g} s"
            raise ClusterUnavailable(
                f"the API server did not answer {method} {path}: {why}"
            ) from error

    async def _request(
        self,
        method: str,
        path: str,
        limits: aiohttp.ClientTimeout,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> aiohttp.ClientResponse:
        assert self._client is not None
        headers = {"Content-Type": content_type, "Accept": accept}
        asked = await self._asked(method, path, headers, body)
        answer = await self._client.call_api(*asked, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response

    async def _asked(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: Mapping[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """Return a request as the package sends it, with credentials that are fresh."""
        assert self._client is not None
        found: tuple[Any, ...] = await self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        return found


def _keep_alive(answer: aiohttp.ClientResponse) -> None:
    """Have TCP end a connection whose other side has gone without a word."""
    transport = answer.connection.transport if answer.connection is not None else None
    opened: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if opened is not None:
        for option in tcp_keepalive_socket_options():
            opened.setsockopt(*option)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of a watch; end it after ``QUIET_S`` without one."""
    try:
        async for line in answer.content:
            yield line
    except aiohttp.SocketTimeoutError:
        return


def _cut(line: bytes) -> list[bytes]:
    """Cut a line of a log into pieces of ``LOG_LINE_MAX`` bytes; the last one may be shorter."""
    return [line[at : at + LOG_LINE_MAX] for at in range(0, max(1, len(line)), LOG_LINE_MAX)]


def _object(content: bytes) -> Object:
    found: Object = json.loads(content)
    return found


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _refusal(method: str, path: str, status: int, content: bytes) -> ClusterError:
    """Build the error for a status of 400 or above: a refusal, or unavailability."""
    try:
        message = json.loads(content)["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode("utf-8", "replace")
    path = path.partition("?")[0]
    if status >= 500 or status == BUSY:
        return ClusterUnavailable(f"the API server cannot do {method} {path} ({status}): {message}")
    return ClusterRefused(
        f"the API server refused {method} {path} with {status}: {message}", status
    )
