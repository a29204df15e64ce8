# SPDX-License-Identifier: Apache-2.0
"""The things that a process has from the one that started it, besides its memory.

A fork has it from the zygote, a worker that torchrun starts has it from torchrun. Where both are
the same, nobody can tell the fork by them; a difference is a reason for a plain start.
"""

from __future__ import annotations

import os
from typing import Dict, List, Mapping

OF_A_ROUND = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "MUSTER_WORKER"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *(
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
            "TORCHELASTIC_SIGNALS_TO_HANDLE",
        ),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
    }
)
"""Variables that torchrun sets for each worker anew: an import that reads one is of one round."""

_STATUS = (
    *("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff"),
    *("CapBnd", "CapAmb", "SigBlk", "SigIgn", "Cpus_allowed_list", "Mems_allowed_list"),
)
_FILES = ("limits", "cgroup", "personality", "oom_score_adj")
_SPACES = ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup")


OF_HOROVOD = ("HOROVOD_", "NCCL_", "GLOO_")
"""Prefixes of those that horovodrun sets for each."""


def is_of_a_round(name: str) -> bool:
    """Return whether a variable differs from worker to worker."""
    return name in OF_A_ROUND or name.startswith(OF_HOROVOD)


def environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that an import may depend on: those of no round."""
    return {name: value for name, value in environ.items() if not is_of_a_round(name)}


def changed(
    environ: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]
) -> Dict[str, str]:
    """Return ``environ`` with the changes that imports have made to ``before``: pure."""
    kept = {name: text for name, text in environ.items() if name in after or name not in before}
    made = {name: text for name, text in after.items() if before.get(name) != text}
    return {**kept, **made}


def circumstances() -> Dict[str, str]:
    """Return what this process was given, a text for each kind; raises ``OSError``."""
    found: Dict[str, str] = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, text = line.partition(":")
            if name in _STATUS:
                found[name] = " ".join(text.split())
    for name in _FILES:
        try:
            with open("/proc/self/" + name, encoding="utf-8", errors="replace") as file:
                found[name] = file.read()
        except OSError:
            continue  # hidden from both, or from neither
    for name in _SPACES:
        try:
            found["namespace " + name] = os.readlink("/proc/self/ns/" + name)
        except OSError:
            continue
    found["root"] = os.readlink("/proc/self/root")
    found["nice"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["scheduler"] = str(os.sched_getscheduler(0))
    found["memory policy"] = _memory_policy()
    return found


def _memory_policy() -> str:
    """Return the policy of this process's memory, as ``numactl`` sets it."""
    try:
        with open("/proc/self/numa_maps", encoding="ascii", errors="replace") as file:
            return file.readline().split()[1]
    except (OSError, IndexError):
        return ""


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> List[str]:
    """Return the names by which two processes differ, sorted."""
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
