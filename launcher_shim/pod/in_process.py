# SPDX-License-Identifier: Apache-2.0
"""torch's launcher in a process that no delivered program has started.

``python -m torch.distributed.run``, torchrun by its path, ``accelerate launch`` and
``elastic_launch`` all come to one function of torch with a configuration. Here that gets the
rendezvous of the sidecar, and the sidecar is asked whether its stage has succeeded already, as in
``launcher_shim.pod.pass_over``.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from launcher_shim.pod.delivery import rendezvous_port
from launcher_shim.pod.log_lines import OneLine
from launcher_shim.pod.overruling import starts_own_job
from launcher_shim.pod.pass_over import ASKED, digest, passes_over
from launcher_shim.pod.torchrun_line import bounds
from launcher_shim.pod.torchrun_options import VARIABLES
from launcher_shim.pod.warm import start as warm

log = logging.getLogger(__name__)

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
