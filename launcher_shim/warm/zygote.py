# SPDX-License-Identifier: Apache-2.0
"""The zygote: a child of torchrun that has imported what workers import, and forks one per request.

It ends when its torchrun has ended and no worker of it is left. Its socket is in a folder of its
user alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

from launcher_shim.warm import wire
from launcher_shim.warm import worker as preload
from launcher_shim.warm.stub import DEATH_TIMEOUT_S
from launcher_shim.warm.wire import changed, circumstances, differences, environment
from launcher_shim.warm.worker import Birth, await_rank_0, become, rename, run

NAME = "muster-zygote"
MARK = "MUSTER_ZYGOTE"
"""Variable of the zygote alone. Its value is room for the names of a worker's variables."""
ROOM = "." * 1024
RECEIVE_TIMEOUT_S = 5.0
KILL = signal.SIGKILL
"""It ends a worker whose stub has ended."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OWN = ("SigIgn", "SigBlk")
"""Circumstances that a worker gets back, whatever the zygote has made of them."""
START = """\
import sys
archive = sys.argv.pop(1)
sys.path.insert(0, archive)
from launcher_shim.warm.zygote import main
main(archive)
"""


def command(python: str, archive: str, state: Mapping[str, Any]) -> Tuple[List[str], int]:
    """Return the words that start a zygote in ``state``, and the file that it is to inherit.

    The state names thousands of modules: one word of a command line has no room for that. The last
    word is room for a worker's.
    """
    written = os.memfd_create(NAME)
    with open(written, "w", encoding="utf-8", closefd=False) as file:
        json.dump(state, file)
    return [python, "-u", "-c", START, archive, str(written), ROOM], written


def _inherited(written: int) -> Dict[str, Any]:
    with open(written, encoding="utf-8") as file:
        file.seek(0)
        state: Dict[str, Any] = json.load(file)
    return state


class Born(NamedTuple):
    """A request, its files, and the line to its stub: a fork goes on with them."""

    request: Birth
    files: List[int]
    line: socket.socket


class Zygote:
    """One zygote, from its imports to the end of its last worker.

    ``dying``: workers that it has killed and not reaped, with the time up to which it waits for
    their ends. Until then it answers no request: a worker to come may need what they still hold.
    ``whole_groups``: what a worker leaves in its process group ends with it.
    """

    def __init__(
        self,
        listening: socket.socket,
        workers: Dict[socket.socket, int],
        dying: Dict[int, float],
        torchrun: int,
        environ: Mapping[str, str],
        *,
        whole_groups: bool,
    ) -> None:
        self._listening: Optional[socket.socket] = listening
        self._workers = workers
        self._dying = dying
        self._torchrun = torchrun
        self._whole_groups = whole_groups
        self._environ = dict(environ)
        """The variables that it was started with: imports may have changed some since."""
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self.wanted: List[str] = []
        """Modules that workers have imported and the zygote has not."""

    def serve(self) -> Optional[Born]:
        """Serve stubs until nothing is left to do: None, or, in a fork, what it becomes."""
        signal.set_wakeup_fd(self._waker)
        signal.signal(signal.SIGCHLD, _noted)
        signal.signal(signal.SIGTERM, _noted)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        self._reap()  # workers that have ended while this process began again
        while True:
            if os.getppid() != self._torchrun and self._listening is not None:
                self._listening.close()
                self._listening = None
            if self._listening is None and not self._workers and not self._dying:
                return None
            wait_s = self._wait_s()
            watched: List[Any] = [self._wake, *self._workers]
            if self._listening is not None and not self._dying:
                watched.append(self._listening)
            ready, _, _ = select.select(watched, [], [], wait_s)
            if self._wake in ready:
                os.read(self._wake, 512)
                self._reap()
            for line in [one for one in self._workers if one in ready]:
                self._kill(line)  # its stub has ended, or sends what it never does
            if self._listening is not None and self._listening in ready and not self._dying:
                born = self._accept(self._listening)
                if born is not None:
                    return born
            if self.wanted:
                return None

    def begin_again(self, archive: str, state: Dict[str, Any]) -> NoReturn:
        """Start this process once more, with its socket and workers."""
        for one in (self._listening, *self._workers):
            if one is not None:
                one.set_inheritable(True)
        state["workers"] = [(line.fileno(), pid) for line, pid in self._workers.items()]
        state["dying"] = list(self._dying.items())
        words, written = command(state["python"], archive, state)
        os.set_inheritable(written, True)
        os.execve(words[0], words, {**self._environ, MARK: ROOM})

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if self._whole_groups:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # before it is reaped: the number is still its
            _, status = os.waitpid(pid, 0)
            self._dying.pop(pid, None)
            for line in [one for one, worker in self._workers.items() if worker == pid]:
                with suppress(OSError):  # after SIGKILL to the stub, too
                    wire.send(line, {"status": status})
                line.close()
                del self._workers[line]

    def _kill(self, line: socket.socket) -> None:
        pid = self._workers.pop(line)
        line.close()
        self._dying[pid] = time.monotonic() + DEATH_TIMEOUT_S
        for kill in (os.killpg, os.kill):  # a fork leads no group until it has left the zygote's
            # It has ended, and is reaped next, or is another user by now.
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, KILL)

    def _wait_s(self) -> Optional[float]:
        """Return the time to the first end that is not awaited any more; forget those before."""
        now_s = time.monotonic()
        for pid in [pid for pid, until_s in self._dying.items() if until_s <= now_s]:
            del self._dying[pid]
            sys.stderr.write(
                "muster-run: worker %d has not ended %.0f s after SIGKILL; look what its kernel "
                "waits for: the next workers start beside it\n" % (pid, DEATH_TIMEOUT_S)
            )
        return min(self._dying.values()) - now_s if self._dying else None

    def _accept(self, listening: socket.socket) -> Optional[Born]:
        line, _ = listening.accept()
        line.settimeout(RECEIVE_TIMEOUT_S)
        files: List[int] = []
        born: Optional[Born] = None
        try:
            message, files = wire.receive(line)
            if "imported" in message:
                self._learn(message["imported"])
                line.close()
                return None
            request = _request(message)
            why = _hindrance(request, message["circumstances"], files, self._environ)
            if why:
                wire.send(line, {"why": why})
                line.close()
                return None
            pid = os.fork()
            if pid == 0:
                self._leave()
                environ = changed(request.environ, self._environ, os.environ)
                born = Born(request._replace(environ=environ), files, line)
                return born
            self._workers[line] = pid
            line.settimeout(None)
        except (OSError, KeyError, TypeError, ValueError, wire.Unsaid) as error:
            sys.stderr.write("muster-run: the zygote has no use for a request: %r\n" % (error,))
            if line in self._workers:
                self._kill(line)
            else:
                line.close()
        finally:
            if born is None:
                for file in files:
                    os.close(file)
        return None

    def _leave(self) -> None:
        """Leave the zygote's files, session and signals, in a fork."""
        os.setsid()
        # Without the zygote nothing would know of a worker whose stub has ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for one in (self._listening, *self._workers):
            if one is not None:
                one.close()
        self._workers.clear()
        signal.set_wakeup_fd(-1)
        os.close(self._wake)
        os.close(self._waker)

    def _learn(self, names: object) -> None:
        known = sys.modules
        if isinstance(names, list):
            self.wanted = [name for name in names if isinstance(name, str) and name not in known]


def main(archive: str) -> None:
    """Run as the zygote, or, in a fork of it, as a worker; ``archive`` has Muster's modules."""
    state = _inherited(int(sys.argv[1]))
    python, torchrun = str(state["python"]), int(state["torchrun"])
    path = [one for one in sys.path if one not in ("", archive)]
    sys.path[:] = path  # a worker finds nothing in the folder, nor in the archive
    os.environ.pop(MARK, None)
    rename((python, NAME), os.environ)
    listening = socket.socket(fileno=int(state["listening"]))
    workers = {socket.socket(fileno=int(file)): pid for file, pid in state["workers"]}
    dying = {int(pid): float(until_s) for pid, until_s in state["dying"]}
    whole = bool(state["whole_groups"])
    zygote = Zygote(listening, workers, dying, torchrun, os.environ, whole_groups=whole)
    while True:
        try:
            preload.load([*preload.FIRST, *state["wanted"]], set(state["without"]))
        except preload.Unfit as error:
            sys.stderr.write("muster-run: the zygote does without %s\n" % error)
            if error.package in preload.NEEDED:
                return
            state["without"].append(error.package)
            zygote.begin_again(archive, state)
        born = zygote.serve()
        if born is not None:
            _live(born, python, path, str(state["socket"]))
            return
        if not zygote.wanted:
            shutil.rmtree(os.path.dirname(state["socket"]), ignore_errors=True)
            return
        state["wanted"] += zygote.wanted
        zygote.wanted = []


def _live(born: Born, python: str, path: Sequence[str], place: str) -> None:
    """Go on as a worker, to its end."""
    as_worker: Callable[[], None] = sys.__dict__.pop("muster_as_worker", _nothing)
    become(born.request, born.files, python, path)
    # Signals that its stub passes on count from here on: before, they would be the zygote's.
    with suppress(OSError):  # its stub has ended, and the zygote ends this process
        wire.send(born.line, {"pid": os.getpid()})
    born.line.close()
    sys.__dict__["muster_stub"] = born.request.stub
    sys.__dict__["muster_imported"] = _reporter(place)
    for name in [name for name in sys.modules if name.partition(".")[0] == "launcher_shim"]:
        del sys.modules[name]
    as_worker()
    await_rank_0(born.request.environ)
    run(born.request)


def _reporter(place: str) -> Callable[[], None]:
    """Return what tells the zygote which modules a worker has imported besides its own."""
    known, worker = frozenset(sys.modules), os.getpid()

    def imported() -> None:
        names = [name for name in preload.installed(sys.modules) if name not in known]
        if not names or os.getpid() != worker:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(RECEIVE_TIMEOUT_S)
                line.connect(place)
                wire.send(line, {"imported": names})
        except OSError as error:
            sys.stderr.write("muster-run: the zygote learns of no import: %s\n" % error)

    return imported


def _nothing() -> None:
    """Stand for a start-up file that an image has put before Muster's."""


def _request(message: Mapping[str, Any]) -> Birth:
    """Read a request; raises ``KeyError``, ``TypeError`` and ``ValueError``."""
    arguments = tuple(map(str, message["arguments"]))
    environ = {str(name): str(text) for name, text in message["environ"].items()}
    return Birth(arguments, environ, str(message["folder"]), int(message["stub"]))


def _hindrance(
    request: Birth, theirs: Mapping[str, str], files: Sequence[int], environ: Mapping[str, str]
) -> str:
    """Return why a worker has to start plainly; empty if it may be a fork."""
    words = [word for word in request.arguments if word != "-u"]
    if not words or (words[0].startswith("-") and words[0] != "-m") or len(files) != wire.FILES:
        return "it runs neither a script nor a module"
    if names := differences(environment(environ), environment(request.environ)):
        return "its environment differs from the zygote's in " + ", ".join(names)
    mine = circumstances()
    for name in _OWN:
        mine.pop(name, None)
    theirs = {name: text for name, text in theirs.items() if name not in _OWN}
    if names := differences(mine, theirs):
        return "it was given another %s than the zygote" % ", ".join(names)
    return ""


def _noted(_number: int, _frame: object) -> None:
    """Let the signal wake the loop."""
