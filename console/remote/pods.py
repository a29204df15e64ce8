# SPDX-License-Identifier: Apache-2.0
"""The cluster that a command is about, by the options of kubectl, and the pods of a job in it.

A refusal for want of rights is one sentence for the user.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote

import click

from console.help import CLUSTER_SECTION, SectionedOption
from console.job.rows import PodFacts
from console.whereabouts import ClusterOptions as ClusterOptions
from console.whereabouts import defaults_of_file, with_cluster_options
from controller.cluster import paths
from controller.cluster.access import access_of
from controller.cluster.api import NOT_FOUND, ClusterApi, Object
from controller.owner_kinds import Owner
from controller.owners import pod_seen
from injection import sidecar
from injection.kinds import job_label
from injection.settings import LABEL
from rdzv.errors import ClusterRefused

PAGE = 500

STEPS = re.compile(
    r"(?<!\S)--?(max|total|num|max[-_]train|num[-_]train|total[-_]train|train)[-_](steps|iters)"
    r"[=\s](?P<steps>[0-9][0-9_]{0,17})(?!\S)"
)
"""Options by which scripts and trainers are given the step that training ends with.

Of a number that is too long to be one, Python would make no integer, and no float.
"""

NAMES = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Objects without their spec and status."""

STARTS = (None, "PodInitializing", "ContainerCreating")
"""The kubelet's words for a container that waits without trouble."""

SPOT = (
    "karpenter.sh/capacity-type=spot",
    "eks.amazonaws.com/capacityType=SPOT",
    "cloud.google.com/gke-spot=true",
    "cloud.google.com/gke-preemptible=true",
    "kubernetes.azure.com/scalesetpriority=spot",
)
"""Labels of nodes that their cloud may take back at any time."""

FORBIDDEN = 403


@asynccontextmanager
async def cluster(options: ClusterOptions) -> AsyncIterator[ClusterApi]:
    """Open the API server; ``namespace`` of the client is the one given, else the context's.

    Raises ``ConfigError``.
    """
    access = await asyncio.to_thread(access_of, os.environ, options.kubeconfig, options.context)
    async with ClusterApi(access, options.namespace) as api:
        yield api


def through_the_api_server(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with those of ``ClusterOptions``, as its argument ``options``."""

    @functools.wraps(command)
    def read(
        kubeconfig: str | None, context: str | None, namespace: str | None, **arguments: Any
    ) -> Any:
        options = ClusterOptions(kubeconfig, context, namespace)
        options = options.completed(defaults_of_file(os.environ), os.environ)
        return command(options=options, **arguments)

    namespace_option = click.option(
        "-n",
        "--namespace",
        cls=SectionedOption,
        section=CLUSTER_SECTION,
        metavar="NAME",
        help="Namespace of the job.  [default: (that of the context)]",
    )
    return with_cluster_options(namespace_option(read))


@dataclass(frozen=True, slots=True)
class JobPod:
    """One pod of a job.

    ``job``: its job's name, as a label has it. ``phase``: Kubernetes' own. ``ready``: its
    condition. ``deleting``: its termination has begun. ``why_pending``: why it, or a container of
    it, does not run; empty if all do. ``owner``: the object that lives as long as the job.
    ``maker``: kind and name of the object that made the pod. ``spot``: whether its node is of that
    kind; None if nodes may not be read. ``sidecar``: the name of that container, empty without one;
    ``sidecar_runs``: it can be asked. ``image``: the sidecar's. ``containers``: the user's own.
    ``steps``: how many their launch line asks for; None if it does not say.
    """

    namespace: str
    name: str
    uid: str
    job: str = ""
    node: str = ""
    phase: str = ""
    ready: bool = False
    deleting: bool = False
    why_pending: str = ""
    owner: Owner | None = None
    maker: tuple[str, str] | None = None
    spot: bool | None = None
    created_unix_s: float = 0.0
    sidecar: str = ""
    sidecar_runs: bool = False
    image: str = ""
    steps: int | None = None
    containers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> PodFacts:
        """Its part in a row of a table."""
        why = self.why_pending or ("it is being deleted" if self.deleting else "")
        return PodFacts(
            self.name,
            self.phase,
            self.node,
            why,
            self.spot,
            self.sidecar_runs,
            self.created_unix_s,
            self.steps,
        )


def steps_asked_for(spec: Object) -> int | None:
    """Return the number of steps that the launch line of a container asks for; None without one."""
    for one in spec.get("containers") or []:
        words = " ".join(map(str, [*(one.get("command") or []), *(one.get("args") or [])]))
        if found := STEPS.search(words):
            return int(found["steps"].replace("_", ""))
    return None


def job_pod(pod: Object, spot_nodes: frozenset[str] | None = None) -> JobPod:
    """Reduce a pod; ``spot_nodes`` as of ``nodes_that_are_spot``."""
    seen, spec, status = pod_seen(pod), pod.get("spec") or {}, pod.get("status") or {}
    metadata = pod["metadata"]
    maker = seen.maker
    first = status.get("initContainerStatuses") or []
    has_sidecar = any(one["name"] == sidecar.NAME for one in spec.get("initContainers") or [])
    return JobPod(
        namespace=seen.namespace,
        name=seen.name,
        uid=seen.uid,
        job=seen.job,
        node=seen.node,
        phase=status.get("phase", ""),
        ready=any(
            (one.get("type"), one.get("status")) == ("Ready", "True")
            for one in status.get("conditions") or []
        ),
        deleting=seen.deleted,
        why_pending=_why_pending(status),
        owner=seen.owner,
        maker=(maker["kind"], maker["name"]) if maker else None,
        spot=None if spot_nodes is None or not seen.node else seen.node in spot_nodes,
        created_unix_s=_unix_s(metadata.get("creationTimestamp")),
        sidecar=sidecar.NAME if has_sidecar else "",
        sidecar_runs=any(
            one["name"] == sidecar.NAME and "running" in (one.get("state") or {}) for one in first
        ),
        image=next(
            (
                str(one.get("image") or "")
                for one in spec.get("initContainers") or []
                if one["name"] == sidecar.NAME
            ),
            "",
        ),
        steps=steps_asked_for(spec),
        containers=tuple(
            one["name"] for one in spec.get("containers") or [] if one["name"] != sidecar.NAME
        ),
        labels=metadata.get("labels") or {},
    )


def _why_pending(status: Object) -> str:
    match status.get("phase"):
        case "Pending":
            return why_it_waits(status) or "its containers start"
        case "Running":  # one of its containers may wait all the same
            return why_it_waits(status)
    return ""


async def pods_of(api: ClusterApi, namespace: str, job: str) -> list[JobPod]:
    """Return the pods of a job, the oldest first; empty if there are none."""
    return await _pods(api, namespace, f"{LABEL}={job_label(job)}")


async def pod_named(api: ClusterApi, namespace: str, name: str) -> JobPod | None:
    """Return one pod; None if there is none of that name."""
    try:
        return job_pod(await api.get(paths.core(namespace, "pods", name)))
    except ClusterRefused as error:
        if error.status != NOT_FOUND:
            raise
        return None


async def jobs_in(api: ClusterApi, namespace: str | None) -> dict[tuple[str, str], list[JobPod]]:
    """Return the pods of every job by namespace and job; ``namespace`` None: of all namespaces."""
    found: dict[tuple[str, str], list[JobPod]] = {}
    for pod in await _pods(api, namespace, LABEL):
        found.setdefault((pod.namespace, pod.job), []).append(pod)
    return found


async def nodes_that_are_spot(api: ClusterApi) -> frozenset[str] | None:
    """Return the names of the nodes with a label of ``SPOT``; None if the user may not list any."""
    try:
        lists = await asyncio.gather(*(_names(api, label) for label in SPOT))
    except ClusterRefused:
        return None
    return frozenset(name for names in lists for name in names)


async def _names(api: ClusterApi, label: str) -> list[str]:
    path = f"{paths.NODES}?labelSelector={quote(label)}"
    return [one["metadata"]["name"] async for one in listed(api, path, accept=NAMES)]


async def _pods(api: ClusterApi, namespace: str | None, selector: str) -> list[JobPod]:
    of = paths.core(namespace, "pods") if namespace is not None else "/api/v1/pods"
    spot = await nodes_that_are_spot(api)
    found = listed(api, f"{of}?labelSelector={quote(selector)}")
    return sorted(
        [job_pod(one, spot) async for one in found], key=lambda pod: (pod.created_unix_s, pod.name)
    )


async def listed(
    api: ClusterApi, path: str, *, accept: str = "application/json"
) -> AsyncIterator[Object]:
    """Yield every object of a list, page by page."""
    joined, more = "&" if "?" in path else "?", ""
    while True:
        page = await api.get(f"{path}{joined}limit={PAGE}{more}", accept=accept)
        for one in page.get("items") or []:
            yield one
        if not (following := (page.get("metadata") or {}).get("continue")):
            return
        more = f"&continue={quote(following)}"


def why_it_waits(status: Mapping[str, Any]) -> str:
    """Return why a pod waits: for a node, or for a container that cannot start; empty if it starts.

    ``status``: its own, as the API server has it.
    """
    for one in status.get("conditions") or []:
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return str(one.get("message") or one.get("reason") or "it has no node yet")
    waiting = (
        (one.get("state") or {}).get("waiting") or {}
        for kind in ("initContainerStatuses", "containerStatuses")
        for one in status.get(kind) or []
    )
    for one in waiting:
        if one.get("reason") not in STARTS:
            return ": ".join(filter(None, (one["reason"], one.get("message"))))
    return ""


def _unix_s(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def names_in(options: ClusterOptions, *, job: str, pods: bool, timeout_s: float) -> list[str]:
    """Return the names of jobs or of ``pods`` in the namespace, those of one job if it is given."""

    async def read() -> list[str]:
        async with asyncio.timeout(timeout_s), cluster(options) as api:
            return await _first_names(api, job=job, pods=pods, timeout_s=timeout_s)

    return asyncio.run(read())


async def _first_names(api: ClusterApi, *, job: str, pods: bool, timeout_s: float) -> list[str]:
    """Return the names that one page of a list has."""
    selector = quote(f"{LABEL}={job_label(job)}" if job else LABEL)
    path = f"{paths.core(api.namespace, 'pods')}?labelSelector={selector}&limit={PAGE}"
    page = await api.get(path, timeout_s, accept=NAMES)
    found = [one["metadata"] for one in page.get("items") or []]
    return [one["name"] if pods else one["labels"][LABEL] for one in found]


@contextmanager
def with_right(command: str, right: str, namespace: str | None) -> Iterator[None]:
    """Raise a refusal for want of rights again, as a sentence that names what to ask for.

    ``right``: a verb and a resource, as in ``create pods/exec``. ``namespace`` None: of all.
    """
    try:
        yield
    except ClusterRefused as error:
        if error.status != FORBIDDEN:
            raise
        raise ClusterRefused(forbidden(command, right, namespace, str(error)), FORBIDDEN) from error


def forbidden(command: str, right: str, namespace: str | None, error: str) -> str:
    """Return the sentence; ``error``: its text, with what Kubernetes says at its end."""
    where = "all namespaces" if namespace is None else f"namespace {namespace}"
    said = error.partition(f"with {FORBIDDEN}: ")[2] or error
    return (
        f"{command} may not {right} in {where}: ask for that right, as in"
        f" docs/verbs.md#rights (Kubernetes: {said})"
    )
