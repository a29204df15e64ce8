# SPDX-License-Identifier: Apache-2.0
"""The worker that a fork of the zygote becomes, as ``python SCRIPT`` would be, and its imports.

Two kinds of modules are not imported in a zygote: those that start threads, which a fork does not
have, and those that read a variable of the round, such as ``RANK``, which the zygote does not have
yet. An import cannot be undone: a zygote that finds one starts once more without it.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
import types
from contextlib import suppress
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from launcher_shim.warm.wire import OF_A_ROUND, is_of_a_round

KEPT_BY_KERNEL = frozenset({signal.SIGKILL, signal.SIGSTOP})

RANK_0_WAIT_S = 0.5
"""Maximum wait for rank 0 to listen. torch waits as long on average before it tries again, and a
script that loads much before it joins the others loses no more than this."""
RANK_0_LOOK_S = 0.005


class Birth(NamedTuple):
    """One worker: the words after the interpreter, its variables, its folder, and its stub."""

    arguments: Tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    stub: int


def become(request: Birth, files: Sequence[int], python: str, path: Sequence[str]) -> None:
    """Make this process what Python is before it runs a script. ``path``: the zygote's own."""
    _reset_signals()
    for target, file in enumerate(files):
        os.dup2(file, target, inheritable=True)
    for file in files:
        if file > 2:
            os.close(file)
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.folder)
    rename((python, *request.arguments), request.environ)
    sys.path[:] = path
    sys.orig_argv = [python, *request.arguments]
    atexit.register(_last)
    # Or each fork would have the same numbers.
    numpy_s: Any = sys.modules.get("numpy.random")  # imported by its first use alone
    torch_s: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    for numbers in filter(None, (numpy_s, torch_s)):
        numbers.seed()


_failed = False
"""Whether an exception ends the script."""


def _last() -> None:
    """End the process, after all other exit handlers.

    After an exception nothing is torn down: with torch that takes a fork 0.6 s of CPU, and until
    torchrun sees the end, a world that has lost a node waits for it.
    """
    if _failed:
        with suppress(OSError, ValueError):  # closed, or full: Python has a status for that
            for file in (sys.stdout, sys.stderr):
                if file is not None:
                    file.flush()
            os._exit(1)
    # Frozen objects would be left at the end, and some libraries complain of that.
    gc.unfreeze()


def _reset_signals() -> None:
    for number in signal.valid_signals() - KEPT_BY_KERNEL:
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def rename(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Show these words and variables in ``/proc/PID/cmdline`` and ``environ``, as far as they fit.

    Tools find a worker by them, and so does Muster: which world it belongs to.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first_word, after_words, first_variable, after_variables = map(int, fields[45:49])
    _write(first_word, after_words, words)
    pairs = sorted(environ.items(), key=lambda pair: not is_of_a_round(pair[0]))
    _write(first_variable, after_variables, ["=".join(pair) for pair in pairs])


def _write(begin: int, end: int, texts: Sequence[str]) -> None:
    if not 0 < begin < end:
        return  # the kernel hides it
    text = b"".join(os.fsencode(one) + b"\0" for one in texts)
    room = end - begin
    if len(text) > room:
        text = text[: text.rfind(b"\0", 0, room) + 1]
    ctypes.memmove(begin, text.ljust(room, b"\0"), room)


def await_rank_0(
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until rank 0 listens, unless this is rank 0; give up after ``RANK_0_WAIT_S``.

    Warm ranks start within milliseconds of each other, and torch's client sleeps for a quarter of a
    second or more where nobody listens yet.
    """
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if environ.get("RANK", "0") == "0" or not (address and port):
        return
    try:
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=numeric)
    except (OSError, UnicodeError):
        return  # a name: to look it up may take longer than the wait
    family, kind, number, _, target = found[0]
    until_s = clock() + RANK_0_WAIT_S
    while clock() < until_s:
        with socket.socket(family, kind, number) as line:
            line.settimeout(RANK_0_WAIT_S)
            try:
                line.bind(("", 0))
                # From that very port it would connect to itself, and rank 0 could not listen.
                if line.getsockname()[1] != target[1]:
                    line.connect(target)
                    return
            except ConnectionRefusedError:
                pass
            except OSError:
                return  # no way there: torch says so
        sleep(RANK_0_LOOK_S)


def run(request: Birth) -> None:
    """Run the script, as Python does; returns at its end, or raises what ends the process."""
    arguments = list(request.arguments)
    while arguments and arguments[0] == "-u":
        arguments.pop(0)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    safe = getattr(sys.flags, "safe_path", False)
    if arguments[0] == "-m":
        import runpy

        sys.argv = arguments[1:]
        if not safe:
            sys.path.insert(0, os.getcwd())
        module: Callable[..., None] = runpy._run_module_as_main  # type: ignore[attr-defined]
        _calling(lambda: module(arguments[1], alter_argv=True))
        return
    sys.argv = arguments
    script = arguments[0]
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    _calling(lambda: exec(_compiled(script, main.__dict__), main.__dict__))


def _compiled(script: str, names: Dict[str, Any]) -> types.CodeType:
    from importlib.machinery import SourceFileLoader

    names["__file__"] = os.path.abspath(script) if sys.version_info >= (3, 9) else script
    names["__cached__"] = None
    names["__loader__"] = SourceFileLoader("__main__", script)
    try:
        with open(script, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            "%s: can't open file %r: [Errno %d] %s\n"
            % (sys.orig_argv[0], names["__file__"], error.errno or 0, error.strerror)
        )
        raise SystemExit(2) from None
    code: types.CodeType = compile(source, script, "exec", dont_inherit=True)
    return code


def _calling(run_it: Callable[[], None]) -> None:
    """Run it; an exception is printed without the frames of this module, and ends the process."""
    global _failed
    try:
        run_it()
    except SystemExit:
        raise
    except BaseException as error:
        _failed = isinstance(error, Exception)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()
        sys.excepthook = _silent
        raise


def _silent(*_: Any) -> None:
    """Stand for the hook that has printed the exception already."""


FIRST = ("numpy", "torch", "torch.distributed")
"""The first imports: the threads that numpy's mathematics starts survive a fork."""
MAY_START_THREADS = frozenset({"numpy"})
NEEDED = frozenset({"torch"})
"""Without these there is nothing to gain."""
INSTALLED = ("site-packages", "dist-packages")


class Unfit(Exception):
    """A module that must not be imported before a fork; ``package`` is what to do without.

    Two kinds do not: modules that start threads, which a fork does not have, and modules that
    read a variable of the round, such as ``RANK``, which the zygote does not have yet.
    """

    def __init__(self, package: str, why: str) -> None:
        super().__init__(f"{package} {why}")
        self.package = package


_read: Set[str] = set()


def _watching(plain: type) -> type:
    """Return the class of an environment that notes which variables of the round are read."""

    class WatchedEnvironment(plain):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            self._note(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            self._note(str(name))
            return bool(super().__contains__(name))

        def _note(self, name: str) -> None:
            # A pod's own NCCL_ or GLOO_ variable is known here; a copy of all reads it, too.
            known = name not in OF_A_ROUND and self.encodekey(name) in self._data
            if is_of_a_round(name) and not known:
                _read.add(name)

    return WatchedEnvironment


def load(names: Sequence[str], without: Set[str]) -> None:
    """Import modules, in this order; raises ``Unfit`` with the first that may not be.

    A module that cannot be imported is left to the worker, which has the traceback then.
    """
    kind = type(os.environ)
    os.environ.__class__ = _watching(kind)
    try:
        for name in names:
            package = _package(name)
            if package in without or name in sys.modules:
                continue
            threads = _threads()
            _read.clear()
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                sys.stderr.write("muster-run: the zygote does not import %s: %r\n" % (name, error))
            if _read:
                raise Unfit(package, "reads %s as it is imported" % ", ".join(sorted(_read)))
            if _threads() > threads and package not in MAY_START_THREADS:
                raise Unfit(package, "starts a thread as it is imported")
            if _has_device():
                raise Unfit(package, "initialises a device as it is imported")
    finally:
        os.environ.__class__ = kind
    gc.collect()
    gc.freeze()


def _package(name: str) -> str:
    """Return what is left out if the module is unfit: its package, or that part of a needed one."""
    first, *more = name.split(".")
    return f"{first}.{more[0]}" if first in NEEDED and more and name not in FIRST else first


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_device() -> bool:
    cuda: Any = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def installed(modules: Mapping[str, Any]) -> List[str]:
    """Return the modules of installed packages, in the order of their import: pure.

    Modules of the user's own folders may change between two starts; they are none of them.
    """
    return list(_installed(modules))


def _installed(modules: Mapping[str, Any]) -> Iterator[str]:
    for name, module in list(modules.items()):
        spec: Optional[Any] = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        parts = origin.split(os.sep) if isinstance(origin, str) else []
        if any(one in parts for one in INSTALLED) and getattr(spec, "name", "") == name:
            yield name
