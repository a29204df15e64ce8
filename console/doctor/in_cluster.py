# SPDX-License-Identifier: Apache-2.0
"""``muster doctor --cluster``: the examination of a cluster by reads, and a pod in a dry run.

It reaches the cluster by a kubeconfig, or as a pod of the cluster.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from console.doctor.cluster_findings import AskingPod, ChartPart, Cluster, Hook, Probe, findings_of
from console.doctor.job import Finding
from console.remote.pods import listed
from controller.access.secret import is_ours
from controller.cluster import paths
from controller.cluster.access import ClusterAccess, access_of
from controller.cluster.api import NOT_FOUND, ClusterApi, Object
from injection import sidecar
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable, ConfigError

T = TypeVar("T")

HOOK = "pods.inject.muster.dev"
LABEL = "muster.dev/inject"
TRIED_IN = "default"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
SECRETS_MOST = 50
"""The most Secrets to read of those that pods name: each is one request. A job has one Secret."""
OURS = "labelSelector=app.kubernetes.io%2Fname%3Dmuster"
PROBE_TIMEOUT_S = 60.0
"""Timeout of the dry run: the API server asks one webhook after another, up to 30 s each."""
MEMBERS = f"{OURS}%2Capp.kubernetes.io%2Fcomponent%3Detcd"
LEADS = "\netcd_server_is_leader 1\n"
ELECTED_S = 3.0
"""Time after which the members are asked once more, in seconds: while they elect, two may say that
they lead."""
NOT_KNOWN = 401


async def examine_cluster(api: ClusterApi, now: Callable[[], datetime]) -> Cluster:
    """Examine the whole cluster; what the API server refuses to show is recorded as ``unread``.

    Raises ``ClusterUnavailable``, and ``ConfigError`` if the API server does not know this user.
    """
    unread: dict[str, str] = {}

    async def told(what: str, asked: Awaitable[T], otherwise: T) -> T:
        try:
            return await asked
        except ClusterRefused as error:
            if error.status == NOT_KNOWN:
                raise ConfigError(f"the API server does not know this user: {error}") from error
            unread[what] = str(error)
            return otherwise

    version = await told("version", api.get("/version"), {})
    hooks = await told("webhook", _hooks(api), ())
    namespaces = sorted({hook.namespace for hook in hooks})
    controllers: list[ChartPart] = []
    stores: list[ChartPart] = []
    leaders: list[str] = []
    certificates: dict[str, datetime] = {}
    for namespace in namespaces:
        controllers += await told("controller", _parts(api, namespace, "deployments"), [])
        stores += await told("etcd", _parts(api, namespace, "statefulsets"), [])
        leaders += await told("stores", _leaders(api, namespace), [])
        certificates |= await told("certificate", _certificates(api, namespace), {})
    pods = await told("injection", _pods(api), [])
    needed = needed_secrets(pods)
    # One request per Secret: a user with access to one namespace only still sees the ones there.
    secrets = {one: await told("access", _secret(api, *one), {}) for one in needed[:SECRETS_MOST]}
    probe = await _probe(api, now) if hooks else None
    renewed = await told("clocks", _renewed(api), {})
    return Cluster(
        now=now(),
        server_version=str(version.get("gitVersion", "")),
        hooks=hooks,
        controllers=tuple(controllers),
        stores=tuple(stores),
        leaders=tuple(leaders),
        certificates=certificates,
        probe=probe,
        pods=tuple(_asking(pod, secrets) for pod in pods),
        secrets_left=len(needed[SECRETS_MOST:]),
        renewed=renewed,
        unread=unread,
    )


async def _hooks(api: ClusterApi) -> tuple[Hook, ...]:
    found = []
    async for one in listed(api, HOOKS):
        for hook in one.get("webhooks") or []:
            service = hook["clientConfig"].get("service")
            if hook["name"] == HOOK and service:
                trusted = bool(hook["clientConfig"].get("caBundle"))
                name = one["metadata"]["name"]
                found.append(Hook(name, service["namespace"], service["name"], trusted))
    return tuple(found)


async def _parts(api: ClusterApi, namespace: str, plural: str) -> list[ChartPart]:
    found = []
    async for one in listed(api, f"/apis/apps/v1/namespaces/{namespace}/{plural}?{OURS}"):
        container = one["spec"]["template"]["spec"]["containers"][0]
        labels = one["metadata"].get("labels") or {}
        ready = int((one.get("status") or {}).get("readyReplicas") or 0)
        wanted = int(one["spec"].get("replicas", 1))
        chart = labels.get("helm.sh/chart", "no chart")
        found.append(ChartPart(one["metadata"]["name"], wanted, ready, container["image"], chart))
    return found


async def _leaders(api: ClusterApi, namespace: str) -> list[str]:
    """Return the members of the chart's etcd that lead: one, or more if they are several etcds."""
    pods = [pod async for pod in listed(api, f"{paths.core(namespace, 'pods')}?{MEMBERS}")]
    names = [pod["metadata"]["name"] for pod in pods]
    found = await _leading(api, namespace, names)
    if len(found) > 1:
        await asyncio.sleep(ELECTED_S)
        found = await _leading(api, namespace, found)
    return found


async def _leading(api: ClusterApi, namespace: str, names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        # The StatefulSet shows a member that is away.
        with suppress(ClusterUnavailable):
            page = f"{paths.core(namespace, 'pods', f'{name}:2381')}/proxy/metrics"
            if LEADS in await api.text(page):
                found.append(name)
    return found


async def _certificates(api: ClusterApi, namespace: str) -> dict[str, datetime]:
    """Return the end of validity of each certificate in the chart's Secrets, by Secret and key."""
    found = {}
    async for one in listed(api, f"{paths.core(namespace, paths.SECRETS)}?{OURS}"):
        for key, text in (one.get("data") or {}).items():
            if key.endswith(".crt"):
                with suppress(ValueError, binascii.Error, UnsupportedAlgorithm):
                    read = x509.load_pem_x509_certificate(base64.b64decode(text))
                    found[f"Secret {one['metadata']['name']}, {key}"] = read.not_valid_after_utc
    return found


async def _pods(api: ClusterApi) -> list[Object]:
    """Return the unfinished pods that ask for a sidecar, by their own label or their namespace's.

    In a namespace with the label, a pod may still opt out.
    """
    selected = f"labelSelector={LABEL.replace('/', '%2F')}"
    found: dict[str, Object] = {}
    async for pod in listed(api, f"/api/v1/pods?{selected}%3Dtrue"):
        found[_key(pod)] = pod
    async for namespace in listed(api, f"/api/v1/namespaces?{selected}%3Dtrue"):
        of_it = paths.core(namespace["metadata"]["name"], "pods")
        async for pod in listed(api, f"{of_it}?{selected}%21%3Dfalse"):
            found[_key(pod)] = pod
    return [pod for _, pod in sorted(found.items()) if not _is_over(pod)]


def needed_secrets(pods: Sequence[Object]) -> list[tuple[str, str]]:
    """Return namespace and name of each Secret that pods use; those of pending pods come first."""
    found = [
        (pod["metadata"]["namespace"], name, _is_pending(pod))
        for pod in pods
        for name in _secrets(pod)
    ]
    waited_for = {(namespace, name) for namespace, name, pending in found if pending}
    every = {(namespace, name) for namespace, name, _ in found}
    return [*sorted(waited_for), *sorted(every - waited_for)]


async def _secret(api: ClusterApi, namespace: str, name: str) -> Object | None:
    """Read a Secret; None if it does not exist. Raises ``ClusterRefused`` if reading is denied."""
    try:
        return await api.get(f"{paths.core(namespace, paths.SECRETS)}/{name}")
    except ClusterRefused as error:
        if error.status != NOT_FOUND:
            raise
        return None


def _asking(pod: Object, secrets: Mapping[tuple[str, str], Object | None]) -> AskingPod:
    """Return a pod with the faults of its Secrets; one whose read was denied counts as sound."""
    metadata = pod["metadata"]
    images = [
        one["image"]
        for one in pod["spec"].get("initContainers") or []
        if one["name"] == sidecar.NAME
    ]
    namespace = metadata["namespace"]
    phase = (pod.get("status") or {}).get("phase", "")
    read = {
        name: secrets[namespace, name] for name in _secrets(pod) if (namespace, name) in secrets
    }
    # A pod that runs has got its Secret already, when it started.
    gone = [name for name, secret in read.items() if secret is None and _is_pending(pod)]
    fixed = [name for name, secret in read.items() if secret is not None and _is_fixed(secret)]
    image = images[0] if images else None
    return AskingPod(
        namespace,
        metadata["name"],
        phase,
        image,
        missing=next(iter(gone), ""),
        immutable=next(iter(fixed), ""),
    )


def _is_fixed(secret: Object) -> bool:
    return secret.get("immutable") is True and is_ours(secret)


def _secrets(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of the Secrets in the pod's volumes that Muster has added."""
    volumes = pod["spec"].get("volumes") or []
    return [
        one["secret"]["secretName"]
        for one in volumes
        if one["name"].startswith("muster-") and "secret" in one
    ]


def _is_pending(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Pending"


def _is_over(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


async def _probe(api: ClusterApi, now: Callable[[], datetime]) -> Probe:
    """Create a labelled pod that every namespace admits, in a dry run; return the outcome."""
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "muster-doctor-",
            "labels": {LABEL: "true"},
            "annotations": {
                **{"muster.dev/job": "muster-doctor", "muster.dev/min": "1"},
                **{"muster.dev/max": "1", "muster.dev/image": "example.org/muster-sidecar"},
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "trainer",
                    "image": "example.org/trainer",
                    "command": ["torchrun", "train.py"],
                    "securityContext": context,
                    "resources": {"limits": {"cpu": "1m", "memory": "1Mi"}},
                }
            ],
        },
    }
    asked = now()
    try:
        made = await api.create(f"{paths.core(TRIED_IN, 'pods')}?dryRun=All", pod, PROBE_TIMEOUT_S)
    except ClusterError as error:  # also if another webhook that is down blocks every pod
        return Probe(error=str(error))
    first = made["spec"].get("initContainers") or []
    created = made["metadata"].get("creationTimestamp")
    return Probe(
        injected=any(one["name"] == sidecar.NAME for one in first),
        server_time=datetime.fromisoformat(created) if created else None,
        asked=asked,
    )


async def _renewed(api: ClusterApi) -> dict[str, datetime]:
    found = {}
    async for one in listed(api, LEASES):
        if at := (one.get("spec") or {}).get("renewTime"):
            found[one["metadata"]["name"]] = datetime.fromisoformat(at).astimezone(UTC)
    return found


def _key(pod: Mapping[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def cluster_findings(kubeconfig: str | None, context: str | None) -> list[Finding]:
    """Examine the cluster and return the findings; raises ``ConfigError`` and ``ClusterError``."""
    logging.getLogger("controller").setLevel(logging.ERROR)  # its warnings are findings
    return asyncio.run(_findings_there(access_of(os.environ, kubeconfig, context)))


async def _findings_there(access: ClusterAccess) -> list[Finding]:
    async with ClusterApi(access) as api:
        return findings_of(await examine_cluster(api, lambda: datetime.now(UTC)))
