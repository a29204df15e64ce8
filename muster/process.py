# SPDX-License-Identifier: Apache-2.0
"""The process of a rank: its identity and place in the world, its torchrun, and what ends it.

A rank's parent is torchrun itself, or a script that torchrun was told to start instead of Python
(``torchrun --no-python ./train.sh``) and that lives on when torchrun is killed. A fault of the
setup ends the script before a sample or a step is lost; ``MUSTER_CHECKS=warn`` logs it instead.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

log = logging.getLogger(__name__)

HOROVODS = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
CENTRAL_RANK, CENTRAL_LOCAL_RANK = "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"
CENTRAL_DRIVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
"""Variables of a rank of a launcher that is one for the whole job: all ranks share its driver."""
CENTRAL_WAITS = r"/horovod/[^/]+/(mpi_ops|functions)\.py$|/horovod/common/"
"""A regular expression for the files in which such ranks wait for each other."""

DEPTH_MAX = 32
OWN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK")
"""Variables that torchrun sets for a rank, and for the scripts around it, and does not have in its
own environment, or has with other values if another torchrun's rank has started it."""

CHECKS_VARIABLE = "MUSTER_CHECKS"

LINE_READS = 5
"""Maximum number of reads of a line that its owner may just be overwriting."""
LINE_MAX = 4096


def own_world(call: str) -> Tuple[int, int]:
    """Return the rank and the world size for ``call``, which was given none.

    An initialized process group of torch, or Horovod, is asked; else it is the environment, and a
    process alone is rank 0 of 1. Raises ``ValueError`` if they differ, or if horovodrun has started
    the process and Horovod is not initialized.
    """
    environ = os.environ
    set_ = "RANK" in environ or "WORLD_SIZE" in environ
    said = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    for name in ("torch.distributed", *HOROVODS):
        library = sys.modules.get(name)
        if library is None or not getattr(library, "is_initialized", lambda: False)():
            continue
        size = getattr(library, "get_world_size" if name == "torch.distributed" else "size")()
        rank = getattr(library, "get_rank" if name == "torch.distributed" else "rank")()
        if set_ and (rank, size) != said:
            raise ValueError(
                "%s: %s has rank %d of %d, and RANK and WORLD_SIZE say rank %d of %d: give it rank="
                " and world_size=" % (call, name, rank, size, *said)
            )
        return int(rank), int(size)
    if not set_ and int(environ.get("HOROVOD_SIZE", "1")) > 1:
        raise ValueError(
            "%s: horovodrun has started this process, and Horovod is not initialized: call"
            " hvd.init() before, or give it rank=hvd.rank() and world_size=hvd.size()" % call
        )
    return said


def leave_at_exit() -> None:
    """Let this process leave a process group of Gloo's before Python ends, if no error ends it.

    A thread of Gloo's needs Python to free a tensor. If Python has ended, the thread aborts the
    process, and torchrun restarts the whole world for a rank that has trained to its end.
    """
    atexit.register(_leave, os.getpid())


def _leave(process: int) -> None:
    dist = sys.modules.get("torch.distributed")
    if os.getpid() != process or getattr(sys, "last_value", None) is not None:
        return
    if dist is None or not getattr(dist, "is_initialized", lambda: False)():
        return
    if dist.get_backend() == "gloo":  # to leave one of NCCL may wait for ranks that are gone
        dist.destroy_process_group()


class Lineage:
    """The ancestors of this process up to its torchrun; just the parent if the system is not Linux.

    Raises nothing: a process that cannot be inspected is taken for torchrun.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        own = {name: environ.get(name) for name in OWN}
        self._parent = pid = os.getppid()
        pid = sys.__dict__.get("muster_stub", pid)
        self._above: List[Tuple[int, int]] = []
        """Process and parent, for each ancestor below torchrun."""
        while own[OWN[0]] and len(self._above) < DEPTH_MAX and _has_environment(pid, own):
            try:
                parent = _parent_of(pid)
            except OSError:
                break
            if not parent:
                break
            self._above.append((pid, parent))
            pid = parent

    @property
    def broken(self) -> bool:
        """Whether an ancestor is gone, so that nobody above it knows of this process any more."""
        if os.getppid() != self._parent:
            return True
        return any(_is_gone(pid, parent) for pid, parent in self._above)


def report_imports() -> None:
    """Let the zygote that this process is a fork of import the same modules for the next ones.

    Does nothing in any other process, or a second time; see ``launcher_shim.warm``.
    """
    report: Optional[Callable[[], None]] = sys.__dict__.pop("muster_imported", None)
    if report is not None:
        report()


def _has_environment(pid: int, own: Mapping[str, Optional[str]]) -> bool:
    """Return whether a process was started with the rank's variables."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            parts = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return False
    environ = dict(part.split("=", 1) for part in parts if "=" in part)
    return all(environ.get(name) == value for name, value in own.items())


def _is_gone(pid: int, parent: int) -> bool:
    """Return whether a process has ended, or its parent has."""
    try:
        return _parent_of(pid) != parent
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # it cannot be inspected, as when this process has no file descriptor left


def _parent_of(pid: int) -> int:
    """Read the parent of a process; raises ``OSError``."""
    with open("/proc/%d/stat" % pid, "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def end_without_torchrun() -> None:
    """End this process: no torchrun is left to let it go on, or to end it."""
    log.error("the torchrun of this rank is gone while the rank waits: the rank ends, too")
    os._exit(128 + signal.SIGTERM)


def end_well(why: str) -> None:
    """End the process at once with status 0: the world that its script may call is gone."""
    log.warning("%s", why)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # closed, or without a reader
                stream.flush()
    os._exit(0)


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """Let SIGTERM end the process within the block: a handler might wait for others."""
    handler = signal.getsignal(signal.SIGTERM)
    ours_to_set = threading.current_thread() is threading.main_thread() and handler is not None
    if ours_to_set:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours_to_set:
            signal.signal(signal.SIGTERM, handler)


passed_over: List[str] = []
"""Faults that this process was let pass: its saves then do not count as keeping samples."""


def refuse(error: Exception) -> None:
    """Raise ``error``, or log it as a warning with ``MUSTER_CHECKS=warn``.

    That is for a script that cannot be changed at once.
    """
    if os.environ.get(CHECKS_VARIABLE) != "warn":
        raise error
    passed_over.append(str(error))
    log.warning("%s (%s=warn: training goes on)", error, CHECKS_VARIABLE)


def master_of(environ: Mapping[str, str]) -> str:
    """Return the name of the round in torchrun; empty outside of it."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    return "%s:%s" % (environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""))


class RankIdentity:
    """The rank and round of this process, from its launcher's environment.

    ``master`` names the round: with a worker store of its own for each round, no two rounds of a
    job share an address and port. It is empty outside torchrun.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank = int(environ.get("RANK", "0"))
        self.local_rank = int(environ.get("LOCAL_RANK", "0"))
        self.world_size = int(environ.get("WORLD_SIZE", "1"))
        self.local_world_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        self.restart = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.of_torchrun = "TORCHELASTIC_RUN_ID" in environ
        self.master = master_of(environ)


class FileOwner(NamedTuple):
    """A process: its number, when it began in clock ticks since boot, and its round's name."""

    pid: int
    started: int
    master: str


def living_owner(path: str) -> Optional[FileOwner]:
    """Return the owner of the file at ``path``; None if there is none, or it has ended."""
    for _ in range(LINE_READS):
        try:
            with open(path, "rb") as file:
                fields = json.loads(file.read(LINE_MAX))
            owner = FileOwner(int(fields["pid"]), int(fields["started"]), str(fields["master"]))
        except OSError:
            return None
        except (ValueError, KeyError, TypeError):
            continue  # parts of two lines
        return owner if began(str(owner.pid)) == owner.started else None
    return None


def began(process: str) -> Optional[int]:
    """Read when a process, by number or "self", began, in ticks since boot; None if it has ended.

    Fields 3 and 22 of proc(5)'s ``stat``.
    """
    try:
        with open(os.path.join("/proc", process, "stat"), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


forks = 0
"""Number of forks between the first process that imported this module and this one: looked at with
each step, in a tenth of the time that the kernel takes to tell the process's id."""


def _count_fork() -> None:
    global forks
    forks += 1


if hasattr(os, "register_at_fork"):  # else nothing forks
    os.register_at_fork(after_in_child=_count_fork)
