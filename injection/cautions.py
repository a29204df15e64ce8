# SPDX-License-Identifier: Apache-2.0
"""Remarks on injections and launch lines that may not do what their user expects.

One sentence each. Of a launch line: what Muster overrides in it, and what it cannot.
``docs/kubernetes.md`` has them
all, in these words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from injection import facts, launches
from injection.facts import listed
from injection.kinds import Kind
from injection.launches import (
    ACCELERATE,
    TORCHRUN,
    FoundLauncher,
    found_launches,
    goes_past,
    of_launcher,
    starts_mpi,
)
from injection.member_spec import Demand
from injection.remarks import Remark, warning
from injection.sidecar import RUN_DIR
from injection.workloads import Template, Workload, at
from injection.yaml_tree import child, text_of, value_of
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.torchrun.launcher import KEEP_FLAGS, RENDEZVOUS_OPTIONS, RESTARTS

NO_STORAGE = (
    "container {name} mounts no volume that outlives its pod: a checkpoint on its own disk is gone"
    " with the pod that wrote it: mount one that all pods share, or save to object storage"
)
LAUNCHER = (
    f"container {{name}}: the {CENTRAL.name} in it gets Muster's host list and starts its workers"
    " through the sidecars, whatever an operator has set for that: without ssh and without kubectl"
    " exec"
)
WORKERS = (
    "container {name}: muster-exec runs in the place of its command, which is kept: it starts"
    f" {CENTRAL.name}'s workers as this container's user, without sshd, keys or root"
)
MPI_ALONE = (
    "container {name} runs {program}, whose world keeps its size:"
    f" only a {CENTRAL.name} is made a launcher of Muster's"
)
NEEDS_SSHD = (
    "container {name} runs {program}, which reaches its workers by sshd, and muster-exec runs in"
    f" the place of that: start them by {CENTRAL.name}"
)
PAST_OURS = (
    "container {name}: {word} in its shell command bypasses Muster's"
    f" {CENTRAL.name}: call {{path}} there"
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

OURS = f"{RUN_DIR}/bin/{CENTRAL.name}"

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
    if want.role == "worker":
        yield Remark(WORKERS.format(name=container.get("name")))
    elif want.role and any(one.launcher == CENTRAL.name for one in found_launches(container)):
        yield Remark(LAUNCHER.format(name=container.get("name")))
    if kind is not None and kind.sshd:
        for one in of_launcher(workload, container):
            if (program := starts_mpi(one)) is not None:
                sentence = NEEDS_SSHD.format(name=one.get("name"), program=program)
                yield Remark(sentence, "error")
    elif want.role == "launcher" and (program := starts_mpi(container)) is not None:
        yield warning(MPI_ALONE.format(name=container.get("name"), program=program))
    if want.role == "launcher" and (word := goes_past(container, OURS)) is not None:
        yield warning(PAST_OURS.format(name=container.get("name"), word=word, path=OURS))
    if kind is not None and kind.lasting is not None and want.role == "worker":
        yield from _lasting(workload, template, *kind.lasting, owner_is_made=owner_is_made)
    if kind is not None and kind.master is not None:
        masters = (path for _, path in at(workload.node, kind.master))
        if template.path in masters:
            yield warning(MASTER.format(path=template.path.rpartition(".")[0]))
    if want.role is None and not _lasts(pod, container):
        yield warning(NO_STORAGE.format(name=container.get("name")))
    path = f"{template.path}.spec" if template.path else "spec"
    secret = want.settings.etcd_secret
    if secret is not None and facts.is_true(pod.get("shareProcessNamespace")):
        yield warning(SHARED_PROCESSES.format(path=path, secret=secret))
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


OVERRIDDEN = "container {name}: Muster overrides {options} of its {launcher} line"
NNODES = "container {name}: the job's {bounds} overrides the number of nodes in its command"
FIXED = (
    "container {name}: min and max are the {nodes} nodes of its launch line, so the job waits"
    " whenever a pod is missing: give a smaller --min"
)
WINS = (
    "container {name} has {option} in its command, and keeps it, so the pod would not train with"
    " the others: remove it"
)
HIDDEN = (
    "container {name}: {unknown} of its torchrun line is not known here, so {options} behind it"
    " may be kept: write {unknown}=VALUE"
)
ADDRESS_WINS = "container {name} has --local-addr in its command: it wins over the pod's address"
HALVES = (
    "min {least} is not above half of max {most}: while running pods have lost the store, new pods"
    " can train beside them: give --min {enough} or more, or --on-cut=hold"
)
KEPT = (
    "container {name} keeps the rendezvous of its accelerate launch, so its ranks meet without"
    " Muster: {remedy}"
)
APART = "container {name}: a {launcher} with MUSTER_KEEP_FLAGS=1 starts ranks apart from the job's"
ONE_PROCESS = (
    "container {name}: python -m accelerate.commands.launch starts one process, without Muster:"
    " write accelerate launch, or give it --multi_gpu"
)
BY_DEEPSPEED = (
    "container {name}: accelerate launch --use_deepspeed takes the deepspeed launcher for several"
    " machines, whose ranks meet without Muster: add --deepspeed_multinode_launcher standard"
)
FOREIGN = (
    "container {name} starts {launcher}, whose ranks meet without Muster: start the script by"
    " torchrun, which sets the same variables, and keep the script's arguments: torchrun"
    " --nproc-per-node={ranks} {script} …"
)
IN_MPI = ", in the pods of a Job or a PyTorchJob"
NO_LAUNCHER = (
    "container {name}: no launcher is found in its command. If a script starts torchrun or"
    " accelerate launch, it trains through Muster; ranks that a script starts itself do not"
)
NO_CENTRAL = (
    f"container {{name}}: no {CENTRAL.name} is found in its command. If a script starts one, it"
    " gets Muster's host list; another launcher does not"
)


def on_launches(
    workload: Workload, container: Mapping[str, Any], want: Demand, *, wrapped: bool
) -> Iterator[Remark]:
    """Yield the remarks on a container's launchers; ``wrapped``: muster-run starts its command."""
    name = container.get("name")
    if want.role == "worker":
        return
    found = launches.found_launches(container)
    if (fault := world_of_its_own(workload, container)) is not None:
        yield Remark(fault, "error")
    elif want.role == "launcher":
        if starts_mpi(container) is None and not any(o.launcher == CENTRAL.name for o in found):
            yield warning(NO_CENTRAL.format(name=name))
    elif not found and listed(container, "command"):
        yield warning(NO_LAUNCHER.format(name=name))
    if want.role is None:
        yield from _on_torch(container, found, _remedy(container, wrapped=wrapped))
        yield from _on_bounds(container, want)
        if 2 * want.least <= want.most and want.settings.on_cut != "hold":
            enough = want.most // 2 + 1
            yield Remark(HALVES.format(least=want.least, most=want.most, enough=enough))


def world_of_its_own(workload: Workload, container: Mapping[str, Any]) -> str | None:
    """Return why ranks of a container's launcher never meet through Muster; None if they may."""
    name = container.get("name")
    if any(one.takes_deepspeed() for one in launches.found_launches(container)):
        return BY_DEEPSPEED.format(name=name)
    found = launches.foreign(container)
    if found is None:
        return None
    sentence = FOREIGN + (IN_MPI if (workload.known or Kind(())).launcher is not None else "")
    ranks = found.options().get("num-gpus", "gpu")
    return sentence.format(name=name, launcher=found.launcher, script=found.script, ranks=ranks)


def _remedy(container: Mapping[str, Any], *, wrapped: bool) -> str | None:
    """Return what to do so that Muster overrides flags; None if it does."""
    if not wrapped:
        has_command = bool(listed(container, "command"))
        return "leave --no-wrap out" if has_command else "give the container its command"
    return f"leave {KEEP_FLAGS} out" if launches.keeps_flags(container) else None


def _on_torch(
    container: Mapping[str, Any], found: list[FoundLauncher], remedy: str | None
) -> Iterator[Remark]:
    """Yield the remarks on launchers of torch; ``remedy``: against the flags of all being kept."""
    name = container.get("name")
    of_torch = [one for one in found if one.launcher in (TORCHRUN, ACCELERATE)]
    apart = [one for one in of_torch if remedy or one.keeps]
    ours = [one for one in of_torch if one not in apart]
    if apart and ours:
        yield Remark(APART.format(name=name, launcher=apart[0].launcher))
    elif apart:
        yield from _on_kept(name, apart, remedy or f"leave {KEEP_FLAGS} out")
    torchruns = [one for one in ours if one.launcher == TORCHRUN]
    if any("local-addr" in one.options() for one in torchruns):
        yield warning(ADDRESS_WINS.format(name=name))
    for one in torchruns:
        unknown, behind = one.hidden()
        if behind:
            options = _enumerated(behind)
            yield Remark(HIDDEN.format(name=name, unknown=unknown, options=options), "error")
    for launcher in (TORCHRUN, ACCELERATE):
        of_it = [one for one in ours if one.launcher == launcher]
        if overridden := [option for one in of_it for option in one.overridden()]:
            options = _enumerated(overridden)
            yield Remark(OVERRIDDEN.format(name=name, options=options, launcher=launcher))
    if any(one.is_one_process() and one.by_module for one in ours):
        yield warning(ONE_PROCESS.format(name=name))


def _on_kept(name: Any, apart: list[FoundLauncher], remedy: str) -> Iterator[Remark]:
    torchruns = [one for one in apart if one.launcher == TORCHRUN]
    for option in dict.fromkeys(option for one in torchruns for option in one.winning()):
        yield Remark(WINS.format(name=name, option=f"--{option}"), "error")
    if len(torchruns) < len(apart):
        yield Remark(KEPT.format(name=name, remedy=remedy), "error")


def _on_bounds(container: Mapping[str, Any], want: Demand) -> Iterator[Remark]:
    name, of_job = container.get("name"), (want.least, want.most)
    if want.sized_by_launch and want.least == want.most > 1:
        yield warning(FIXED.format(name=name, nodes=want.most))
    elif launches.nnodes(container) is not None and launches.bounds(container) != of_job:
        yield Remark(NNODES.format(name=name, bounds=f"{want.least}:{want.most}"))


def _enumerated(options: Iterable[str]) -> str:
    *others, last = dict.fromkeys(f"--{option}" for option in options)
    return f"{', '.join(others)} and {last}" if others else last
