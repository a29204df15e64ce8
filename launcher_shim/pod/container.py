# SPDX-License-Identifier: Apache-2.0
"""The command of a container, under a first process that does the duties of one.

The command runs in a session of its own, and signals go to its process group: in ``sh -c "torchrun
…"`` the shell and torchrun each get one, and torchrun, whose workers are in sessions of their own,
passes it on to them. A shell alone would end without passing it on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from typing import Callable, Mapping, Optional, Sequence, Set

from launcher_shim.pod.early_signals import unblock
from launcher_shim.pod.process_table import descendants

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
        unblock()
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
        while True:
            try:
                pid, waited = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
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


def _shell_status(waited: int) -> int:
    if os.WIFSIGNALED(waited):
        return 128 + os.WTERMSIG(waited)
    return os.WEXITSTATUS(waited)
