# SPDX-License-Identifier: Apache-2.0
"""A rank's activity, read from its main thread's stack and its process's state: pure.

The innermost call that is not of Python's own library tells whether the rank waits for others.
A save, an evaluation and a compilation are known by any of its calls: they may take minutes, and
calls of other names are within them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher_shim.rundir.rank_reports import StackFrame
from rdzv.records.progress import TEXT_MAX, Doing, StillRank

_PYTHONS = re.compile(r"/lib(64)?/python3[^/]*/(?!site-packages|dist-packages)|^<(?!stdin|string)")
"""Python's own library, of which no call says what is waited for."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")

_COLLECTIVES = re.compile(
    r"/torch/distributed/(?!checkpoint/)|/torch/nn/parallel/distributed\.py$"
    r"|/torch/autograd/(graph|__init__)\.py$|/torch/cuda/(__init__|streams)\.py$"
    r"|/horovod/[^/]+/(mpi_ops|functions)\.py$|/horovod/common/"
)
"""Places in which a rank waits for others; DistributedDataParallel does in the backward pass."""
_BACKWARD = ("_engine_run_backward", "backward")
_LOADERS = re.compile(r"/torch/utils/data/|/muster/data/")
_MUSTER = re.compile(r"/muster/[a-z_]+\.py$")
_COMPILERS = re.compile(
    r"/torch/_dynamo/convert_frame\.py$|/torch/_inductor/(compile_fx|async_compile|codecache)\.py$"
    r"|/triton/compiler/"
)
_SAVERS = re.compile(r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/safetensors/")
_SAVING = re.compile(r"(?i)(^|_)(save|saves|saving|checkpoint|ckpt)|savecheckpoint|dump_model")
_EVALUATING = re.compile(
    r"(?i)(^|_)(eval|valid|infer|predict|generate|sanity)|(^|_)test(_|$|ing)|evaluat|validat"
)


def stance(rank: int, state: str, frames: Sequence[StackFrame]) -> StillRank:
    """Return what a rank does; ``state``: its process's letter; ``frames``: the innermost first."""
    where, *via = _lines(frames) or [""]
    if state in ("T", "t"):
        return StillRank(rank, "stopped")
    if state == "X":
        return StillRank(rank, "ended")
    if not frames:
        return StillRank(rank, "unknown")
    doing = _doing(frames)
    call = _operation(frames) if doing == "collective" else ""
    return StillRank(rank, doing, call, where[:TEXT_MAX], ", ".join(via)[:TEXT_MAX])


def _doing(frames: Sequence[StackFrame]) -> Doing:
    inner = next((one for one in frames if not _PYTHONS.search(one.path)), frames[0])
    scripts = [one for one in frames if not _INSTALLED.search(one.path)]
    if any(_COMPILERS.search(one.path) for one in frames):
        return "compiles"
    if _COLLECTIVES.search(inner.path) and not _SAVERS.search(inner.path):
        return "collective"
    if any(_SAVERS.search(one.path) for one in frames) or _named(_SAVING, frames):
        return "saves"
    if _named(_EVALUATING, frames):
        return "evaluates"
    if any(_LOADERS.search(one.path) for one in frames):
        return "loader"
    if _MUSTER.search(inner.path) and inner not in scripts[-1:]:
        return "muster"
    return "script"


def _named(pattern: re.Pattern[str], frames: Sequence[StackFrame]) -> bool:
    """Return whether a function of the script, or of a trainer, has such a name."""
    return any(
        pattern.search(one.function)
        for one in frames
        if not _PYTHONS.search(one.path) and "/torch/" not in one.path
    )


def _operation(frames: Sequence[StackFrame]) -> str:
    inner = next(one for one in frames if not _PYTHONS.search(one.path))
    if inner.function in _BACKWARD:
        return "the backward pass"
    # Of the calls within the library the outermost is the one that the script has made.
    name = inner.function
    for one in frames:
        if _PYTHONS.search(one.path):
            continue
        if not _COLLECTIVES.search(one.path):
            break
        if one.function not in ("wrapper", "__torch_function__"):
            name = one.function
    return name[:TEXT_MAX]


def _lines(frames: Sequence[StackFrame]) -> list[str]:
    """Return the script's lines, the innermost first; if it has none, that of what is installed."""
    kept = [one for one in frames if not _PYTHONS.search(one.path)]
    own = [one for one in kept if not _INSTALLED.search(one.path)]
    own = [one for one in own if not _MUSTER.search(one.path)]
    return [f"{one.path.rpartition('/')[2]}:{one.line}" for one in own or kept[:1]]
