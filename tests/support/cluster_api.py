# SPDX-License-Identifier: Apache-2.0
"""An API server of Kubernetes in this process: objects with versions, lists and watches.

Its pods' containers, with commands and logs, are ``FakeApi.containers``.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from aiohttp import web

from controller.cluster.access import ClusterAccess, access_of_pod
from controller.cluster.api import ClusterApi
from tests.support.containers import Containers
from tests.support.store.certificates import Authority

CLOSED_S = 150.0
"""Ends the wait for what does not come."""

CALL_S = 60.0
"""What a call has after ``make_patient``."""


class FakeApi:
    """Objects by path. ``away``: it answers nothing but 503. ``refused``: paths without rights,
    and ``refused_methods`` as (method, path).

    ``busy``: paths that answer 503. ``busy_once``: only to the next call, not to the one after.
    """

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.accepted: set[tuple[str, str]] = set()
        """Paths that were asked for, each with the media type."""
        self.watches: list[dict[str, str]] = []
        """What each watch asked for."""
        self.away = False
        self.refused: set[str] = set()
        self.refused_methods: set[tuple[str, str]] = set()
        self.busy: set[str] = set()
        self.busy_once: set[str] = set()
        self.redirected: dict[str, str] = {}
        """Addresses that paths redirect to."""
        self.tokens: list[str] = []
        """The credentials of each call."""
        self.containers = Containers()
        self.admits: Callable[[dict[str, Any]], dict[str, Any] | str] = lambda tried: tried
        """The answer to an object that is only tried: as webhooks change it, or why not."""
        self.goes_with: dict[str, list[str]] = {}
        """Paths of objects that go with another one when that is deleted, by its path."""
        self._folder = folder
        self._version = 1
        self._removed: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._access: ClusterAccess | None = None

    async def __aenter__(self) -> FakeApi:
        pages = web.Application()
        pages.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(pages, shutdown_timeout=0.1)
        await self._runner.setup()
        context = await asyncio.to_thread(self._context)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        named = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._runner.addresses[0][1]),
        }
        self._access = await asyncio.to_thread(access_of_pod, named, self._folder)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Its address."""
        assert self._runner is not None
        return f"https://127.0.0.1:{self._runner.addresses[0][1]}"

    @property
    def authority(self) -> Path:
        """The certificate that it is to be trusted by."""
        return self._folder / "ca.crt"

    @property
    def access(self) -> ClusterAccess:
        """How a pod would reach it."""
        assert self._access is not None
        return self._access

    async def put(self, path: str, body: dict[str, Any]) -> None:
        """Write an object, whatever was there."""
        async with self._changed:
            self._version += 1
            metadata = {**body.get("metadata", {}), "resourceVersion": str(self._version)}
            metadata["name"] = path.rpartition("/")[2]
            metadata.setdefault("uid", f"uid-of-{path}")
            self.objects[path] = {**body, "metadata": metadata}
            self._changed.notify_all()

    async def remove(self, path: str) -> None:
        """Take an object away."""
        async with self._changed:
            self._version += 1
            gone = self.objects.pop(path)
            metadata = {**gone["metadata"], "resourceVersion": str(self._version)}
            self._removed.append((path, {**gone, "metadata": metadata}))
            self._changed.notify_all()

    async def until(self, path: str, holds: Any) -> dict[str, Any]:
        """Wait until an object is as it should be."""
        await self._until(lambda: path in self.objects and holds(self.objects[path]))
        return self.objects[path]

    async def until_called(self, call: tuple[str, str], times: int) -> None:
        """Wait until there were so many of a call that it is too busy to answer."""
        await self._until(lambda: self.calls.count(call) >= times)

    async def until_watched(self, count: int = 1) -> None:
        """Wait until there were so many watches."""
        await self._until(lambda: len(self.watches) >= count)

    async def until_any(self, prefix: str) -> list[dict[str, Any]]:
        """Wait until something was made below ``prefix``, and return all that is there."""
        await self._until(lambda: any(path.startswith(prefix) for path in self.objects))
        return [held for path, held in self.objects.items() if path.startswith(prefix)]

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(CLOSED_S), self._changed:
            await self._changed.wait_for(holds)

    def _context(self) -> ssl.SSLContext:
        authority = Authority(self._folder, "api")
        certificate, key = authority.server("api-server")
        (self._folder / "ca.crt").write_bytes(authority.pem)
        (self._folder / "token").write_text("t")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append((request.method, path))
        self.accepted.add((path, request.headers.get("Accept", "")))
        self.tokens.append(request.headers.get("Authorization", ""))
        if path in self.redirected:
            return web.Response(status=302, headers={"Location": self.redirected[path]})
        if self.away:
            return _status(503, "away")
        if path in self.busy | self.busy_once:
            self.busy_once.discard(path)
            async with self._changed:
                self._changed.notify_all()
            return _status(503, "busy")
        if path in self.refused or (request.method, path) in self.refused_methods:
            return _status(403, "no rights")
        if self.containers.answers(request):
            if path.rpartition("/")[0] not in self.objects:
                return _status(404, f"there is no {path}")
            return await self.containers.answer(request)
        if "watch" in request.query:
            async with self._changed:
                self.watches.append(dict(request.query))
                self._changed.notify_all()
            return await self._watch(request)
        match request.method:
            case "GET" if {"limit", "labelSelector", "fieldSelector"} & request.query.keys():
                selector = request.query.get("labelSelector", "")
                asked = [held for held in self.objects.values() if self._is_asked(request, held)]
                items = [held for held in asked if _selected(selector, held)]
                version = {"resourceVersion": str(self._version)}
                return web.json_response({"metadata": version, "items": items})
            case "GET" if path in self.objects:
                return web.json_response(self.objects[path])
            case "POST":
                body = await request.json()
                if "dryRun" in request.query:
                    tried = self.admits(body)
                    return (
                        _status(403, tried) if isinstance(tried, str) else web.json_response(tried)
                    )
                made = f"{path}/{body['metadata']['name']}"
                if made in self.objects:
                    return _status(409, "it is there")
                await self.put(made, body)
                return web.json_response(self.objects[made], status=201)
            case "PUT" if path in self.objects:
                body = await request.json()
                held = self.objects[path]["metadata"]["resourceVersion"]
                if body["metadata"].get("resourceVersion") != held:
                    return _status(409, "another version is there")
                await self.put(path, body)
                return web.json_response(self.objects[path])
            case "PATCH" if (path := path.removesuffix("/scale")) in self.objects:
                change = await request.json()
                held = self.objects[path]["metadata"]["resourceVersion"]
                if (change.get("metadata") or {}).get("resourceVersion", held) != held:
                    return _status(409, "another version is there")
                if "dryRun" not in request.query:
                    await self.put(path, _merged(self.objects[path], change))
                return web.json_response(self.objects[path])
            case "DELETE" if path in self.objects:
                asked = await request.json() if request.can_read_body else {}
                held = self.objects[path]["metadata"]["resourceVersion"]
                if asked.get("preconditions", {}).get("resourceVersion", held) != held:
                    return _status(409, "another version is there")
                if "dryRun" in request.query:
                    return web.json_response({})
                await self.remove(path)
                for other in self.goes_with.pop(path, []):
                    await self.remove(other)
                return web.json_response({})
        return _status(404, f"there is no {path}")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Every change of what is asked for, of all namespaces where the path names none."""
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)

        def news() -> list[tuple[int, str, dict[str, Any]]]:
            changes = [("MODIFIED", one) for one in self.objects.values()]
            changes += [("DELETED", one) for _, one in self._removed]
            dated = [(int(one["metadata"]["resourceVersion"]), kind, one) for kind, one in changes]
            found = [one for one in dated if one[0] > seen and self._is_asked(request, one[2])]
            return sorted(found, key=lambda one: one[0])

        while not self.away:
            async with self._changed:
                await self._changed.wait_for(lambda: news() or self.away)
                found = news()
            for at, kind, held in found:
                seen = at
                await response.write(json.dumps({"type": kind, "object": held}).encode() + b"\n")
        return response

    def _is_asked(self, request: web.Request, held: dict[str, Any]) -> bool:
        """Whether a list or a watch has this object: by its collection, and by its name."""
        named = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        above, _, plural = request.path.rpartition("/")
        there = (*self.objects.items(), *self._removed)
        paths = [path.split("/") for path, one in there if one is held]
        return named in ("", held["metadata"]["name"]) and any(
            path[-2] == plural and "/".join(path).startswith(above) for path in paths
        )


def make_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of a ``ClusterApi`` have ``CALL_S``, whatever its caller allows."""
    call = ClusterApi._call

    async def patient(self: ClusterApi, *request: Any, **options: Any) -> Any:
        return await call(self, *request, **{**options, "timeout_s": CALL_S})

    monkeypatch.setattr(ClusterApi, "_call", patient)


def _selected(selector: str, held: dict[str, Any]) -> bool:
    """Whether an object has each label, as KEY or KEY=VALUE; all objects have others."""
    labels = held["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        if re.fullmatch(r"[a-zA-Z0-9./-]+(=[^,]*)?", term):
            key, is_equal, value = term.partition("=")
            if key not in labels or (is_equal and labels[key] != value):
                return False
    return True


def _merged(held: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """As a merge patch does."""
    both = dict(held)
    for key, value in change.items():
        if value is None:
            both.pop(key, None)
        elif isinstance(value, dict) and isinstance(both.get(key), dict):
            both[key] = _merged(both[key], value)
        else:
            both[key] = value
    return both


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message, "code": code}, status=code)
