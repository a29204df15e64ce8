# SPDX-License-Identifier: Apache-2.0
"""The request for a warm worker, from the stub to the zygote: its circumstances, as JSON.

The first message carries the stub's three standard files. A fork has its circumstances from the
zygote, a worker that torchrun starts has them from torchrun: where both are the same, nothing can
tell the fork by them; a difference is a reason for a plain start.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any, Dict, List, Mapping, Sequence, Tuple

OVERRIDE = "PYTHON_EXEC"
"""torchrun's variable for the program that it starts as a worker's interpreter."""
TRIAL = "--muster-trial"
"""The argument with which the stub ends at once, with 0."""

MESSAGE_MAX = 8 * 1024 * 1024
"""More than the kernel lets a process start with."""
FILES = 3
_HEAD = struct.Struct("<I")


class Unsaid(Exception):
    """The other side has closed the connection, or sent no message."""


def beside(stub: str) -> str:
    """Return the path of the zygote's socket, by that of the stub."""
    return os.path.join(os.path.dirname(stub), "socket")


def encode(message: Dict[str, Any]) -> bytes:
    """Return one message without files."""
    text = json.dumps(message).encode()
    return _HEAD.pack(len(text)) + text


def send(line: socket.socket, message: Dict[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message; raises ``OSError``."""
    text = encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    line.sendmsg([text[: _HEAD.size]], rights)
    line.sendall(text[_HEAD.size :])


def receive(line: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    """Receive one message with the files that it carries; raises ``Unsaid`` and ``OSError``.

    The files are the caller's to close.
    """
    head, rights, _, _ = line.recvmsg(
        _HEAD.size, socket.CMSG_SPACE(FILES * array.array("i").itemsize), socket.MSG_WAITALL
    )
    files = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    try:
        return _message(line, head), list(files)
    except (Unsaid, OSError):
        for file in files:
            os.close(file)
        raise


def _message(line: socket.socket, head: bytes) -> Dict[str, Any]:
    if len(head) != _HEAD.size:
        raise Unsaid("no message")
    (size,) = _HEAD.unpack(head)
    if size > MESSAGE_MAX:
        raise Unsaid(f"a message of {size} bytes")
    text = bytearray()
    while len(text) < size:
        more = line.recv(min(65536, size - len(text)))
        if not more:
            raise Unsaid("half a message")
        text += more
    try:
        found = json.loads(bytes(text))
    except ValueError as error:
        raise Unsaid("no JSON") from error
    if not isinstance(found, dict):
        raise Unsaid("no object")
    return found


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

LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK")
"""The variable of a worker's local rank: torchrun's, or horovodrun's."""
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
    """Return what this process was given, a text for each kind; raises ``OSError``.

    A fork has it from the zygote, a worker that torchrun starts has it from torchrun.
    """
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
