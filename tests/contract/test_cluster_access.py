# SPDX-License-Identifier: Apache-2.0
"""Ways to an API server: kubeconfigs, tokens, redirects, and watches that die unsaid."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from controller.cluster import access, paths
from controller.cluster import api as cluster_api
from controller.cluster.access import ClusterAccess, access_of, access_of_pod
from controller.cluster.api import ClusterApi
from controller.cluster.collection import Collection
from controller.cluster.executed import Ran
from rdzv.errors import ClusterUnavailable, ConfigError
from tests.support.cluster_api import FakeApi
from tests.support.store.tcp_proxy import TcpProxy
from tests.support.waiting import DEADLINE_S

POD = "/api/v1/namespaces/team/pods/a"
EXEC = "client.authentication.k8s.io/v1"
LONG_S = 120.0
CALM = nullcontext()


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as running:
        await running.put(POD, {"metadata": {"namespace": "team"}})
        yield running


class Kubeconfig:
    """A file with one context, ``c``, for a fake API server."""

    def __init__(self, fake: FakeApi, path: Path, user: Any, **cluster: Any) -> None:
        self.path = path
        trusted = {"server": fake.url, "certificate-authority": str(fake.authority), **cluster}
        context = {"cluster": "k", "user": "u", "namespace": "team"}
        self.parts: dict[str, Any] = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": context}],
            "clusters": [{"name": "k", "cluster": trusted}],
            "users": [{"name": "u", "user": user}],
        }

    def write(self, *parts: str) -> str:
        """Write it, or some parts of it; return its path."""
        told = {name: self.parts[name] for name in parts or self.parts}
        self.path.write_text(json.dumps(told))
        return str(self.path)


@asynccontextmanager
async def reached(
    kubeconfig: Kubeconfig | str, context: str | None = None
) -> AsyncIterator[ClusterApi]:
    """The API server by a kubeconfig, which is written and read beside the event loop."""

    def read() -> ClusterAccess:
        named = kubeconfig if isinstance(kubeconfig, str) else kubeconfig.write()
        return access_of({"KUBECONFIG": named}, None, context)

    found = await asyncio.to_thread(read)
    async with ClusterApi(found) as api:
        yield api


def plugin(tmp_path: Path, **status: Any) -> dict[str, Any]:
    """A credential plug-in, which counts its runs in the token that it gives."""
    told = {"apiVersion": EXEC, "kind": "ExecCredential", "status": {"token": "RUNS", **status}}
    runs = tmp_path / "runs"
    script = f"echo >>{runs}; echo '{json.dumps(told)}' | sed s/RUNS/$(wc -l <{runs})/"
    return {"exec": {"apiVersion": EXEC, "command": "sh", "args": ["-c", script]}}


async def test_several_files_are_one_and_a_context_is_chosen(fake: FakeApi, tmp_path: Path) -> None:
    whole = Kubeconfig(fake, tmp_path / "first", {"token": "s"})
    whole.parts["contexts"].append({"name": "other", "context": {"cluster": "k", "user": "u"}})
    first = await asyncio.to_thread(whole.write, "current-context", "contexts")
    whole.path = tmp_path / "second"
    second = await asyncio.to_thread(whole.write, "clusters", "users")
    both = os.pathsep.join((first, str(tmp_path / "none"), second))
    async with reached(both) as api:
        await api.get(POD)
        assert (api.namespace, fake.tokens) == ("team", ["Bearer s"])
    async with reached(both, "other") as api:
        assert api.namespace == "default"
    with pytest.raises(ConfigError, match="Expected object with name nosuch"):
        async with reached(both, "nosuch"):
            pass


async def test_paths_in_a_file_are_relative_to_it(fake: FakeApi, tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "token-of-u").write_text, "s\n")
    cluster = {"certificate-authority": "ca.crt"}
    file = Kubeconfig(fake, tmp_path / "config", {"tokenFile": "token-of-u"}, **cluster)
    async with reached(file) as api:
        await api.get(POD)
    assert fake.tokens == ["Bearer s"]


@pytest.mark.parametrize(("ends", "tokens"), [("2026", ["2", "3"]), ("2999", ["1", "1"])])
async def test_a_plug_in_runs_again_near_the_end_that_it_gave(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, tokens: list[str]
) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.0)
    user = plugin(tmp_path, expirationTimestamp=f"{ends}-01-01T00:00:00Z")
    async with reached(Kubeconfig(fake, tmp_path / "config", user)) as api:
        for _ in range(2):
            await api.get(POD)
    assert fake.tokens == [f"Bearer {token}" for token in tokens]


async def test_a_plug_in_that_fails_ends_no_other_reading_of_credentials(
    fake: FakeApi, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    wait = f"for _ in $(seq 3000); do test -e {bad} && break; sleep 0.01; done; "
    slow = plugin(tmp_path)
    slow["exec"]["args"][1] = f"touch {good}; {wait}sleep 0.2; {slow['exec']['args'][1]}"
    fails = plugin(tmp_path)
    begun = f"until test -e {good}; do sleep 0.01; done; touch {bad}; exit 1"
    fails["exec"]["args"][1] = begun

    async def read(user: dict[str, Any], name: str) -> None:
        async with reached(Kubeconfig(fake, tmp_path / name, user)) as api:
            await api.get(POD)

    results = await asyncio.gather(read(slow, "slow"), read(fails, "fails"), return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], ConfigError)
    assert fake.tokens == ["Bearer 1"]


async def test_credentials_last_while_their_plug_in_fails_later(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.0)
    user = plugin(tmp_path, expirationTimestamp="2026-01-01T00:00:00Z")
    user["exec"]["args"][1] += f"; test $(wc -l <{tmp_path / 'runs'}) = 1"
    async with reached(Kubeconfig(fake, tmp_path / "config", user)) as api:
        with caplog.at_level(logging.WARNING):
            await api.get(POD)
    assert fake.tokens == ["Bearer 1"]
    assert "process returned 1" in caplog.text


class HttpProxy(TcpProxy):
    """A proxy that is asked to connect."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.asked: set[str] = set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.add(head.decode().partition(" HTTP/")[0])
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await super()._connect(reader, writer)


@pytest.mark.parametrize("named_by", ["proxy-url", "HTTPS_PROXY"])
async def test_calls_commands_and_logs_go_through_the_proxy(
    named_by: str, fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.containers.execute = lambda asked: Ran(0, "out", "")
    await fake.containers.log("team", "a", "t", "line")
    server = fake.url.removeprefix("https://")
    async with HttpProxy(server) as proxy:
        address = f"http://{proxy.endpoint}"
        named = {"proxy-url": address} if named_by == "proxy-url" else {}
        if not named:
            monkeypatch.setenv("HTTPS_PROXY", address)
        file = Kubeconfig(fake, tmp_path / "config", {"token": "s"}, **named)
        async with reached(file) as api:
            await api.get(POD)
            assert (await api.run_in("team", "a", "t", ["true"], timeout_s=LONG_S)).out == "out"
            assert [line async for line in api.log_lines("team", "a", "t")] == ["line"]
        assert proxy.asked == {f"CONNECT {server}"}
    async with reached(file) as api:
        command = api.run_in("team", "a", "t", ["true"], timeout_s=LONG_S)
        for call in (api.get(POD), command, anext(api.log_lines("team", "a", "t"))):
            with pytest.raises(ClusterUnavailable):
                await call


async def test_the_certificate_may_be_for_another_name(fake: FakeApi, tmp_path: Path) -> None:
    fake.containers.execute = lambda asked: Ran(0, "out", "")
    for name, refused in (("127.0.0.1", False), ("elsewhere.example", True)):
        file = Kubeconfig(fake, tmp_path / name, {"token": "s"}, **{"tls-server-name": name})
        async with reached(file) as api:
            for call in (api.get(POD), api.run_in("team", "a", "t", ["true"], timeout_s=LONG_S)):
                with pytest.raises(ClusterUnavailable, match="certificate") if refused else CALM:
                    await call


def oidc(expires: int) -> dict[str, Any]:
    """A token that only its issuer can refresh, which this side never asks."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": expires}).encode()).decode().rstrip("=")
    secrets = dict.fromkeys(("refresh-token", "client-secret"), "s3cret")
    named = {"id-token": f"h.{claims}.s", "client-id": "c", "idp-issuer-url": "https://127.0.0.1:1"}
    return {"auth-provider": {"name": "oidc", "config": {**secrets, **named}}}


async def test_a_token_of_oidc_is_sent_as_it_stands_in_the_file(
    fake: FakeApi, tmp_path: Path
) -> None:
    user = oidc(32503680000)
    async with reached(Kubeconfig(fake, tmp_path / "config", user)) as api:
        await api.get(POD)
    assert fake.tokens == [f"Bearer {user['auth-provider']['config']['id-token']}"]


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"exec": {"apiVersion": EXEC, "command": "/no/such"}}, {}, "no/such"),
        ({"exec": {"apiVersion": EXEC, "command": "true"}}, {}, "decode"),
        ({"exec": {"apiVersion": EXEC}, "token": "s3cret"}, {}, "command"),
        (
            {
                "exec": {"apiVersion": EXEC, "command": "true", "env": [{"name": "A"}]},
                "token": "s3cret",
            },
            {},
            "Expected key value|value",
        ),
        ({"token": "s3cret"}, {"server": ""}, "names no server"),
        ({"auth-provider": {"name": "oidc", "config": {"a": "s3cret"}}}, {}, "refresh|expired"),
        (oidc(1), {}, "has expired: run kubectl"),
        ({"token": "s3cret"}, {"certificate-authority": "/no/such"}, "no/such"),
        (
            {"username": "u", "password": "s3cret", "client-certificate-data": "%"},
            {},
            "certificate",
        ),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_says_why_without_secrets(
    user: dict[str, Any], cluster: dict[str, Any], why: str, fake: FakeApi, tmp_path: Path
) -> None:
    file = Kubeconfig(fake, tmp_path / "config", user, **cluster)
    with pytest.raises(ConfigError, match=why) as caught:
        async with reached(file):
            pass
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_redirect_is_not_followed(fake: FakeApi) -> None:
    """A pod's page, read through the API server, could name any address."""
    fake.redirected[POD] = f"{fake.url}/api/v1/secrets"
    async with ClusterApi(fake.access) as api:
        with pytest.raises(ClusterUnavailable, match="redirects, with 302"):
            await api.text(POD)
    assert [path for _, path in fake.calls] == [POD]


def test_outside_of_a_cluster_the_controller_says_where_it_runs(tmp_path: Path) -> None:
    named = {"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"}
    for environ in ({}, named):
        with pytest.raises(ConfigError, match="install the chart"):
            access_of_pod(environ, tmp_path)


PODS = "/api/v1/pods"
WATCHES = 150
LEASES = "/apis/coordination.k8s.io/v1/namespaces/muster-system/leases"


async def test_a_watch_that_is_silent_ends_so_that_another_shows_whether_anybody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "QUIET_S", 5.0)
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api:
        await fake.put(paths.lease("muster-system", "one"), {"spec": {"a": 1}})
        path = f"{LEASES}?fieldSelector=metadata.name=one"
        async with asyncio.timeout(DEADLINE_S):
            seen = [event["object"]["spec"] async for event in api.watch(path, "0")]
    assert seen == [{"a": 1}]


async def test_a_quiet_watch_keeps_its_version_by_bookmarks(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api:
        async with Collection(api, PODS, dict).following():
            await fake.until_watched()
        (asked,) = fake.watches
        assert asked["allowWatchBookmarks"] == "true"


async def test_many_watches_keep_no_call_waiting(tmp_path: Path) -> None:
    """One for each namespace whose pods all ask, for example."""
    async with FakeApi(tmp_path) as fake, ClusterApi(fake.access) as api, AsyncExitStack() as stack:
        await fake.put(paths.lease("muster-system", "one"), {"spec": {}})
        for _ in range(WATCHES):
            await stack.enter_async_context(Collection(api, PODS, dict).following())
        await fake.until_watched(WATCHES)
        await api.get(paths.lease("muster-system", "one"))
