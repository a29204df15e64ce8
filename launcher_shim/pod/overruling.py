# SPDX-License-Identifier: Apache-2.0
"""The options of torchrun if the container's own and the sidecar's differ.

They are variables, or words of its command line. The sidecar's win: with any other endpoint, id or
bounds the pod would not train with the others. But the container's own restart budget counts, and
rendezvous options that the sidecar does not set are kept.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from launcher_shim.pod.delivery import rendezvous_port
from launcher_shim.pod.torchrun_line import Given, bounds, read_line
from launcher_shim.pod.torchrun_options import VARIABLES

RESTARTS = "PET_MAX_RESTARTS"
OPTIONS = "PET_RDZV_CONF"
RUN_DIR = "MUSTER_RUN_DIR"
"""A difference in it is not reported: the two containers may have it under different paths."""
STANDALONE = VARIABLES["standalone"]
KEEP_FLAGS = "MUSTER_KEEP_FLAGS"

NESTED = ("TORCHELASTIC_RUN_ID", "HOROVOD_RANK")
"""Variables that only a worker has: a launcher below it is its own affair. Operators give ``RANK``
and ``MASTER_ADDR`` to whole pods, so these say nothing."""
TELLS_ONLY = frozenset({"help", "print-completion"})
"""Options with which torchrun prints something and starts nothing."""

_OVERRULED = ("nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
_LEFT_OUT = {
    "node-rank": "the rendezvous gives each node its rank",
    "master-addr": "each world has a master of its own",
    "master-port": "each world has a master of its own",
    "standalone": "this pod trains with the others of its job",
}


def keeps_flags(environ: Mapping[str, str]) -> bool:
    """Read whether a launcher keeps options of its own; raises ``ValueError`` with one sentence."""
    text = environ.get(KEEP_FLAGS, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"{KEEP_FLAGS} is {text!r}: give 1 to keep torchrun's own options, or 0")
    return text == "1"


def starts_own_job(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher with this environment is to train as its sidecar says.

    It is if it is the container's own, below ``muster-run``, and not a worker's.
    """
    return (
        environ.get(VARIABLES["rdzv-backend"]) == "c10d"
        and rendezvous_port(environ) is not None
        and bool(environ.get(VARIABLES["rdzv-id"]))
        and not any(name in environ for name in NESTED)
        and environ.get(KEEP_FLAGS, "").strip() != "1"
    )


def kept_line(words: Sequence[str], environ: Mapping[str, str]) -> "Tuple[List[str], List[str]]":
    """Return torchrun's arguments without those that are overruled, and a sentence for each.

    ``environ``: its environment, with the sidecar's variables.
    """
    line = read_line(words)
    if line.script == () or TELLS_ONLY & {*line.values()}:
        return list(words), []
    kept: List[str] = []
    sentences: List[str] = []
    for given in line.options:
        stays, sentence = _kept_option(given, environ)
        kept += stays
        if sentence:
            sentences.append(f"--{given.name}{sentence}")
    return [*kept, *line.rest], sentences


def _kept_option(given: Given, environ: Mapping[str, str]) -> "Tuple[Sequence[str], str]":
    """Return the words that stay of an option, and the end of the sentence on what does not."""
    name, value = given.name, given.value
    if name in _LEFT_OUT:
        shown = "" if name == "standalone" else f": {value}"
        return (), f"{shown} is left out, as {_LEFT_OUT[name]}"
    delivered = environ.get(VARIABLES.get(name, ""))
    if name in _OVERRULED and delivered is not None:
        same = value == delivered or (name == "nnodes" and bounds(value) == bounds(delivered))
        return (), "" if same else f": {value or 'nothing'} is overruled by {delivered}"
    if name == "rdzv-conf" and delivered is not None:
        options, lost = _with_foreign_options(value, delivered)
        return (f"--{name}={options}",), f": {lost} is overruled by {options}" if lost else ""
    return given.words, ""


def merged(
    own: Mapping[str, str], delivered: Mapping[str, str]
) -> "Tuple[Dict[str, str], List[str]]":
    """Return the delivered variables as merged, and a sentence for each value that is overruled.

    Raises ``ValueError`` as ``keeps_flags`` does.
    """
    result: Dict[str, str] = {}
    overruled: List[str] = []
    for name, text in delivered.items():
        before = own.get(name, text)
        if name == RESTARTS:
            result[name], lost = before if before.strip() else text, ""
        elif name == OPTIONS:
            result[name], lost = _with_foreign_options(before, text)
        else:
            result[name], lost = text, before if before != text and name != RUN_DIR else ""
        if lost:
            overruled.append("%s: %s is overruled by %s" % (name, lost, result[name]))
    if own.get(STANDALONE, "0") != "0" and not keeps_flags(own):
        result[STANDALONE] = "0"
        overruled.append(f"{STANDALONE} is overruled, as {_LEFT_OUT['standalone']}")
    return result, overruled


def _with_foreign_options(own: str, delivered: str) -> "Tuple[str, str]":
    """Merge the options; return them, and the parts of the container's that are left out."""
    ours = dict(_option(part) for part in delivered.split(","))
    foreign: Dict[str, str] = {}
    lost: List[str] = []
    for part in filter(None, (part.strip() for part in own.split(","))):
        key, value = _option(part)
        if not key or not value or ours.get(key, value) != value:
            lost.append(part)  # torchrun takes no key without a value
        elif key not in ours:
            foreign[key] = value
    options = ["%s=%s" % pair for pair in {**ours, **foreign}.items()]
    return ",".join(options), ",".join(lost)


def _option(text: str) -> "Tuple[str, str]":
    key, _, value = text.partition("=")
    return key.strip(), value.strip()
