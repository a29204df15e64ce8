# SPDX-License-Identifier: Apache-2.0
"""torchrun in a pod's container: the program first in the PATH, and torch's launcher in-process.

A container that is started again runs its command from the start, while the job may be stages
ahead; torch itself would end with status 1. So the sidecar is asked first. Unless it confirms, the
image's own torchrun replaces this process, without the options that the sidecar overrides. The
same holds without an answer: a torchrun started in vain ends with an error, but work skipped by
mistake would look done. ``python -m torch.distributed.run``, torchrun by its path, ``accelerate
launch`` and ``elastic_launch`` all come to one function of torch with a
configuration, which gets the same.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import signal
import socket
import struct
import sys
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import launcher_shim.tcpstore.wire as wire
from launcher_shim.exit_status import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    EXIT_USAGE,
    unblock_signals,
)
from launcher_shim.pod.delivery import OneLine, configure_log, images_own
from launcher_shim.rundir import layout
from launcher_shim.torchrun.launcher import (
    LOOPBACK,
    TELLS_ONLY,
    VARIABLES,
    bounds,
    given_options,
    keeps_flags,
    kept_line,
    read_line,
    rendezvous_port,
    starts_own_job,
)
from launcher_shim.warm import start as warm

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 600.0
"""torch's default join timeout, in seconds: a sidecar answers once it is registered, and the store
may be away, or the sidecar may be being replaced."""
ANSWER_MAX = 64
"""Maximum length of an answer in bytes; a longer one does not come from a sidecar."""

ASKED = "MUSTER_ASKED_BY"
"""Variable that a torchrun gets: the process that has asked, which it has taken the place of."""

_WHERE = ("rdzv-endpoint", "rdzv-backend", "rdzv-id", "standalone")
"""Options that decide which rendezvous a torchrun comes to."""


def main() -> int:
    """Skip the stage, or become the image's torchrun; return the exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it waits
    unblock_signals()
    configure_log("muster-run")
    arguments = sys.argv[1:]
    try:
        keeps_flags(os.environ)
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    if starts_own_job(os.environ):
        arguments, sentences = kept_line(arguments, os.environ)
        for sentence in sentences:
            log.info("%s", sentence)
    meets = meets_at(arguments, os.environ)
    if meets is not None and passes_over(*meets, digest(arguments)):
        log.info("this stage of %s has succeeded already: skipping it", meets[1])
        return 0
    own = images_own(layout.TORCHRUN, sys.argv[0], os.environ)
    if own is None:
        log.error("torchrun: not found in the PATH")
        return EXIT_NOT_FOUND
    try:
        os.execve(own, [own, *arguments], {**os.environ, ASKED: str(os.getpid())})
    except OSError as error:
        log.error("%s: %s", own, error.strerror)
        return EXIT_NOT_EXECUTABLE


def meets_at(words: Sequence[str], environ: Mapping[str, str]) -> Optional[Tuple[int, str]]:
    """Return the loopback port and run id of a torchrun that comes to the sidecar; else None.

    A torchrun without a script, or one asked for help, starts nothing, so it comes to no sidecar.
    """
    line = read_line(words)
    if line.script == () or TELLS_ONLY & {*line.values()}:
        return None
    options = given_options(words, environ, _WHERE)
    host, _, port = options.get("rdzv-endpoint", "").rpartition(":")
    run_id = options.get("rdzv-id", "")
    here = options.get("rdzv-backend") == "c10d" and host in LOOPBACK and port.isdigit()
    alone = options.get("standalone", "") not in ("", "0", "false", "False")
    return (int(port), run_id) if here and run_id and not alone else None


def digest(words: Sequence[str]) -> bytes:
    """Return a digest that tells launch lines apart without their words, which may be secret."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest().encode()


def passes_over(port: int, run_id: str, line: bytes) -> bool:
    """Ask the sidecar whether the stage is done, and wait; False if none answers that.

    Unless it confirms, the image's own torchrun replaces this process, without the options that
    the sidecar overrules.
    """
    key = wire.STAGE + run_id.encode(errors="surrogateescape")
    request = wire.encode(wire.CompareSet(key, b"", line))
    idles = False
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.sendall(wire.HANDSHAKE)
            answers = connection.makefile("rb")
            while True:
                connection.sendall(request)
                answer = _answer(answers)
                if answer != wire.AGAIN:
                    return answer == wire.PASSED
                if not idles:
                    idles = True
                    log.info(
                        "this pod is drained: torchrun waits until the run %s succeeds or the drain"
                        " is cancelled",
                        run_id,
                    )
    except socket.timeout:  # no TimeoutError before Python 3.10
        log.warning(
            "the sidecar has not answered within %g s whether this stage of %s has succeeded"
            " already: starting torchrun",
            ANSWER_TIMEOUT_S,
            run_id,
        )
    except (OSError, struct.error):  # the latter if the connection was closed
        return False
    return False


def _answer(answers: BinaryIO) -> bytes:
    (length,) = wire.U64.unpack(answers.read(wire.U64.size))
    return answers.read(min(length, ANSWER_MAX))


_ARCHIVE = __file__[: __file__.rindex(os.sep + "launcher_shim" + os.sep)]

_UNSET = ("", "none", None)
"""Defaults of torch and accelerate, which are no choice of the user's."""


def found(name: str) -> Optional[ModuleSpec]:
    """Find a launcher for import; what it launches is prepared once it is imported."""
    spec = find_spec(name)
    loader: Any = spec.loader if spec is not None else None
    if loader is None:
        return spec
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _PREPARING[name](vars(module))
        except KeyError as error:
            _complain(name, f"it has no {error}")
        except ValueError as error:
            _complain(name, str(error))

    loader.exec_module = exec_module
    return spec


def _prepare_torch(names: Dict[str, Any]) -> None:
    """Let the configurations of torch's ``launch_agent`` follow the sidecar."""
    launch_agent = names["launch_agent"]

    @wraps(launch_agent)
    def launch(config: Any, entrypoint: Any, args: Any, *more: Any, **named: Any) -> Any:
        try:
            config, passed = prepared(config, entrypoint, args)
            if not passed:
                warm.begin(entrypoint, _ARCHIVE)
        except Exception as error:  # whatever another torch may raise: training does not end by it
            _complain(launch_agent.__module__, repr(error))
            passed = False
        return {} if passed else launch_agent(config, entrypoint, args, *more, **named)

    names["launch_agent"] = launch
    if starts_own_job(os.environ) and warm.is_wanted(os.environ):
        _log_to_stderr()
        warm.offer(_ARCHIVE)


def _prepare_accelerate(names: Dict[str, Any]) -> None:
    """Let ``accelerate launch`` come to torch's launcher, where it would start one process itself.

    It does so for one GPU or for CPUs: each pod would train alone.
    """
    alone, by_torch = names["simple_launcher"], names["multi_gpu_launcher"]

    @wraps(alone)
    def launch(args: Any) -> Any:
        if not starts_own_job(os.environ) or getattr(args, "mpirun_hostfile", None):
            return alone(args)
        _log_to_stderr()
        log.info("accelerate starts its process by torch's launcher, as pods train together")
        if getattr(args, "cpu", False) or getattr(args, "use_cpu", False):
            os.environ["ACCELERATE_USE_CPU"] = "true"
        args.num_processes = max(args.num_processes or 0, args.num_machines or 1)
        return by_torch(args)

    names["simple_launcher"] = launch


_PREPARING: Dict[str, Callable[[Dict[str, Any]], None]] = {
    "torch.distributed.launcher.api": _prepare_torch,
    "accelerate.commands.launch": _prepare_accelerate,
}


def _complain(name: str, why: str) -> None:
    _log_to_stderr()
    log.warning("%s is left as it is: %s", name, why)


def prepared(config: Any, entrypoint: object, args: Sequence[object]) -> "Tuple[Any, bool]":
    """Return the configuration to launch with, and whether there is nothing to launch.

    ``config``: torch's ``LaunchConfig``, which stays as it is; the arguments are those of torch's
    ``launch_agent``. Without the delivered variables, or in a worker, nothing changes.
    """
    if not starts_own_job(os.environ):
        return config, False
    _log_to_stderr()
    changes, sentences = overruled(vars(config), os.environ, sys.argv)
    for sentence in sentences:
        log.info("%s", sentence)
    config = copy.copy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    port = rendezvous_port(os.environ)
    assert port is not None
    if os.environ.get(ASKED) == str(os.getpid()):
        return config, False  # the delivered torchrun has asked, and has become this process
    passed = passes_over(port, config.run_id, digest(_line(entrypoint, args)))
    if passed:
        log.info("this stage of %s has succeeded already: skipping it", config.run_id)
    return config, passed


def overruled(
    own: Mapping[str, Any], environ: Mapping[str, str], words: Sequence[str]
) -> "Tuple[Dict[str, Any], List[str]]":
    """Return the fields of a configuration that change, and a sentence for each that had a value.

    ``own``: the fields as they are. ``words``: the command line. Raises ``KeyError`` if a field or
    a variable is missing.

    Here that gets the rendezvous of the sidecar, and the sidecar is asked whether its stage has
    succeeded already.
    """
    sidecars = bounds(environ[VARIABLES["nnodes"]])
    if sidecars is None:
        raise ValueError(f"{VARIABLES['nnodes']} is {environ[VARIABLES['nnodes']]!r}")
    changes: Dict[str, Any] = {"min_nodes": sidecars[0], "max_nodes": sidecars[1]}
    sentences: List[str] = []
    before = (own["min_nodes"], own["max_nodes"])
    if before != sidecars:
        sentences.append("nnodes: %d:%d is overruled by %d:%d" % (*before, *sidecars))
    for field, option in (
        ("rdzv_backend", "rdzv-backend"),
        ("rdzv_endpoint", "rdzv-endpoint"),
        ("run_id", "rdzv-id"),
    ):
        changes[field] = environ[VARIABLES[option]]
        if own[field] not in (*_UNSET, changes[field]):
            sentences.append(f"{field}: {own[field]} is overruled by {changes[field]}")
    changes["rdzv_configs"], lost = _configs(
        own["rdzv_configs"], environ.get(VARIABLES["rdzv-conf"], "")
    )
    if lost:
        sentences.append(f"rdzv_configs: {lost} is overruled by {changes['rdzv_configs']}")
    if own["local_addr"] is None:
        changes["local_addr"] = environ.get(VARIABLES["local-addr"])
    restarts = environ.get(VARIABLES["max-restarts"], "")
    if own["max_restarts"] == 0 and restarts.isdecimal() and not _gives_restarts(words):
        # accelerate's default: a node that is lost would end all the others.
        changes["max_restarts"] = int(restarts)
    return changes, sentences


def _configs(own: Mapping[str, Any], delivered: str) -> "Tuple[Dict[str, Any], str]":
    """Merge the options of the rendezvous; return them, and those that are overruled."""
    ours = {key: value for key, _, value in (part.partition("=") for part in delivered.split(","))}
    ours.pop("", None)
    # The rank is what the static backend takes from its command line.
    kept = {key: value for key, value in own.items() if key != "rank"}
    lost = [f"{key}={kept[key]}" for key in ours if str(kept.get(key, ours[key])) != ours[key]]
    return {**kept, **ours}, ",".join(lost)


def _gives_restarts(words: Sequence[str]) -> bool:
    names = (word.partition("=")[0].replace("_", "-") for word in words)
    return any(len(name) > 5 and "--max-restarts".startswith(name) for name in names)


def _line(entrypoint: object, args: Sequence[object]) -> List[str]:
    """Return what is launched, as words that are the same in every pod."""
    name = getattr(entrypoint, "__qualname__", entrypoint)
    plain = [str(one) for one in args if isinstance(one, (str, int, float))]
    return [str(name), *plain]


def _log_to_stderr() -> None:
    """Send Muster's own lines to standard error; the program's logging stays as it is."""
    ours = logging.getLogger("launcher_shim")
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(OneLine("muster-run"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
