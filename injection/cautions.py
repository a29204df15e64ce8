# SPDX-License-Identifier: Apache-2.0
"""Remarks on injections that may not do what their user expects: one sentence each.

``docs/kubernetes.md`` has them all, in these words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from injection import facts
from injection.horovod import goes_past, launchers, starts_mpi
from injection.launches import HOROVODRUN, launches
from injection.member_spec import Demand
from injection.remarks import Remark, warning
from injection.sidecar import RUN_DIR
from injection.workloads import Template, Workload, at
from injection.yaml_tree import child, text_of, value_of
from launcher_shim.pod.torchrun_options import RENDEZVOUS_OPTIONS, RESTARTS

NO_STORAGE = (
    "container {name} mounts no volume that outlives its pod: a checkpoint on its own disk is gone"
    " with the pod that wrote it: mount one that all pods share, or save to object storage"
)
LAUNCHER = (
    "container {name}: the horovodrun in it gets Muster's host list and starts its workers through"
    " the sidecars, whatever an operator has set for that: without ssh and without kubectl exec"
)
WORKERS = (
    "container {name}: muster-exec runs in the place of its command, which is kept: it starts"
    " horovodrun's workers as this container's user, without sshd, keys or root"
)
MPI_ALONE = (
    "container {name} runs {program}, whose world keeps its size: only a horovodrun is made a"
    " launcher of Muster's"
)
NEEDS_SSHD = (
    "container {name} runs {program}, which reaches its workers by sshd, and muster-exec runs in"
    " the place of that: start them by horovodrun"
)
PAST_OURS = (
    "container {name}: {word} in its shell command bypasses Muster's horovodrun: call {path} there"
)
LASTING = (
    "{path}.{key}: {value} is added: without it the operator ends the whole job with the first"
    " worker that fails"
)
LACKS_LASTING = (
    "{path}.{key} is missing: the operator ends the whole job with the first worker that fails:"
    " make it {value}"
)
NOT_LASTING = (
    "{path}.{key} is {found}: kept, and with it the operator ends the whole job with the first"
    " worker that fails: make it {value}"
)
NOT_RUN = "a {kind} {version} is injected by its schema alone, and was not run with its operator"
MASTER = (
    "{path}: the whole job ends with its Master, wherever the others are: make it one more Worker"
)
LATE_PROXY = (
    "container {name} starts only after the sidecar: if the mesh takes over the network before"
    " that, as Istio's CNI plug-in does, the pod never starts: make the proxy a native sidecar"
)
SHARED_PROCESSES = (
    "{path}.shareProcessNamespace: a container that runs as root, or as the sidecar's user, can"
    " read the Secret {secret} through the sidecar's /proc: leave it out"
)
OVERRULED = "container {name} sets {variable}: muster-run overrules it"
RESTARTS_KEPT = (
    "container {name} sets {variable}: kept; the death of a node may use a restart of each torchrun"
)
OPTIONS_MERGED = (
    "container {name} sets {variable}: muster-run overrules the keys that Muster needs, and keeps"
    " the others"
)

_WITH_THE_POD = frozenset(
    {
        "emptyDir",
        "ephemeral",
        "configMap",
        "secret",
        "projected",
        "downwardAPI",
        "image",
        "gitRepo",
    }
)
"""Kinds of volumes that end with their pod, or that nothing is written to."""
_OF_SECRETS = "secrets-store.csi.k8s.io"
_OF_THE_NODE = re.compile(r"/(dev|etc|lib|proc|run|sys|usr|var/run)(/.*)?")
_OBJECT_STORE = re.compile(
    r"\b(s3[an]?|gs|gcs|az|abfss?|wasbs?|oss|cos|obs|hdfs|swift|tos|r2)://", re.ASCII
)

OURS = f"{RUN_DIR}/bin/{HOROVODRUN}"

_VARIABLES = {
    **dict.fromkeys(
        (
            "PET_RDZV_BACKEND",
            "PET_RDZV_ENDPOINT",
            "PET_RDZV_ID",
            "PET_NNODES",
            "PET_LOCAL_ADDR",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        ),
        OVERRULED,
    ),
    RESTARTS: RESTARTS_KEPT,
    RENDEZVOUS_OPTIONS: OPTIONS_MERGED,
}


def cautions(
    workload: Workload,
    template: Template,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    want: Demand,
    *,
    wrapped: bool,
    owner_is_made: bool,
) -> Iterator[Remark]:
    """Yield a remark on everything that may not be as its user expects."""
    kind = workload.known
    if kind is not None and not kind.run:
        version = text_of(child(workload.node, "apiVersion"))
        yield warning(NOT_RUN.format(kind=workload.kind, version=version))
    if want.horovod == "worker":
        yield Remark(WORKERS.format(name=container.get("name")))
    elif want.horovod and any(one.launcher == HOROVODRUN for one in launches(container)):
        yield Remark(LAUNCHER.format(name=container.get("name")))
    if kind is not None and kind.sshd:
        for one in launchers(workload, container):
            if (program := starts_mpi(one)) is not None:
                sentence = NEEDS_SSHD.format(name=one.get("name"), program=program)
                yield Remark(sentence, "error")
    elif want.horovod == "launcher" and (program := starts_mpi(container)) is not None:
        yield warning(MPI_ALONE.format(name=container.get("name"), program=program))
    if want.horovod == "launcher" and (word := goes_past(container, OURS)) is not None:
        yield warning(PAST_OURS.format(name=container.get("name"), word=word, path=OURS))
    if kind is not None and kind.lasting is not None and want.horovod == "worker":
        yield from _lasting(workload, template, *kind.lasting, owner_is_made=owner_is_made)
    if kind is not None and kind.master is not None:
        masters = (path for _, path in at(workload.node, kind.master))
        if template.path in masters:
            yield warning(MASTER.format(path=template.path.rpartition(".")[0]))
    if want.horovod is None and not _lasts(pod, container):
        yield warning(NO_STORAGE.format(name=container.get("name")))
    path = f"{template.path}.spec" if template.path else "spec"
    if want.secret is not None and facts.is_true(pod.get("shareProcessNamespace")):
        yield warning(SHARED_PROCESSES.format(path=path, secret=want.secret))
    for other in facts.listed(pod, "containers"):
        if other.get("name") in facts.PROXIES:
            yield warning(LATE_PROXY.format(name=other["name"]))
    if wrapped:
        for variable in facts.listed(container, "env"):
            name = variable.get("name")
            if name in _VARIABLES:
                yield Remark(_VARIABLES[name].format(name=container.get("name"), variable=name))


def _lasting(
    workload: Workload, template: Template, key: str, value: str, *, owner_is_made: bool
) -> Iterator[Remark]:
    """Yield a remark if a worker's end would end the job by the object's present entries.

    inject adds the entry if it is missing, and replaces nothing.
    """
    path = template.path.rpartition(".")[0]
    around = next(value_of(node) for node, _ in at(workload.node, path))
    found = around.get(key) if isinstance(around, Mapping) else None
    if found is None and owner_is_made:
        yield warning(LACKS_LASTING.format(path=path, key=key, value=value))
    elif found is None:
        yield Remark(LASTING.format(path=path, key=key, value=value))
    elif found != value:
        yield warning(NOT_LASTING.format(path=path, key=key, found=found, value=value))


def _lasts(pod: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    """Return whether a container may save where a checkpoint outlives its pod.

    That is a volume, or an object store that its command or a variable names. A claim of one pod
    alone, as a StatefulSet makes it, is none: the other pods do not find it.
    """
    volumes = {one.get("name"): one for one in facts.listed(pod, "volumes")}
    mounts = (volumes.get(one.get("name")) for one in facts.listed(container, "volumeMounts"))
    if any(one is not None and _outlives(one) for one in mounts):
        return True
    words = [*facts.listed(container, "command"), *facts.listed(container, "args")]
    variables = [one.get("value") for one in facts.listed(container, "env")]
    return any(_OBJECT_STORE.search(str(text)) for text in (*words, *variables))


def _outlives(volume: Mapping[str, Any]) -> bool:
    kinds = {key for key, value in volume.items() if key != "name" and value is not None}
    if kinds & _WITH_THE_POD:
        return False
    driver = (volume.get("csi") or {}).get("driver")
    path = str((volume.get("hostPath") or {}).get("path", ""))
    return bool(kinds) and driver != _OF_SECRETS and not _OF_THE_NODE.fullmatch(path)
