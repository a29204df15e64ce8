# SPDX-License-Identifier: Apache-2.0
"""The controller before an API server: certificates, owners, answers that are never a no."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from controller import process
from controller.admission import decision
from controller.admission import injector as admission
from controller.admission.injector import AdmissionMetrics, Injector
from controller.certificate_keeper import CertificateKeeper
from controller.certificates import LEAF_DAYS
from controller.cluster.api import ClusterApi
from controller.config import ControllerConfig
from controller.process import application, serving
from rdzv.settings import load
from tests.support.clocks.hand import HandHour
from tests.support.cluster_api import FakeApi
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, environ, loaded, manifest
from tests.support.injection.owners import UID, pods_of
from tests.support.injection.patching import patched

SECRET = "/api/v1/namespaces/muster-system/secrets/muster-controller"
WEBHOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/muster"
JOB = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/elastic-example-imagenet"
HOST = "muster-controller.muster-system.svc"
PATIENCE_S = 150.0


class Controller:
    """One replica, on a port of its own."""

    def __init__(self, fake: FakeApi, keeper: CertificateKeeper, port: int) -> None:
        self.keeper = keeper
        self._fake = fake
        self._url = f"https://127.0.0.1:{port}/inject"

    async def ask(self, pod: Any, namespace: str = "team") -> Any:
        """As the API server asks, which trusts the authority that it was told of alone."""
        pem = base64.b64decode(await trusted_authority(self._fake)).decode()
        context = await asyncio.to_thread(ssl.create_default_context, cadata=pem)
        body = {"request": {"uid": "u", "namespace": namespace, "object": pod}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url, json=body, ssl=context, server_hostname=HOST) as answer,
        ):
            response = json.loads(await answer.read())["response"]
            assert response["uid"] == "u"
            return response


@asynccontextmanager
async def controller(
    fake: FakeApi, time: HandHour, unsaid: tuple[str, ...] = ("job",)
) -> AsyncIterator[Controller]:
    async with ClusterApi(fake.access) as api:
        keeper = CertificateKeeper(
            api, "muster-system", "muster-controller", "muster", (HOST,), time
        )
        metrics = AdmissionMetrics()
        said = environ({k: v for k, v in FLAGS.items() if k not in unsaid})
        injector = Injector(api, said, metrics)
        keeping = asyncio.create_task(keeper.run())
        pages = application(injector, metrics, keeper.ready)
        async with serving(pages, "127.0.0.1", 0, keeper.context) as port:
            yield Controller(fake, keeper, port)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping


@asynccontextmanager
async def injecting(fake: FakeApi) -> AsyncIterator[Injector]:
    async with ClusterApi(fake.access) as api:
        yield Injector(api, environ(FLAGS), AdmissionMetrics())


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    for name in ("PLAN_TIMEOUT_S", "ANSWER_TIMEOUT_S", "READ_TIMEOUT_S"):
        monkeypatch.setattr(admission, name, PATIENCE_S)
    async with FakeApi(tmp_path) as fake:
        await fake.put(SECRET, {})
        hooks: list[Any] = [{"name": name, "clientConfig": {"service": {}}} for name in ("a", "b")]
        await fake.put(WEBHOOK, {"webhooks": hooks})
        yield fake


class Planner:
    """Plans that stand still until ``ends`` is set: of the pods and namespaces that ``holds``."""

    def __init__(self) -> None:
        self.holds: Callable[[Any, str], bool] = lambda pod, namespace: True
        self.busy = False
        """Whether they compute meanwhile."""
        self.ends = threading.Event()
        self._begun = threading.Event()
        self._plan = decision.decide

    def __call__(self, pod: Any, namespace: str, *given: Any, **more: Any) -> Any:
        if self.holds(pod, namespace):
            self._begun.set()
            while not self.ends.wait(0.0 if self.busy else PATIENCE_S):
                pass
        return self._plan(pod, namespace, *given, **more)

    async def begins(self) -> None:
        """Wait until another plan stands still."""
        await asyncio.to_thread(self._begun.wait, PATIENCE_S)
        self._begun.clear()


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    made = Planner()
    monkeypatch.setattr(decision, "decide", made)
    yield made
    made.ends.set()


def without(reason: str) -> list[str]:
    return [f"muster: admitted without Muster: {reason}"]


def trusted(configuration: dict[str, Any]) -> str | None:
    found: set[str | None] = {
        one["clientConfig"].get("caBundle") for one in configuration["webhooks"]
    }
    (bundle,) = found
    return bundle


async def trusted_authority(fake: FakeApi) -> str:
    """What the API server trusts, in base64, once it was told."""
    told = trusted(await fake.until(WEBHOOK, trusted))
    assert told is not None
    return told


def labelled() -> Any:
    (_, pod, read), *_ = pods_of(loaded(CORPUS["elastic-pytorch-job"])[0])
    assert read is not None
    return pod, {**read, "metadata": {**read["metadata"], "uid": UID}}


async def test_two_replicas_share_one_certificate_which_the_api_server_trusts(
    fake: FakeApi,
) -> None:
    async with controller(fake, HandHour()) as one, controller(fake, HandHour()) as other:
        authority = await trusted_authority(fake)
        pod, read = labelled()
        await fake.put(JOB, read)
        for replica in (one, other):
            async with asyncio.timeout(PATIENCE_S):
                await replica.keeper.ready.wait()
            answer = await replica.ask(pod)
            assert answer["allowed"] is True
            assert answer["patchType"] == "JSONPatch"
        made = fake.objects[SECRET]["data"]
        assert trusted(fake.objects[WEBHOOK]) == authority

        # Somebody takes it away: it is put back, whoever is the first.
        hooks = fake.objects[WEBHOOK]
        for hook in hooks["webhooks"]:
            hook["clientConfig"].pop("caBundle")
        await fake.put(WEBHOOK, hooks)
        assert await trusted_authority(fake) == authority
        assert fake.objects[SECRET]["data"] == made


async def test_a_certificate_that_ran_out_while_the_controller_was_away_is_renewed_at_the_start(
    fake: FakeApi,
) -> None:
    time = HandHour()
    async with controller(fake, time):
        authority = await trusted_authority(fake)
    before = fake.objects[SECRET]["data"]["tls.crt"]
    time.now += timedelta(days=400)
    async with controller(fake, time):
        held = await fake.until(SECRET, lambda secret: secret["data"]["tls.crt"] != before)
        assert held["data"]["ca.crt"] == authority
        assert trusted(fake.objects[WEBHOOK]) == authority


async def test_one_that_ran_out_keeps_no_pod_out_and_is_renewed_without_a_restart(
    fake: FakeApi,
) -> None:
    """The API server asks, does not trust what it finds, and lets the pod start as it is."""
    time = HandHour()
    time.now -= timedelta(days=LEAF_DAYS + 1)  # TLS itself goes by the machine's clock
    async with controller(fake, time) as one:
        authority = await trusted_authority(fake)
        expired = fake.objects[SECRET]["data"]["tls.crt"]
        pod, read = labelled()
        await fake.put(JOB, read)
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="expired"):
            await one.ask(pod)

        time.now = datetime.now(UTC)
        await fake.put(SECRET, fake.objects[SECRET])  # it looks at each change, or within an hour
        await fake.until(SECRET, lambda secret: secret["data"]["tls.crt"] != expired)
        # It is made known once it is served.
        await fake.put(WEBHOOK, {"webhooks": [{"name": "a", "clientConfig": {}}]})
        assert await trusted_authority(fake) == authority
        assert "patch" in await one.ask(pod)


async def test_a_pod_is_admitted_whatever_the_api_server_does_with_its_owner(fake: FakeApi) -> None:
    pod, _ = labelled()
    async with controller(fake, HandHour()) as one:
        fake.refused.add(JOB)
        fake_bounds = {"name": "PET_NNODES", "value": "1:2"}
        pod["spec"]["containers"][0]["env"].append(fake_bounds)
        assert "patch" in await one.ask(pod)
        fake.refused.clear()
        fake.away = True
        assert "patch" in await one.ask(pod)
        # What is no pod at all is a defect of ours, and it is admitted as well.
        broken = {"metadata": {"ownerReferences": [{"controller": True}]}, "spec": {}}
        answer = await one.ask(broken)
        assert answer["allowed"] is True
        assert "defect" in answer["warnings"][0]


@pytest.mark.parametrize("planners", [1, 2])
async def test_a_pod_whose_plan_does_not_end_is_admitted_and_holds_nobody_up(
    fake: FakeApi, planner: Planner, monkeypatch: pytest.MonkeyPatch, planners: int
) -> None:
    pod, _ = labelled()
    planner.holds = lambda pod, _: pod["metadata"].get("name") == "stuck"
    monkeypatch.setattr(admission, "PLANNERS", planners + 1)
    slow = {**pod, "metadata": {**pod["metadata"], "name": "stuck"}}
    async with controller(fake, HandHour()) as one, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(one.ask(slow, f"a{n}")) for n in range(planners)]
        assert "patch" in await one.ask(pod)
        assert not any(task.done() for task in asked)
        monkeypatch.setattr(admission, "PLAN_TIMEOUT_S", 0.0)
        assert (await one.ask(slow))["warnings"] == without(admission.TOO_SLOW)
        planner.ends.set()


async def test_namespace_with_200_reviews_under_way_does_not_delay_another(
    fake: FakeApi, planner: Planner
) -> None:
    pod, _ = labelled()
    planner.holds = lambda _, namespace: namespace == "many"
    async with injecting(fake) as injector, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(injector.verdict(pod, "many", 100)) for _ in range(200)]
        await planner.begins()
        verdict, _ = await injector.verdict(pod, "team", 100)
        assert verdict.injected
        assert not any(one.done() for one in asked)
        planner.ends.set()
    assert all(one.result()[0].injected for one in asked)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_plan_is_too_slow_by_its_own_processor_time(
    fake: FakeApi, planner: Planner, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    pod, _ = labelled()
    planner.busy = busy
    monkeypatch.setattr(admission, "PLAN_TIMEOUT_S", 0.3)
    async with injecting(fake) as injector:
        asked = asyncio.create_task(injector.verdict(pod, "team", 100))
        await asyncio.wait({asked}, timeout=PATIENCE_S if busy else 1.0)
        assert asked.done() == busy
        planner.ends.set()
        verdict, _ = await asked
    assert verdict.injected != busy


async def test_reviews_under_way_of_a_namespace_are_bounded(
    fake: FakeApi, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, _ = labelled()
    size = admission.NAMESPACE_MAX_BYTES // 8
    monkeypatch.setattr(admission, "POD_MAX_BYTES", size)
    async with injecting(fake) as injector, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(injector.verdict(pod, "many", size)) for _ in range(8)]
        await asyncio.sleep(0)
        verdict, _ = await injector.verdict(pod, "many", size)
        assert verdict.reason == admission.TOO_MANY
        asked.append(tasks.create_task(injector.verdict(pod, "team", size)))
        planner.ends.set()
    assert all(one.result()[0].injected for one in asked)
    async with injecting(fake) as injector:
        verdict, _ = await injector.verdict(pod, "many", size)
        assert verdict.injected


async def test_a_plan_has_its_time_from_its_begin_and_not_from_its_place_in_the_queue(
    fake: FakeApi, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, _ = labelled()
    monkeypatch.setattr(admission, "PLANNERS", 1)
    async with controller(fake, HandHour()) as one, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(one.ask(pod))
        await planner.begins()
        monkeypatch.setattr(admission, "PLAN_TIMEOUT_S", 0.0)
        second = tasks.create_task(one.ask(pod))
        answered, _ = await asyncio.wait({second}, timeout=1.0)
        assert not answered
        monkeypatch.setattr(admission, "PLAN_TIMEOUT_S", PATIENCE_S)
        planner.ends.set()
        assert "patch" in await first
        assert "patch" in await second
        planner.ends.clear()
        stuck = tasks.create_task(one.ask(pod))
        await planner.begins()
        monkeypatch.setattr(admission, "ANSWER_TIMEOUT_S", 0.0)
        assert (await one.ask(pod))["warnings"] == without(admission.TOO_SLOW)
        planner.ends.set()
        await stuck


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("much", ["values", "bytes"])
async def test_a_pod_larger_than_any_that_trains_is_admitted_before_it_is_planned(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch, much: str
) -> None:
    pod, _ = labelled()
    largest = admission.POD_MAX_VALUES if much == "values" else admission.POD_MAX_BYTES // 2
    args = ["a"] * largest if much == "values" else ["aa" * largest]
    pod["spec"]["containers"][0]["args"] = args
    monkeypatch.setattr(decision, "decide", None)
    async with controller(fake, HandHour()) as one:
        answer = await one.ask(pod)
    assert answer["allowed"] is True
    assert answer["warnings"] == without(admission.TOO_LARGE)


@pytest.mark.parametrize("made_by", ["MPIJob", "Job"])
async def test_mpijob_of_a_launcher_is_read_by_way_of_its_job(fake: FakeApi, made_by: str) -> None:
    """The pod has the UID of the launcher's Job alone; only that Job has the MPIJob's."""
    (_, pod, _), *_ = pods_of(loaded(manifest("Job", command=["horovodrun", "-np", "2", "a"]))[0])
    operators = "training.kubeflow.org/"
    pod["metadata"]["labels"] |= {
        operators + "operator-name": "mpi-operator",
        operators + "job-name": "pi",
        operators + "job-role": "launcher",
    }
    (maker,) = pod["metadata"]["ownerReferences"]
    maker["name"] = "pi-launcher"
    by = {"apiVersion": "kubeflow.org/v2beta1", "kind": made_by, "name": "pi", "uid": "m"}
    job = {"uid": maker["uid"], "ownerReferences": [{**by, "controller": True}]}
    await fake.put(
        "/apis/batch/v1/namespaces/team/jobs/pi-launcher", {"kind": "Job", "metadata": job}
    )
    mpijob = {"kind": "MPIJob", "metadata": {"uid": "m"}, "spec": {"mpiReplicaSpecs": {}}}
    await fake.put("/apis/kubeflow.org/v2beta1/namespaces/team/mpijobs/pi", mpijob)
    async with controller(fake, HandHour()) as one:
        answer = await one.ask(pod)
    assert ("patch" in answer) == (made_by == "MPIJob")


@pytest.mark.parametrize("claimed", [None, "", "guess", UID])
async def test_who_does_not_know_an_owners_uid_reads_nothing_of_it(
    fake: FakeApi, claimed: str | None
) -> None:
    container = {"name": "pytorch", "image": "x", "command": ["torchrun", "train.py"]}
    template = {"template": {"spec": {"containers": [container]}}}
    job: dict[str, Any] = {"kind": "PyTorchJob", "metadata": {"uid": UID}}
    slots, worker = {"nProcPerNode": 7}, {"Worker": template}
    job["spec"] = {"elasticPolicy": slots, "pytorchReplicaSpecs": worker}
    await fake.put("/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/secret", job)
    maker = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "secret"}
    uid = {} if claimed is None else {"uid": claimed}
    pod = {"metadata": {"ownerReferences": [{**maker, **uid, "controller": True}]}}
    async with controller(fake, HandHour()) as one:
        asked = await one.ask({**pod, "spec": {"containers": [container]}})
    patch = base64.b64decode(asked.get("patch", "")).decode()
    assert ('"value": "7"' in patch) == (claimed == UID)


async def test_a_jobs_owner_is_read_once_for_all_its_pods(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "OWNER_FRESH_S", 3600.0)
    pod, read = labelled()
    await fake.put(JOB, read)
    async with controller(fake, HandHour()) as one:
        for answer in await asyncio.gather(*(one.ask(pod) for _ in range(8))):
            assert "patch" in answer
        assert "patch" in await one.ask(pod)
    assert fake.calls.count(("GET", JOB)) == 1


async def test_what_was_read_of_an_owner_has_to_do_while_the_api_server_is_away(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "OWNER_FRESH_S", 0.0)
    pod, read = labelled()
    await fake.put(JOB, read)
    async with controller(fake, HandHour(), ("job", "min_nodes", "max_nodes")) as one:
        known = await one.ask(pod)
        fake.away = True
        assert (await one.ask(pod))["patch"] == known["patch"]
        # An owner of that uid in another place is another one, and nothing is known of it.
        pod["metadata"]["ownerReferences"][0]["name"] = "other"
        assert "patch" not in await one.ask(pod)


async def test_pods_are_answered_for_until_the_api_server_knows_that_a_replica_goes(
    fake: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEAVE_S", 3600.0)
    ports: asyncio.Queue[int] = asyncio.Queue()

    @asynccontextmanager
    async def told(*arguments: Any) -> AsyncIterator[int]:
        async with serving(*arguments) as port:
            ports.put_nowait(port)
            yield port

    monkeypatch.setattr(process, "serving", told)
    flags = {"own_namespace": "muster-system", "webhook": "muster", "listen": "127.0.0.1"}
    config = replace(load(ControllerConfig, flags, {}), port=0)
    stop = asyncio.Event()
    async with ClusterApi(fake.access) as api:
        running = asyncio.create_task(process._serve(config, environ(FLAGS), api, stop))
        await trusted_authority(fake)
        port = await ports.get()
        stop.set()
        await asyncio.sleep(0)  # whoever waits for it knows
        keeper: Any = None
        pod, _ = labelled()
        assert (await Controller(fake, keeper, port).ask(pod))["allowed"] is True
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def sidecar_of(injector: Injector, pod: Any) -> Any:
    verdict, _ = await injector.verdict(pod, "team", 1000)
    assert verdict.injected, verdict
    spec = patched(pod, verdict.patch)["spec"]
    return next(one for one in spec["initContainers"] if one["name"] == "muster")


async def test_a_namespace_gives_its_pods_defaults_that_a_pod_overrides(fake: FakeApi) -> None:
    pod, read = labelled()
    await fake.put(JOB, read)
    given = {"image": "mirror.test/muster:1", "pull-policy": "Always", "max": "93"}
    annotations = {f"muster.dev/{name}": text for name, text in given.items()}
    await fake.put("/api/v1/namespaces/team", {"metadata": {"annotations": annotations}})
    async with injecting(fake) as injector:
        sidecar = await sidecar_of(injector, pod)
        assert sidecar["image"] == "mirror.test/muster:1"
        assert sidecar["imagePullPolicy"] == "Always"
        assert "93" not in [one.get("value") for one in sidecar["env"]], "a size is a job's own"
        own = {**pod["metadata"].get("annotations", {}), "muster.dev/image": "own.test/muster:2"}
        pod = {**pod, "metadata": {**pod["metadata"], "annotations": own}}
        assert (await sidecar_of(injector, pod))["image"] == "own.test/muster:2"
