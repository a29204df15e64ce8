# SPDX-License-Identifier: Apache-2.0
"""torchrun, one beside each pod's ranks: its options, and how Muster drives it by them.

Options are read here, and only here, as torchrun reads them: variables, or words of its command
line. The sidecar's override the container's own: with any other endpoint, id or bounds the pod
would not train with the others. But the container's own restart budget counts, and rendezvous
options that the sidecar does not set are kept.
"""

from __future__ import annotations

import os
import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from launcher_shim.launcher import Launcher, LocalLine

LOOPBACK = ("localhost", "127.0.0.1")

_REPORTED = ("nnodes", "rdzv-endpoint", "rdzv-backend", "standalone")
"""Options of torchrun that the report contains."""
_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")


class Option(NamedTuple):
    """One option. A switch takes no value; ``short`` is its one-letter form, if it has one."""

    name: str
    switch: bool = False
    short: str = ""

    @property
    def variable(self) -> str:
        """The environment variable from which torchrun takes its default."""
        return "PET_" + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("nnodes"),
    Option("nproc-per-node"),
    Option("rdzv-endpoint"),
    Option("rdzv-backend"),
    Option("rdzv-id"),
    Option("rdzv-conf"),
    Option("node-rank"),
    Option("master-addr"),
    Option("master-port"),
    Option("local-addr"),
    Option("standalone", switch=True),
    Option("max-restarts"),
    Option("monitor-interval"),
    Option("start-method"),
    Option("role"),
    Option("log-dir"),
    Option("redirects", short="r"),
    Option("tee", short="t"),
    Option("log-line-prefix-template"),
    Option("local-ranks-filter"),
    Option("duplicate-stdout-filters"),
    Option("duplicate-stderr-filters"),
    Option("logs-specs"),
    Option("numa-binding"),
    Option("signals-to-handle"),
    Option("event-log-handler"),
    Option("shutdown-timeout"),
    Option("print-completion"),
    Option("module", switch=True, short="m"),
    Option("no-python", switch=True),
    Option("run-path", switch=True),
    Option("virtual-local-rank", switch=True),
    Option("help", switch=True, short="h"),
)

VARIABLES = {option.name: option.variable for option in OPTIONS}


_LONG = {option.name: option for option in OPTIONS}
_SHORT = {option.short: option for option in OPTIONS if option.short}
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""torchrun takes it for a value, or for the script."""


class Given(NamedTuple):
    """One option of a line: its full name, its value, and its words as they were.

    The value of a switch is "1"; without one it is empty. The name of an unknown option begins with
    its dashes.
    """

    name: str
    value: str
    words: Tuple[str, ...]


class TorchrunLine(NamedTuple):
    """A line: the options before the script, and the words from there on.

    ``-`` and ``_`` are the same in names, and a unique prefix stands for the whole name. A
    torch that is newer than the table of options may know others. Such an option without ``=``
    is a switch, or it takes the next word, which might also be the script: the line is not read
    from there on.
    """

    options: Tuple[Given, ...]
    rest: Tuple[str, ...]
    whole: bool = True
    """Whether all options were read."""

    @property
    def script(self) -> Optional[Tuple[str, ...]]:
        """The script with its own arguments; None if an unknown option hides it."""
        if not self.whole:
            return None
        return self.rest[1:] if self.rest[:1] == ("--",) else self.rest

    def values(self) -> Dict[str, str]:
        """Return the value of each option by its name: the last one counts."""
        return {given.name: given.value for given in self.options}

    def words(self) -> List[str]:
        """Return the words of the line."""
        return [word for given in self.options for word in given.words] + [*self.rest]


def read_line(words: Sequence[str]) -> TorchrunLine:
    """Read torchrun's arguments."""
    options: List[Given] = []
    rest = list(words)
    while rest and _is_option(rest[0]):
        given = _first(rest)
        if given is None:
            return TorchrunLine(tuple(options), tuple(rest), whole=False)
        options.append(given)
        del rest[: len(given.words)]
    return TorchrunLine(tuple(options), tuple(rest))


def bounds(nnodes: str) -> Optional[Tuple[int, int]]:
    """Parse ``MIN:MAX`` or ``N`` as torchrun does; return None for what it would refuse."""
    least, colon, most = nnodes.partition(":")
    if not (least.isdecimal() and (most if colon else least).isdecimal()):
        return None
    return int(least), int(most or least)


def _is_option(word: str) -> bool:
    if not word.startswith("-") or word in ("-", "--") or _NUMBER.fullmatch(word):
        return False
    return " " not in word or _named(word)[0] is not None


def _first(words: Sequence[str]) -> Optional[Given]:
    """Read the option that ``words`` begin with; None if its end is unknown."""
    option, value = _named(words[0])
    plain = len(words) > 1 and not _is_option(words[1]) and words[1] != "--"
    if option is None:
        name, _, text = words[0].partition("=")
        return None if plain and value is None else Given(name, text, (words[0],))
    if option.switch:
        return Given(option.name, "1", (words[0],))
    if value is None and plain:
        return Given(option.name, words[1], (words[0], words[1]))
    return Given(option.name, value or "", (words[0],))


def _named(word: str) -> "Tuple[Optional[Option], Optional[str]]":
    """Return the option that a word names, and the value in the same word; None for what is not."""
    if not word.startswith("--"):
        option = _SHORT.get(word[1:2])
        text: Optional[str] = word[2:].partition("=")[2] if word[2:3] == "=" else word[2:] or None
        if option is not None and (text is None or not option.switch):
            return option, text
        return None, text if "=" in word else None
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    found = [_LONG[name]] if name in _LONG else []
    found = found or [option for option in OPTIONS if option.name.startswith(name)]
    return found[0] if len(found) == 1 else None, value if equals else None


RESTARTS = "PET_MAX_RESTARTS"
RENDEZVOUS_OPTIONS = "PET_RDZV_CONF"
RUN_DIR = "MUSTER_RUN_DIR"
"""A difference in it is not reported: the two containers may have it under different paths."""
STANDALONE = VARIABLES["standalone"]
KEEP_FLAGS = "MUSTER_KEEP_FLAGS"

NESTED = ("TORCHELASTIC_RUN_ID", "HOROVOD_RANK")
"""Variables that only a worker has: a launcher below it is its own affair. Operators give ``RANK``
and ``MASTER_ADDR`` to whole pods, so these say nothing."""
TELLS_ONLY = frozenset({"help", "print-completion"})
"""Options with which torchrun prints something and starts nothing."""

_OVERRIDDEN = ("nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
_LEFT_OUT = {
    "node-rank": "the rendezvous gives each node its rank",
    "master-addr": "each world has a master of its own",
    "master-port": "each world has a master of its own",
    "standalone": "this pod trains with the others of its job",
}

_REFUSED_HERE = {
    "nnodes": "the number of nodes is set by --min and --max of muster local",
    "standalone": "it trains on one node alone; leave it out, and each node has its own torchrun",
    "node-rank": "ranks come from the rendezvous and change with the membership; leave it out",
    "master-addr": "each round has its own master, chosen by the rendezvous; leave it out",
    "master-port": "each round has its own master, chosen by the rendezvous; leave it out",
    "rdzv-id": "the run is named by --job of muster local",
    "rdzv-backend": "the sidecar beside each torchrun serves the rendezvous; leave it out",
    "rdzv-endpoint": "the sidecar beside each torchrun serves the rendezvous; leave it out",
    "rdzv-conf": "the sidecar delivers torchrun's rendezvous settings; leave it out",
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


def rendezvous_port(delivered: Mapping[str, str]) -> Optional[int]:
    """Return the loopback port that torchrun has to connect to, or None."""
    host, _, port = delivered.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    return int(port) if host in LOOPBACK and port.isdigit() else None


def given_options(
    words: Sequence[str], environ: Mapping[str, str], wanted: Sequence[str]
) -> Dict[str, str]:
    """Return the ``wanted`` options of torchrun, from its arguments or else from variables."""
    options = {name: environ[VARIABLES[name]] for name in wanted if VARIABLES[name] in environ}
    options.update(
        (name, value) for name, value in read_line(words).values().items() if name in wanted
    )
    return options


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
    if name in _OVERRIDDEN and delivered is not None:
        same = value == delivered or (name == "nnodes" and bounds(value) == bounds(delivered))
        return (), "" if same else f": {value or 'nothing'} is overruled by {delivered}"
    if name == "rdzv-conf" and delivered is not None:
        options, lost = _with_foreign_options(value, delivered)
        return (f"--{name}={options}",), f": {lost} is overruled by {options}" if lost else ""
    return given.words, ""


def override(
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
        elif name == RENDEZVOUS_OPTIONS:
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


class TorchrunLauncher(Launcher):
    """torchrun, and accelerate's launcher where torchrun is what it becomes."""

    name = "torchrun"
    library = "torch"
    folder = "torchrun"
    program = "pod.torchrun"
    modules = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
    waits_in = (
        r"/torch/distributed/(?!checkpoint/)|/torch/nn/parallel/distributed\.py$"
        r"|/torch/autograd/(graph|__init__)\.py$|/torch/cuda/(__init__|streams)\.py$"
    )

    def found_in(self, words: Sequence[str], at: int) -> int:
        """See ``Launcher``."""
        name = os.path.basename(words[at])
        if name == "accelerate-launch" or (name, *words[at + 1 : at + 2]) == (
            "accelerate",
            "launch",
        ):
            return at + 1
        return super().found_in(words, at)

    def report(
        self, program: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
    ) -> Optional[Mapping[str, str]]:
        """See ``Launcher``."""
        if starts_own_job(environ):
            words = ()  # whatever it was given is overruled
        elif os.path.basename(program[-1]) in _ACCELERATE:
            return None
        return given_options(words, environ, _REPORTED)

    def local(self, words: Sequence[str], environ: Mapping[str, str]) -> LocalLine:
        """See ``Launcher``: its variables count where its arguments do not say."""
        line = read_line(words)
        options = line.values()
        for name in options:
            if name in _REFUSED_HERE:
                raise ValueError(
                    f"torchrun's --{name} cannot be given here: {_REFUSED_HERE[name]}; see"
                    " docs/local.md#what-happens-to-nodes"
                )
        shown, slots = "--nproc-per-node", options.get("nproc-per-node")
        if slots is None:
            shown = VARIABLES["nproc-per-node"]
            slots = environ.get(shown, "1")
        if not re.fullmatch(r"[1-9]\d*", slots):
            raise ValueError(
                f"{shown}={slots}: give a number, because the sidecar registers that many slots"
            )
        if line.script == ():
            raise ValueError("no training script: say which, as in -- torchrun train.py")
        limit = options.get("max-restarts", environ.get(RESTARTS, ""))
        is_file = line.script is not None and not options.keys() & {"module", "no-python"}
        script = line.script[0] if line.script and is_file else None
        return LocalLine(int(slots), int(limit) if re.fullmatch(r"\d+", limit) else None, script)


TORCHRUN = TorchrunLauncher()
