# SPDX-License-Identifier: Apache-2.0
"""``pod``: ``kubectl delete pod`` of one of three, in the real cluster of ``scripts/kubelab``.

Measured from the delete until no host list has the pod, until all ranks have saved and that is on
record, and until the survivors make their next step; beside the same YAML without Muster. Then the
time that the sidecar adds to the start of a pod, and its memory there. Needs root.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from time import monotonic, sleep

from benchmarks.drain import recording
from benchmarks.figures import Bar, Figure, of_runs, say
from benchmarks.resident_memory import rss_mib
from rdzv.keys import JobKeys
from sidecar_image.image import sidecar_archive
from tests.support.cluster.claim import claimed
from tests.support.cluster.job import KubeJob
from tests.support.cluster.lab import TRAINER_IMAGE, Kubelab, Object, host_paths
from tests.support.cluster.workload import NAME, Workload
from tests.support.training.step_log import World

DELETES = 10
NATIVE_DELETES = 3
STARTS = 10
PATIENCE_S = 90.0
"""Time limit for a job without Muster to go on."""
PODS = 3

RESOURCES: dict[str, Object] = {
    "BestEffort": {},
    "Guaranteed": {"limits": {"cpu": "1", "memory": "256Mi"}},
}
"""Resources by QoS class: in a Guaranteed pod the sidecar has only the half core it requests."""


async def measure(
    deletes: int = DELETES, native_deletes: int = NATIVE_DELETES, starts: int = STARTS
) -> list[Figure]:
    """Measure everything in one cluster; it is removed unless it existed before."""
    lab = Kubelab()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as root, claimed(lab):
        await asyncio.to_thread(lab.command, "up", timeout_s=900)
        archive = await asyncio.to_thread(sidecar_archive)
        await asyncio.to_thread(lab.command, "load", str(archive), timeout_s=300)
        deleted, memory = await _deletes(lab, Path(root), deletes)
        native = await asyncio.to_thread(_native, lab, Path(root), native_deletes)
        begun = await asyncio.to_thread(_starts, lab, Path(root), starts)
    delisted, committed, stepped = (list(column) for column in zip(*deleted, strict=True))
    return [
        _shown("pod/delete to delisted everywhere", delisted),
        _shown("pod/delete to all committed", committed),
        of_runs(
            "pod/delete to the survivors' next step", "s", None, stepped, native, "without Muster"
        ),
        _shown("pod/delete to the survivors' next step, most", [max(stepped)]),
        *(_added(quality, *took_s) for quality, took_s in begun.items()),
        of_runs("pod/memory of the sidecar", "MiB", Bar("value", "<=", 60.0), memory, by=max),
    ]


def _shown(name: str, runs: list[float]) -> Figure:
    return of_runs(name, "s", None, runs)


# -- deletes


async def _deletes(
    lab: Kubelab, root: Path, count: int
) -> tuple[list[tuple[float, float, float]], list[float]]:
    """Measure the seconds of each delete, and the memory of every sidecar in the end."""
    job = KubeJob(lab, root, Workload(replicas=PODS), muster=True)
    await asyncio.to_thread(job.__enter__)
    try:
        world = await asyncio.to_thread(job.world_of, PODS)
        etcd = await asyncio.to_thread(lab.get, job.namespace, "pod", "etcd-0")
        endpoint = f"{etcd['status']['podIP']}:2379"
        found = []
        async with recording(JobKeys(job.namespace, NAME), endpoint) as record:
            for turn in range(count):
                await asyncio.to_thread(job.goes_on, world)
                leaver = sorted(world.nodes)[turn % PODS]
                epoch = record.epoch
                began_s = monotonic()
                delisting = asyncio.create_task(
                    asyncio.to_thread(_delisted, _host_lists(job, world.nodes - {leaver}), leaver)
                )
                arguments = ("delete", "pod", leaver, "--wait=false")
                await asyncio.to_thread(job.kubectl, *arguments)
                async with asyncio.timeout(60):
                    committed_s = await record.committed(epoch)
                smaller = await asyncio.to_thread(
                    job.world_of, PODS - 1, not_=world, without=[leaver]
                )
                delisted_s = await delisting
                found.append(
                    (delisted_s - began_s, committed_s - began_s, smaller.began_s - began_s)
                )
                times = ", ".join(f"{one_s:.2f}" for one_s in found[-1])
                say(f"delete to delisted, committed, the next step: {times} s")
                world = await asyncio.to_thread(job.world_of, PODS, not_=smaller)
        return found, [rss_mib(pid) for pid in _sidecars(job).values()]
    finally:
        await asyncio.to_thread(job.__exit__)


def _sidecars(job: KubeJob) -> dict[str, int]:
    """Find the sidecar's process in each pod of the job, by its pid on this machine."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            environ = dict(
                pair.partition(b"=")[::2] for pair in (entry / "environ").read_bytes().split(b"\0")
            )
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if environ.get(b"MUSTER_NAMESPACE") == job.namespace.encode() and b"agent" in words:
            found[environ[b"MUSTER_MEMBER"].decode()] = int(entry.name)
    return found


def _host_lists(job: KubeJob, pods: Iterable[str]) -> list[Path]:
    processes = _sidecars(job)
    # The container's /var/run is a link to /run, which would resolve to this machine's own.
    return [Path(f"/proc/{processes[pod]}/root/run/muster/hosts") for pod in pods]


def _delisted(lists: Sequence[Path], leaver: str, timeout_s: float = 60.0) -> float:
    """Wait until every list has dropped the pod; return the time of the last."""
    deadline_s = monotonic() + timeout_s
    left = list(lists)
    while left:
        if monotonic() > deadline_s:
            raise RuntimeError(f"{leaver} stays on {len(left)} host lists")
        sleep(0.005)
        left = [path for path in left if leaver in path.read_text()]
    return monotonic()


def _native(lab: Kubelab, root: Path, count: int) -> list[float]:
    """Measure the seconds from a delete to the survivors' next step without Muster.

    The deleted pod is never the one of torch's own store. A job that does not go on counts as
    ``PATIENCE_S``.
    """
    found = []
    for _ in range(count):
        with KubeJob(lab, root, Workload(replicas=PODS), muster=False) as job:
            world = job.world_of(PODS)
            job.goes_on(world)
            began_s = monotonic()
            job.kubectl("delete", "pod", f"{NAME}-{PODS - 1}", "--wait=false")
            while not _another(job, world) and monotonic() - began_s < PATIENCE_S:
                sleep(0.05)
            newest = job.steps.worlds()[-1]
            found.append(newest.began_s - began_s if _another(job, world) else PATIENCE_S)
            say(f"without Muster, delete to the next step: {found[-1]:.2f} s")
    return found


def _another(job: KubeJob, world: World) -> bool:
    return job.steps.worlds()[-1].number != world.number


# -- starts


def _starts(
    lab: Kubelab, root: Path, count: int
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Measure for each class the seconds from a pod's creation to its program: with, without."""
    took_s: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in RESOURCES}
    with KubeJob(lab, root, Workload(replicas=0), muster=True) as job:
        for turn in range(count):
            for quality, (with_it, without) in took_s.items():
                name = f"{quality.lower()}-{turn}"
                without.append(_start(job, f"bare-{name}", quality, muster=False))
                with_it.append(_start(job, f"with-{name}", quality, muster=True))
                say(f"start, {quality}: {without[-1]:.2f} s, with the sidecar {with_it[-1]:.2f} s")
    return dict(took_s)


def _start(job: KubeJob, name: str, quality: str, *, muster: bool) -> float:
    started = job.directory / name
    volumes, mounts = host_paths((job.directory, True))
    program = f"import time; open({str(started)!r}, 'w').write(str(time.monotonic()))"
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 5,
            "restartPolicy": "Never",
            "volumes": volumes,
            "containers": [
                {
                    "name": "trainer",
                    "image": TRAINER_IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["python3", "-c", program],
                    "volumeMounts": mounts,
                    "resources": RESOURCES[quality],
                }
            ],
        },
    }
    text = json.dumps(pod, indent=2)
    if muster:
        # A job of its own, so that it need not hear of other members.
        text = job.injected(text, f"--job={name}")
    began_s = monotonic()
    job.apply(text)
    job.until(lambda: started.exists() and started.read_text(), 60, f"{name} runs")
    started_s = float(started.read_text())
    job.kubectl("delete", "pod", name, "--force", "--grace-period=0")
    return started_s - began_s


def _added(quality: str, with_it: Sequence[float], without: Sequence[float]) -> Figure:
    added = [one - median(without) for one in with_it]
    return of_runs(
        f"pod/start, what the sidecar adds, {quality}",
        "s",
        Bar("value", "<=", 2.0),
        added,
        without,
        "start of the pod without it",
    )
