# SPDX-License-Identifier: Apache-2.0
"""The API server of tests, with pods: listed and watched in all namespaces, as metadata alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.cluster_api import FakeApi


class PodsApi(FakeApi):
    """Pods come and go by ``start`` and ``end``; a delete may ask for a version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pods: dict[str, dict[str, Any]] = {}
        self._news: list[dict[str, Any]] = []
        self._told = asyncio.Condition()

    async def start(self, namespace: str, name: str, metadata: dict[str, Any]) -> None:
        """Have a pod with these labels and annotations."""
        pod = {"metadata": {**metadata, "namespace": namespace, "name": name, "uid": name}}
        await self._tell("ADDED", pod)
        self._pods[name] = pod

    async def end(self, name: str) -> None:
        """Take a pod away."""
        await self._tell("DELETED", self._pods.pop(name))

    async def _tell(self, kind: str, pod: dict[str, Any]) -> None:
        async with self._told:
            pod["metadata"]["resourceVersion"] = str(len(self._news) + 1)
            self._news.append({"type": kind, "object": pod})
            self._told.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/pods" and not self.away:
            assert "PartialObjectMetadata" in request.headers["Accept"]
            if "watch" in request.query:
                return await self._watch_pods(request)
            version = {"resourceVersion": str(len(self._news))}
            return web.json_response({"metadata": version, "items": [*self._pods.values()]})
        if request.method == "DELETE" and request.path in self.objects and request.can_read_body:
            wanted = (await request.json())["preconditions"]["resourceVersion"]
            if wanted != self.objects[request.path]["metadata"]["resourceVersion"]:
                return web.json_response({"message": "another version is there"}, status=409)
        return await super()._answer(request)

    async def _watch_pods(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            async with self._told:
                while len(self._news) <= seen:
                    await self._told.wait()
                news = self._news[seen:]
            for event in news:
                await response.write(json.dumps(event).encode() + b"\n")
            seen += len(news)
