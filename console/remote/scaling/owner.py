# SPDX-License-Identifier: Apache-2.0
"""The object whose count makes a job's pods, and how that count is changed; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from controller.admission.owner import Owner
from rdzv.errors import ConfigError

_BY_HAND = {
    "JobSet": "kubectl edit jobset/{name}   # parallelism and completions of its replicatedJobs",
    "LeaderWorkerSet": "kubectl scale leaderworkersets/{name} --replicas=N   # N groups of pods",
    "ReplicaSet": "kubectl scale replicasets/{name} --replicas=N",
    "TrainingJob": "kubectl create -f FILE   # an object ScaleOut or ScaleIn of et-operator",
    "TrainingRuntime": "kubectl edit trainjob/{name}   # spec.trainer.numNodes",
}
"""The command that changes the count of an owner that has no rule here, by its kind."""


@dataclass(frozen=True, slots=True)
class ScaledOwner:
    """An owner and its count.

    ``count``: the pods that it asks for, of those that train; ``fixed`` of them have a template
    that is not scaled, as a PyTorchJob's Master. ``ordinal``: its pods have indexes, and it drops
    the highest; ``first`` is the lowest index. ``path``: of the object in the API. ``role``: the
    template whose pods are counted, by the label ``training.kubeflow.org/replica-type``; empty if
    it has one template. ``minimum``: the smallest count that it takes. ``uid``: as ``kind``, of the
    object.
    """

    kind: str
    name: str
    path: str
    count: int
    uid: str = ""
    ordinal: bool = True
    first: int = 0
    fixed: int = 0
    role: str = ""
    minimum: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def change(self, count: int) -> tuple[str, dict[str, Any]]:
        """Return the path and the merge patch by which its pods become ``count``."""
        number = count - self.fixed
        match self.kind:
            case "Job":
                return self.path, {"spec": {"completions": number, "parallelism": number}}
            case "PyTorchJob":
                return self.path, {"spec": {"pytorchReplicaSpecs": _workers(number)}}
            case "MPIJob":
                return self.path, {"spec": {"mpiReplicaSpecs": _workers(number)}}
        return f"{self.path}/scale", {"spec": {"replicas": number}}


def scaled_owner(owner: Owner | None, path: str | None, read: Mapping[str, Any]) -> ScaledOwner:
    """Return an owner that can be scaled, as ``read`` at ``path``.

    Raises ``ConfigError`` with the one command that does it for any other.
    """
    if owner is None:
        raise ConfigError(
            "its pods have no controller, which could make or end others: kubectl delete pod NAME"
            " ends one, after a save"
        )
    spec = read.get("spec") or {}
    uid = str((read.get("metadata") or {}).get("uid", ""))
    made = ScaledOwner(owner.kind, owner.name, path or "", 0, uid)
    match owner.group, owner.kind:
        case "apps", "Deployment" if path:
            return replace(made, count=_count(spec, "replicas"), ordinal=False)
        case "apps", "StatefulSet" if path:
            first = _count(spec.get("ordinals") or {}, "start", 0)
            return replace(made, count=_count(spec, "replicas"), first=first)
        case "batch", "Job" if path:
            return replace(made, count=_of_job(owner, spec), minimum=1)
        case "kubeflow.org", "PyTorchJob" if path:
            parts = spec.get("pytorchReplicaSpecs") or {}
            fixed = sum(_count(part, "replicas") for key, part in parts.items() if key != "Worker")
            count = _of_workers(owner, parts) + fixed
            return replace(made, count=count, fixed=fixed, role="worker", minimum=fixed)
        case "kubeflow.org", "MPIJob" if path:
            return replace(
                made, count=_of_workers(owner, spec.get("mpiReplicaSpecs") or {}), role="worker"
            )
    raise ConfigError(_advice(owner))


def _of_job(owner: Owner, spec: Mapping[str, Any]) -> int:
    completions, parallelism = spec.get("completions"), _count(spec, "parallelism")
    if spec.get("completionMode") != "Indexed":
        raise ConfigError(
            f"Job {owner.name} is not Indexed, and chooses itself which pods go: kubectl patch job"
            f' {owner.name} --type=merge -p \'{{"spec":{{"parallelism":N}}}}\' changes its count'
        )
    if completions != parallelism:
        raise ConfigError(
            f"Job {owner.name} has {completions} completions and a parallelism of {parallelism}:"
            " both are scaled together, and Kubernetes takes that only if they are equal"
        )
    return parallelism


def _of_workers(owner: Owner, parts: Mapping[str, Any]) -> int:
    if "Worker" not in parts:
        raise ConfigError(f"{owner.kind} {owner.name} has no Worker, which could be scaled")
    return _count(parts["Worker"] or {}, "replicas")


def _advice(owner: Owner) -> str:
    command = _BY_HAND.get(owner.kind, f"kubectl edit {owner.kind.lower()}/{{name}}")
    if owner.group == "batch.volcano.sh":
        command = "kubectl edit jobs.batch.volcano.sh/{name}   # minAvailable, replicas of a task"
    return (
        f"muster does not change the count of a {owner.kind}: use"
        f" {command.format(name=owner.name)}; muster drain POD before saves first"
    )


def _workers(replicas: int) -> dict[str, Any]:
    return {"Worker": {"replicas": replicas}}


def _count(found: Mapping[str, Any], key: str, otherwise: int = 1) -> int:
    number = found.get(key)
    return number if type(number) is int else otherwise
