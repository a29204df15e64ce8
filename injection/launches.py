# SPDX-License-Identifier: Apache-2.0
"""The launchers that containers start, as far as their commands and their job's manifest show.

A command may be a line of shell, or several; what a script in the image starts is not known here.
The manifest says the size of a central launcher's job and the roles of its pods.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

from injection import facts
from injection.facts import listed
from injection.kinds import Kind
from injection.workloads import Role, Template, Workload
from injection.yaml_tree import value_of
from launcher_shim.launcher import GivenSizes
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.torchrun.launcher import KEEP_FLAGS, VARIABLES, kept_line, read_line
from launcher_shim.torchrun.launcher import bounds as bounds_of

TORCHRUN, ACCELERATE = "torchrun", "accelerate launch"
LIGHTNING = "Lightning's own launcher"
MODULES = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "accelerate.commands.launch": ACCELERATE,
}

OF_ACCELERATE = (
    "rdzv-backend",
    "rdzv-conf",
    "machine-rank",
    "main-process-ip",
    "main-process-port",
)
"""Options of ``accelerate launch`` about the rendezvous, but for its number of nodes."""

_KEEPS = f"{KEEP_FLAGS}=1"
_OF_LIGHTNING = frozenset({"trainer.num-nodes", "trainer.devices"})
"""Options of Lightning's command line for the ranks that its trainer starts itself."""

LINE_LENGTH = 32_768
"""Maximum length of shell that is searched for a launcher."""
WORDS_MOST, OPTIONS_MOST, LAUNCHERS_MOST = 2000, 256, 32
"""Maximum number of words of a line that are searched, of those that follow a launcher, and of
launchers: who may create a pod may write a megabyte of them."""
_NESTED = 2
"""Depth of shells within shells that are searched."""

_DELIVERED = {
    VARIABLES["rdzv-backend"]: "c10d",
    VARIABLES["rdzv-endpoint"]: "the sidecar",
    VARIABLES["rdzv-id"]: "the job",
    VARIABLES["rdzv-conf"]: "is_host=0,read_timeout=300,last_call_timeout=2,"
    "keep_alive_interval=5,keep_alive_max_attempt=1000",
}
"""The variables that the sidecar delivers, without the number of nodes."""

_OPERATORS = frozenset({"&&", "||", "|", "&", ";", "(", "{", "then", "do", "else", "!"})
_STARTERS = frozenset(
    {"exec", "env", "time", "nohup", "nice", "numactl", "stdbuf", "tini", "dumb-init", "muster-run"}
)
"""Programs and words of a shell that start another program, which follows their options."""
_REFERENCE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))", re.ASCII)
"""A variable of the container, in a shell or as the kubelet replaces it."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class FoundLauncher:
    """One launcher in a command, and the words that follow it on its line.

    ``keeps``: whether its flags are kept, and it alone. ``by_module``: whether it is started by
    ``python -m``.
    """

    launcher: str
    words: Sequence[str]
    keeps: bool = False
    by_module: bool = False

    def options(self) -> Mapping[str, str]:
        """Return the options before its script, with their values."""
        if self.launcher == TORCHRUN:
            return read_line(self.words).values()
        # Which options of another launcher take no value is not known here.
        found: dict[str, str] = {}
        for word, after in pairwise([*self._own(), ""]):
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                found[name[2:].replace("_", "-")] = value if equals else after
        return found

    def _own(self) -> Sequence[str]:
        """Return the words before its script; Lightning's launcher is within the script."""
        if self.launcher == LIGHTNING or self.script not in self.words:
            return self.words
        return self.words[: self.words.index(self.script)]

    def overridden(self) -> list[str]:
        """Return its options about the rendezvous that do not count under Muster."""
        if self.launcher == TORCHRUN:
            _, sentences = kept_line(self.words, _DELIVERED)
            return [re.split("[: ]", sentence[2:], maxsplit=1)[0] for sentence in sentences]
        return [name for name in self.options() if name in OF_ACCELERATE]

    def winning(self) -> list[str]:
        """Return the options of a torchrun that win over what Muster delivers, if they are kept."""
        kept, _ = kept_line(self.words, _DELIVERED)
        stays = read_line(kept).values()
        return [name for name, value in self.options().items() if stays.get(name) != value]

    def hidden(self) -> tuple[str, list[str]]:
        """Return a torchrun's option that is not known, and those behind it that win for that."""
        rest = read_line(self.words)
        if self.launcher != TORCHRUN or rest.whole:
            return "", []
        option, _, *behind = rest.rest
        return option, FoundLauncher(TORCHRUN, behind).winning()

    def takes_deepspeed(self) -> bool:
        """Return whether an ``accelerate launch`` starts its ranks by the deepspeed launcher."""
        given = self.options()
        several = given.get("num-machines", "1") not in ("0", "1")
        standard = given.get("deepspeed-multinode-launcher") == "standard"
        return self.launcher == ACCELERATE and "use-deepspeed" in given and several and not standard

    def is_one_process(self) -> bool:
        """Return whether an ``accelerate launch`` is for one process, as far as its line shows."""
        given = self.options()
        several = given.keys() & {"multi-gpu", "use-fsdp", "use-deepspeed", "config-file"}
        one = given.get("num-processes", "1") in ("0", "1")
        return self.launcher == ACCELERATE and not several and one

    @property
    def script(self) -> str:
        """The script that it runs, without the script's arguments: they may hold secrets."""
        return next((word for word in self.words if word.endswith(".py")), "train.py")


def found_launches(container: Mapping[str, Any]) -> list[FoundLauncher]:
    """Return the launchers that are found in a container's command."""
    found = (launch for line in _lines(container) for launch in _of_line(line))
    return list(islice(found, LAUNCHERS_MOST))


def foreign(container: Mapping[str, Any]) -> FoundLauncher | None:
    """Return the launcher in a command that makes a world of its own, whatever Muster says."""
    for line in _lines(container):
        for index in _programs(line):
            name, after = line[index].rpartition("/")[2], [*line[index + 1 : index + 3], "", ""]
            module = after[1] if name.startswith("python") and after[0] == "-m" else ""
            if "deepspeed" in (name, module.partition(".")[0]):
                return _launch("deepspeed", line, index + 1)
            if name in ("fabric", "lightning") and after[0] == "run":
                return _launch(f"{name} run", line, index + 2)
            own = _launch(LIGHTNING, line, index + 1)
            if (
                name.startswith("python")
                and module not in MODULES
                and _OF_LIGHTNING & {*own.options()}
            ):
                return own
    return None


def keeps_flags(container: Mapping[str, Any]) -> bool:
    """Return whether a container or its command asks that the flags of all launchers be kept."""
    variables = [one for one in listed(container, "env") if one.get("name") == KEEP_FLAGS]
    given = any("valueFrom" in one or one.get("value") == "1" for one in variables)
    return given or any(
        before == "export" and word.rstrip(";") == _KEEPS
        for line in _lines(container)
        for before, word in pairwise(line)
    )


def nnodes(container: Mapping[str, Any]) -> str | None:
    """Return what a container's last launch line gives as its numbers of nodes, if it does."""
    found = [
        value.rstrip(";")
        for launch in found_launches(container)
        if not launch.keeps
        for name, value in launch.options().items()
        if name in ("nnodes", "num-machines")
    ]
    return found[-1] if found else None


def bounds(container: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the fewest and the most nodes by a launch line, else by the variable of torchrun.

    None if there are none, or if only a shell knows them.
    """
    variables = {one.get("name"): str(one.get("value")) for one in listed(container, "env")}

    def value(reference: re.Match[str]) -> str:
        return variables.get(next(filter(None, reference.groups())), reference[0])

    text = nnodes(container) or variables.get(VARIABLES["nnodes"], "")
    found = bounds_of(_REFERENCE.sub(value, text))
    return found if found is not None and found[0] else None


def words_of(line: str) -> list[str]:
    """Split a line of shell into words; return none if only a shell can read it.

    Nor if it is longer than any launch line: a pod may have a megabyte of it.
    """
    if len(line) > LINE_LENGTH:
        return []
    try:
        return shlex.split(line)
    except ValueError:
        return []


def _of_line(line: Sequence[str]) -> Iterator[FoundLauncher]:
    for index, word in enumerate(line):
        name, after = word.rpartition("/")[2], line[index + 1 : index + 2]
        if name in (TORCHRUN, CENTRAL.name):
            yield _launch(name, line, index + 1)
        elif word == "-m" and after and after[0] in MODULES:
            found = _launch(MODULES[after[0]], line, index + 2)
            yield replace(found, by_module=True)
        elif name == "accelerate-launch":
            yield _launch(ACCELERATE, line, index + 1)
        elif name == "accelerate" and after == ["launch"]:
            yield _launch(ACCELERATE, line, index + 2)


def _launch(launcher: str, line: Sequence[str], index: int) -> FoundLauncher:
    """Return the launcher whose own words begin at ``index``."""
    first = index
    while first and line[first - 1] not in _OPERATORS and not line[first - 1].endswith(";"):
        first -= 1
    words = line[index : index + OPTIONS_MOST]
    return FoundLauncher(launcher, words, keeps=_KEEPS in line[first:index])


def _lines(container: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Return a container's command, and each line of shell that may be in it, as words."""
    return _split(tuple(facts.words_of(container)[:WORDS_MOST]))


@lru_cache(maxsize=16)
def _split(words: tuple[str, ...]) -> Sequence[Sequence[str]]:
    texts, left = [], LINE_LENGTH
    for word in words:
        left -= len(word)
        if left >= 0 and " " in word.strip():
            texts.append(word)
    return [list(words), *_shell(texts, _NESTED)]


def _shell(texts: Sequence[str], depth: int) -> Iterator[list[str]]:
    for text in texts:
        for row in text.replace("\\\n", " ").splitlines():
            line = words_of(row) or [part.strip("'\"") for part in row.split()]
            yield line[:WORDS_MOST]
            if depth and len(line) > 1:
                yield from _shell([word for word in line if " " in word.strip()], depth - 1)


def _programs(line: Sequence[str]) -> Iterator[int]:
    """Yield the index of every word that is started as a program, by a shell or by another one."""
    starts = True
    for index, word in enumerate(line):
        if word in _OPERATORS:
            starts = True
        elif starts and not (
            word.startswith("-") or _ASSIGNMENT.match(word) or word.rpartition("/")[2] in _STARTERS
        ):
            yield index
            starts = False
        if word.endswith(";"):
            starts = True


_OF_MPI = ("mpirun", "mpiexec", "orterun")
_ACTIVATES = ("activate", "activate.sh")
TUNNEL_PORT = 9401


def role_of(workload: Workload, template: Template, told: str | None) -> Role | None:
    """Return a pod's role beside a central launcher; None if it has nothing to do with one."""
    if (workload.known or Kind(())).launcher is not None:
        return template.role
    return None if told is None else "launcher" if told == "launcher" else "worker"


def line_of_job(workload: Workload, container: Mapping[str, Any]) -> GivenSizes:
    """Read the sizes that the object's central launcher, or a command without one, is given."""
    for one in of_launcher(workload, container):
        for line in _command_lines(one):
            for index, word in enumerate(line):
                if word.rpartition("/")[2] == CENTRAL.name:
                    return CENTRAL.sizes(line[index + 1 :])
    return GivenSizes()


def of_launcher(workload: Workload, container: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the containers of the object's launcher; of an object without one this container."""
    kind = workload.known or Kind(())
    containers = [container]
    if kind.launcher is not None:
        for template in workload.templates_at(kind.launcher):
            pod = (value_of(template.node) or {}).get("spec") or {}
            containers = [c for c in facts.listed(pod, "containers") if isinstance(c, Mapping)]
    return containers


def starts_mpi(container: Mapping[str, Any]) -> str | None:
    """Return the MPI program in a command that has no central launcher; None without one."""
    found = [word.rpartition("/")[2] for line in _command_lines(container) for word in line]
    return None if CENTRAL.name in found else next((one for one in found if one in _OF_MPI), None)


def goes_past(container: Mapping[str, Any], ours: str) -> str | None:
    """Return the word of a shell line that leads to a central launcher but ``ours``, or None.

    That is its path, or the activation of an environment before it.
    """
    for line in _command_lines(container)[1:]:
        activated = None
        for word in line:
            folder, _, name = word.rstrip(";").rpartition("/")
            if name in _ACTIVATES:
                activated = activated or word
            if name == CENTRAL.name and word != ours and (folder or activated):
                return word if folder else activated
    return None


def _command_lines(container: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Return a container's command, and each line of shell that may be in it, as words."""
    words = facts.words_of(container)
    return (words, *(words_of(word) for word in words if " " in word.strip()))
