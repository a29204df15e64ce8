# SPDX-License-Identifier: Apache-2.0
"""Requests to the webhook write nothing; pods that are there without a sidecar are Events."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controller.admission import injector
from controller.admission.injector import AdmissionMetrics, Injector
from controller.admission.uninjected import UninjectedPods, selects
from controller.cluster import paths
from controller.cluster.api import ClusterApi
from controller.cluster.events import Events
from controller.process import Callers, application, ask_for_certificates, serving
from rdzv.errors import ConfigError
from tests.support.cluster_api import CLOSED_S, FakeApi, make_patient
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, environ, loaded, manifest
from tests.support.injection.owners import UID, pods_of
from tests.support.store.certificates import Authority
from tests.support.tasks import beside

WEBHOOK = paths.webhook_configuration("muster")
EVENTS = "/api/v1/namespaces/team/events/"
BOUNDS = ("min_nodes", "max_nodes", "job")


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    make_patient(monkeypatch)
    monkeypatch.setattr(injector, "PLAN_TIMEOUT_S", 150.0)
    async with FakeApi(tmp_path) as fake:
        others = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["closed"]}
        hook = {
            "objectSelector": {"matchLabels": {"muster.dev/inject": "true"}},
            "namespaceSelector": {"matchExpressions": [others]},
        }
        await fake.put(WEBHOOK, {"webhooks": [hook]})
        for name in ("team", "closed"):
            labels = {"kubernetes.io/metadata.name": name}
            await fake.put(paths.namespace(name), {"metadata": {"labels": labels}})
        yield fake


@asynccontextmanager
async def injecting(fake: FakeApi) -> AsyncIterator[tuple[ClusterApi, Injector]]:
    said = environ({k: v for k, v in FLAGS.items() if k not in BOUNDS})
    async with ClusterApi(fake.access) as api:
        yield api, Injector(api, said, AdmissionMetrics())


@asynccontextmanager
async def publishing(fake: FakeApi) -> AsyncIterator[UninjectedPods]:
    async with injecting(fake) as (api, injector):
        clock = time.monotonic
        pods = UninjectedPods(api, injector, "muster", Events(api, clock), clock)
        async with beside(pods.run()):
            yield pods


def review(namespace: str, pod: Any) -> bytes:
    return json.dumps({"request": {"uid": "u", "namespace": namespace, "object": pod}}).encode()


def pods(namespace: str, *names: str, **annotations: str) -> Iterator[tuple[str, Any]]:
    """Pods of a Deployment, as they are before the API server has created them."""
    (_, pod, _), *_ = pods_of(loaded(manifest(command=["torchrun", "train.py"]))[0])
    for name in names:
        made = copy.deepcopy(pod)
        notes = {f"muster.dev/{key}": text for key, text in annotations.items()}
        labels = {**made["metadata"].get("labels", {}), "muster.dev/inject": "true"}
        about = {"namespace": namespace, "labels": labels, "annotations": notes}
        made["metadata"] = {**made["metadata"], **about, "name": name}
        yield f"{paths.core(namespace, 'pods')}/{name}", made


async def test_no_request_writes_anything(fake: FakeApi) -> None:
    async with injecting(fake) as (_, injector):
        for number in range(50):
            ((_, pod),) = pods("kube-system", f"x-{number}", min="URGENT https://evil.example")
            pod["metadata"]["ownerReferences"][0]["uid"] = f"uid-{number}"
            answer = json.loads(await injector.answer(review("kube-system", pod)))
            assert answer["response"]["allowed"] is True
            assert "URGENT" in answer["response"]["warnings"][0]
        await asyncio.sleep(0)
    assert [call for call in fake.calls if call[0] != "GET"] == []


async def test_a_pod_that_is_there_is_an_event_with_its_own_reason(fake: FakeApi) -> None:
    """Whatever a request has claimed about the same owner before."""
    for path, pod in pods("team", "a", "b", min="few"):
        await fake.put(path, pod)
    ((_, forged),) = pods("team", "a", min="evil")
    async with injecting(fake) as (_, injector):
        await injector.answer(review("team", forged))
    async with publishing(fake):
        (event,) = await fake.until_any(EVENTS)
        await fake.remove(f"{paths.core('team', 'pods')}/a")
    assert (event["reason"], event["involvedObject"]["kind"]) == ("NotInjected", "ReplicaSet")
    assert "'few'" in event["message"]
    assert "evil" not in event["message"]
    assert len([path for path in fake.objects if path.startswith(EVENTS)]) == 1


async def test_a_job_without_a_sidecar_because_of_another_part_is_an_event_at_the_job(
    fake: FakeApi,
) -> None:
    """Nobody reads the warning that its operator gets."""
    made = loaded(CORPUS["elastic-mpi"])[0]
    specs = made["spec"]["mpiReplicaSpecs"]
    for spec in specs.values():
        spec["template"]["metadata"] = {"labels": {"muster.dev/inject": "true"}}
    specs["Worker"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 9401}]
    (_, launcher, read), *_ = pods_of(made)
    assert read is not None
    path = "/apis/kubeflow.org/v1/namespaces/team/mpijobs/mnist-elastic"
    await fake.put(path, {**read, "metadata": {**read["metadata"], "uid": UID}})
    launcher["metadata"] |= {"name": "mnist-elastic-launcher", "namespace": "team"}
    await fake.put(f"{paths.core('team', 'pods')}/mnist-elastic-launcher", launcher)
    async with publishing(fake):
        (event,) = await fake.until_any(EVENTS)
    assert (event["reason"], event["involvedObject"]["kind"]) == ("NotInjected", "MPIJob")
    assert "Worker of MPIJob mnist-elastic cannot be injected" in event["message"]


async def test_pods_without_a_sidecar_are_counted_and_those_that_could_have_one_are_known(
    fake: FakeApi,
) -> None:
    for namespace, settings, maker in (
        ("team", {"min": "1", "max": "2"}, "late"),
        ("team", {"min": "few"}, "refused"),
        ("closed", {"min": "1", "max": "2"}, "closed"),
    ):
        for path, pod in pods(namespace, f"{maker}-0", f"{maker}-1", **settings):
            pod["metadata"]["ownerReferences"][0]["uid"] = maker
            await fake.put(path, pod)

    def events() -> int:
        return len([path for path in fake.objects if path.startswith(EVENTS)])

    async with publishing(fake) as uninjected:
        async with asyncio.timeout(CLOSED_S), fake._changed:
            await fake._changed.wait_for(lambda: events() == 2)
        without = {one.name for one in uninjected.pods()}
        assert without == {"late-0", "late-1", "refused-0", "refused-1"}
        assert {one.name for one in uninjected.pods(injectable=True)} == {"late-0", "late-1"}
        said = [one["message"] for path, one in fake.objects.items() if path.startswith(EVENTS)]
        assert sum("no replica of the webhook answered" in one for one in said) == 1
        assert sum("'few'" in one for one in said) == 1


async def test_pods_that_the_webhook_is_not_for_are_left_alone(fake: FakeApi) -> None:
    # The newest maker is judged first, so the Event is the last thing that happens.
    for path, pod in pods("team", "y", min="few"):
        await fake.put(path, pod)
    for namespace in ("closed", "nowhere"):
        for path, pod in pods(namespace, "x", min="few"):
            await fake.put(path, pod)
    for path, pod in pods("team", "over", min="few"):
        await fake.put(path, {**pod, "status": {"phase": "Failed"}})
    async with publishing(fake):
        await fake.until_any(EVENTS)
    assert {("GET", paths.namespace(name)) for name in ("closed", "nowhere")} <= {*fake.calls}
    assert {path for method, path in fake.calls if method == "POST"} == {EVENTS.rstrip("/")}


async def test_the_pods_of_a_namespace_that_asks_are_followed(fake: FakeApi) -> None:
    hook = {"namespaceSelector": {"matchLabels": {"muster.dev/inject": "true"}}}
    await fake.put(WEBHOOK, {"webhooks": [hook]})
    async with publishing(fake):
        labels = {"kubernetes.io/metadata.name": "team", "muster.dev/inject": "true"}
        await fake.put(paths.namespace("team"), {"metadata": {"labels": labels}})
        for path, pod in pods("team", "a", min="few"):
            del pod["metadata"]["labels"]["muster.dev/inject"]
            await fake.put(path, pod)
        (event,) = await fake.until_any(EVENTS)
    assert "'few'" in event["message"]


@pytest.mark.parametrize(
    ("address", "certificate", "refused"),
    [
        ("10.0.0.7", True, ""),
        ("::ffff:10.0.0.7", True, ""),
        ("fd00::1%eth0", True, ""),
        ("10.0.1.7", True, "--api-server-cidrs"),
        ("10.0.0.7", False, "--api-server-ca"),
    ],
)
def test_callers_other_than_the_api_server_are_refused(
    address: str, certificate: bool, refused: str
) -> None:
    narrow = Callers((ip_network("10.0.0.0/24"), ip_network("fd00::/64")), certificate=True)
    fault = narrow.fault(address, has_certificate=certificate)
    assert (refused in fault, bool(fault)) == (True, bool(refused))
    assert Callers().fault(address, has_certificate=False) == ""


async def test_a_caller_without_the_api_servers_certificate_is_refused(
    fake: FakeApi, tmp_path: Path
) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path, "api-servers")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*await asyncio.to_thread(authority.server, "webhook"))
    ask_for_certificates(context, str(authority.cacert))
    own = await asyncio.to_thread(authority.client, "api-server")
    ((_, pod),) = pods("team", "a", min="1", max="2")
    async with injecting(fake) as (_, injector):
        callers = Callers(certificate=True)
        pages = application(injector, AdmissionMetrics(), asyncio.Event(), callers)
        async with (
            serving(pages, "127.0.0.1", 0, context) as port,
            aiohttp.ClientSession(f"https://127.0.0.1:{port}") as session,
        ):
            trusting = ssl.create_default_context(cafile=str(authority.cacert))
            async with session.get("/healthz", ssl=trusting) as answer:
                assert answer.status == 200
            async with session.post("/inject", data=review("team", pod), ssl=trusting) as answer:
                assert answer.status == 403
            shown = ssl.create_default_context(cafile=str(authority.cacert))
            shown.load_cert_chain(*own)
            async with session.post("/inject", data=review("team", pod), ssl=shown) as answer:
                assert (await answer.json())["response"]["allowed"] is True
    with pytest.raises(ConfigError, match="--api-server-ca"):
        ask_for_certificates(context, str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "In", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_selector_selects_as_kubernetes_says(selector: Any, selected: bool) -> None:
    assert selects(selector, {"a": "1"}) is selected
