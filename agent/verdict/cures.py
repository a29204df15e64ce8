# SPDX-License-Identifier: Apache-2.0
"""Cures: of a failure on record, and of a launcher that does not take part. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.verdict.view import JobView
from rdzv.records.troubles import Bypass, Failure, Kind

LOG = "read the log of {member}'s training container"

_CURES = (
    (
        r"uncorrectable ECC|\bXid\b|fallen off the bus|no CUDA-capable device|NVML"
        r"|devices? (is |are )?(busy or )?unavailable|hardware error",
        "replace the GPU of {place}:{cordon} muster drain {member} --job {job}{delete}",
    ),
    (
        r"OutOfMemoryError|out of memory",
        "use a smaller batch, or see what else holds memory on {place}: nvidia-smi",
    ),
    (
        r"ModuleNotFoundError|ImportError|undefined symbol|shared object file|no kernel image"
        r"|driver version is insufficient|has no attribute '__version__'",
        "{whose} {image}environment lacks it, or has another version: use the right one{describe}",
    ),
    (
        r"SOCKET_IFNAME|[Ii]nterface|find address for|connectFullMesh|No route to host"
        r"|Network is unreachable|Connection (timed out|refused)|failed to connect"
        r"|ncclSystemError|ncclRemoteError",
        "see that ranks reach each other from {member}: set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME to the interface of the pods' network (ip addr shows it), and allow"
        " the pods' traffic in NetworkPolicies",
    ),
    (
        r"No space left|ENOSPC|quota exceeded",
        "make room on the volume that {member} writes to: df -h, in its training container",
    ),
    (
        r"FileNotFoundError|NotADirectoryError|No such file|Stale file handle|Input/output error"
        r"|Transport endpoint|PermissionError|Permission denied|Read-only file system",
        "see that {whose} volumes are mounted at the paths that the script opens, and may be"
        " read{describe}",
    ),
    (
        r"Address already in use",
        "see what else listens there on {place}: ss -ltnp; one pod of a job fits on a node with"
        " hostNetwork",
    ),
    (
        r"reported no Python error",
        f"see whether memory ran out (OOMKilled, exit code 137){{describe}}; then {LOG}",
    ),
)
"""Signs in an error, with what to do; the first match counts."""


def cure(view: JobView, failure: Failure) -> str:
    """Return what to do about the failure that ends the job's worlds."""
    name, node = failure.member, view.nodes.get(failure.member, "")
    alike = [
        one
        for one in view.failures.values()
        if (one.run, one.kind) == (failure.run, failure.kind) and one.round >= failure.round - 1
    ]
    common = len(alike) > 1
    words = {
        "member": name,
        "job": view.name,
        "place": f"{name} on {node}" if node not in ("", name) else name,
        "whose": f"the {'pods' if view.in_cluster else 'nodes'}'" if common else f"{name}'s",
        **_by_kubectl(view, name),
    }
    for sign, sentence in _CURES:
        if re.search(sign, failure.error):
            return sentence.format(**words)
    log = LOG.format(**words)
    if common:
        return f"{log}; {len(alike)} pods fail alike, so the script, its data or the image is wrong"
    return f"{log}; if its machine is at fault: muster drain {name} --job {view.name}"


def _by_kubectl(view: JobView, name: str) -> dict[str, str]:
    """Return the parts of sentences that only a cluster has; empty texts without one."""
    parts = {
        "cordon": " kubectl cordon its node, then",
        "delete": f", and delete the pod {name}",
        "describe": f": kubectl describe pod {name}",
        "image": "image or ",
    }
    return parts if view.in_cluster else dict.fromkeys(parts, "")


_LAUNCHERS: Mapping[Kind, str] = {
    "unseen": "see whether its training container runs, and if not why (image,"
    " volumes){describe}; its command has to begin with muster-run",
    "absent": f"{LOG}; its command has to start torchrun",
    "elsewhere": "remove that option from its command, and MUSTER_KEEP_FLAGS from its variables",
    "run_id": "remove --rdzv-id from its command",
    "nnodes": "remove --nnodes from its command",
}


def launcher_cure(view: JobView, member: str, fault: Bypass) -> str:
    """Return what to do about the launcher of a member; empty if nothing has to be done."""
    return _LAUNCHERS.get(fault.kind, "").format(member=member, **_by_kubectl(view, member))
