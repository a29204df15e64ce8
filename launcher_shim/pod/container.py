# SPDX-License-Identifier: Apache-2.0
"""The command of a container, under a first process that does the duties of one.

The command runs in a session of its own, and signals go to its process group: in ``sh -c "torchrun
…"`` the shell and torchrun each get one, and torchrun, whose workers are in sessions of their own,
passes it on to them. A shell alone would end without passing it on.

One duty is network: where the container's host name does not lead to the pod, as in a pod of the
host's network, Gloo would listen at the loopback, and needs the interface's name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from launcher_shim.exit_status import unblock_signals
from launcher_shim.pod.launch import descendants

log = logging.getLogger(__name__)

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""As in a shell."""
KILL_TIMEOUT_S = 2.0
"""Only processes in the kernel's uninterruptible sleep outlive SIGKILL."""
LOOK_S = 0.05

_OURS = frozenset(
    {
        *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGKILL, signal.SIGSTOP),
        # A defect of this very process:
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV),
        *(signal.SIGSYS, signal.SIGTRAP),
        # To write to the terminal in the background must not stop it:
        *(signal.SIGTTIN, signal.SIGTTOU),
    }
)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Container:
    """The command of this container, one at a time; reaps all processes that end below this one."""

    def __init__(self) -> None:
        self.status: Optional[int] = None
        """The exit status of the last command as a shell has it, once it has ended."""
        self.ended = asyncio.Event()
        self._process: Optional[subprocess.Popen[bytes]] = None

    def adopt(self, on_signal: Callable[[signal.Signals], None]) -> None:
        """Handle every signal, and become the parent of every orphan below.

        A signal that was ignored when this process started, such as SIGHUP under nohup, stays
        ignored.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.reap)
        for number in signal.valid_signals() - _OURS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
        unblock_signals()
        if os.getpid() != 1:
            _become_parent_of_orphans()

    @property
    def runs(self) -> bool:
        """Whether a command was started and has not ended."""
        return self._process is not None and self.status is None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a command, the first or the next; one that cannot be started ends at once."""
        self.status, self._process = None, None
        self.ended.clear()
        try:
            self._process = subprocess.Popen(command, env=dict(environ), start_new_session=True)
        except OSError as error:
            log.error("%s: %s", command[0], error.strerror)
            missing = isinstance(error, FileNotFoundError)
            self._end(NOT_FOUND if missing else NOT_EXECUTABLE)
            return
        log.debug("%s is process %d", command[0], self._process.pid)

    def reap(self) -> None:
        """Take the exit status of every child that has ended."""
        while (ended := _ended_child()) is not None:
            pid, waited = ended
            if self._process is not None and pid == self._process.pid:
                status = _shell_status(waited)
                self._process.returncode = status  # it is reaped: Popen must not wait for it
                self._end(status)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command's process group, if there is one."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            except PermissionError:
                # The whole group is another user's, as after a change of user without CAP_KILL.
                log.warning("%s reaches nothing of the command: not permitted", number.name)

    async def group_ended(self, deadline_s: float) -> None:
        """Wait until no process of the command's group is left, or for the loop's ``deadline_s``.

        It does not wait for processes that no signal may reach, as they are another user's. A shell
        that a signal has ended leaves a torchrun that is still ending its workers.
        """
        loop = asyncio.get_running_loop()
        while self._process is not None and loop.time() < deadline_s:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            await asyncio.sleep(LOOK_S)

    async def kill_rest(self) -> None:
        """Send SIGKILL to all processes below this one, and reap them.

        Processes of another user, such as a daemon that sudo has started, stay.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + KILL_TIMEOUT_S
        spared: Set[int] = set()
        while loop.time() < deadline_s:
            left = descendants(os.getpid()) - spared
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                except PermissionError:
                    log.info("process %d is left: it is another user's", pid)
                    spared.add(pid)
            await asyncio.sleep(0.01)
            self.reap()

    def _end(self, status: int) -> None:
        self.status = status
        self.ended.set()


def _become_parent_of_orphans() -> None:
    try:
        import ctypes  # some builds of Python have none, and process 1 needs none
    except ImportError:
        log.warning("this Python has no ctypes: processes that detach themselves are not ended")
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _ended_child() -> Optional[Tuple[int, int]]:
    """Take the number and status of one child that has ended; None if there is none."""
    try:
        pid, waited = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, waited) if pid else None


def _shell_status(waited: int) -> int:
    if os.WIFSIGNALED(waited):
        return 128 + os.WTERMSIG(waited)
    return os.WEXITSTATUS(waited)


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = ("127.", "::1")
RESOLVE_S = 5.0
"""Timeout for the host name: one that takes longer would hold up every rank."""

NETLINK_TIMEOUT_S = 2.0
_ROUTE, _GETADDR, _NEWADDR, _ERROR, _DONE = 0, 22, 20, 2, 3
_DUMP_REQUEST = 0x301
_ADDRESS, _LOCAL = 1, 2
_HEADER, _ENTRY, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")


def needed_interface(environ: Mapping[str, str], address: str) -> Optional[Tuple[str, str]]:
    """Look at this machine; return the interface to give to Gloo, and why. None: give none.

    ``address``: the pod's. Blocks for ``RESOLVE_S`` at most, and raises ``OSError`` if that is no
    address, or the machine does not tell.
    """
    if environ.get(GLOO_INTERFACE) or _plain(address).startswith(LOOPBACK):
        return None
    interfaces, name = read_interfaces(), socket.gethostname()
    if _plain(address) not in interfaces:
        return None  # it is a router's, and no interface has it
    return choose_interface(address, name, _bound_by(name), interfaces)


def choose_interface(
    address: str, name: str, bound: Optional[str], interfaces: Mapping[str, str]
) -> Optional[Tuple[str, str]]:
    """Return the interface to give to Gloo, and why; None if it finds the one of ``address``.

    ``bound``: where it would listen by the host ``name``; None: nowhere. ``interfaces``: this
    machine's, by address.
    """
    own = interfaces[_plain(address)]
    if bound is not None and interfaces.get(_plain(bound)) == own:
        return None
    where = "does not resolve to" if bound is None else f"resolves to {bound}, not to"
    return own, (
        f"{GLOO_INTERFACE}={own} is set: the host name {name} {where} {address}, where the other"
        " pods reach this one"
    )


def read_interfaces() -> Dict[str, str]:
    """Read the addresses of this machine from the kernel, each with its interface's name.

    Gloo listens at the first address of the host name that this machine can bind, and at the
    loopback if there is none: then ranks of two machines never meet. So it is in a pod of the
    host's network if the node's name is not in the DNS, or stands for ``127.0.1.1``.
    """
    names = dict(socket.if_nameindex())
    found: Dict[str, str] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE) as kernel:
        kernel.settimeout(NETLINK_TIMEOUT_S)
        entry = _ENTRY.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        kernel.sendto(
            _HEADER.pack(_HEADER.size + len(entry), _GETADDR, _DUMP_REQUEST, 1, 0) + entry, (0, 0)
        )
        while True:
            answer = kernel.recv(1 << 16)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return found
                if kind == _NEWADDR:
                    _note(answer[at + _HEADER.size : at + length], names, found)
                at += _aligned(length)


def _note(message: bytes, names: Mapping[int, str], found: Dict[str, str]) -> None:
    """Note the address in one message; a link between two has the other end's address, too."""
    index = _ENTRY.unpack_from(message)[4]
    addresses: Dict[int, bytes] = {}
    at = _ENTRY.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        addresses[kind] = message[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    packed = addresses.get(_LOCAL, addresses.get(_ADDRESS))
    if packed is not None and index in names:
        found.setdefault(_spelled(packed), names[index])


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _bound_by(name: str) -> Optional[str]:
    """Return the first address of the host ``name`` that can be bound, as Gloo chooses it."""
    found: List[Tuple[int, Tuple[Any, ...]]] = []
    # A thread of its own that nothing waits for: a resolver cannot be interrupted.
    resolving = threading.Thread(target=_resolve, args=(name, found), daemon=True)
    resolving.start()
    resolving.join(RESOLVE_S)
    return next((str(where[0]) for family, where in tuple(found) if _can_bind(family, where)), None)


def _resolve(name: str, found: "List[Tuple[int, Tuple[Any, ...]]]") -> None:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # no address: Gloo finds none either
    found += [(answer[0], answer[4]) for answer in answers]


def _can_bind(family: int, where: "Tuple[Any, ...]") -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _plain(address: str) -> str:
    """Spell an address as ``read_interfaces`` does; raises ``OSError`` if it is none."""
    text = address.partition("%")[0]
    return _spelled(socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text))


def _spelled(packed: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6 if len(packed) == 16 else socket.AF_INET, packed)
