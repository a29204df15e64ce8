# SPDX-License-Identifier: Apache-2.0
"""A launcher that Muster drives: its name, how its ranks are known, and what it needs in a pod.

A launcher is one folder beside this file, with a subclass, and one row in ``launchers``. What all
parts of Muster ask about it is here. It is pure, and runs in users' containers.
"""

from __future__ import annotations

import os
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple


class GivenSizes(NamedTuple):
    """Processes and slots that a command line gives; None for what it does not."""

    least: Optional[int] = None
    most: Optional[int] = None
    slots: Optional[int] = None


class LocalLine(NamedTuple):
    """A launch line of ``muster local``: the processes of each node, and their limit of restarts.

    ``script``: the file that each node needs; None for a module or another program.
    """

    slots: int = 1
    restarts: Optional[int] = None
    script: Optional[str] = None


class Launcher:
    """One launcher: torchrun's answers are the defaults of a launcher beside each pod's ranks."""

    name = ""
    """Its program, which comes first in the PATH; its name in reports and in sentences."""
    library = ""
    """The library that its ranks run on, in sentences."""
    folder = ""
    """The folder of ``launcher_shim`` that its programs need in a training container."""
    agent = ""
    """The folder of the programs that start a central launcher's workers; empty for another one."""
    program = "pod.launchers"
    """The module of ``launcher_shim`` that runs in the place of its program."""
    modules: Tuple[str, ...] = ()
    """The modules by which ``python -m`` starts it, the usual one first."""
    has_rounds = True
    """Whether it asks its pod's sidecar for rounds."""
    is_central = False
    """Whether there is one for the whole job, in a pod without slots, that reads the host list and
    starts its workers in the other pods. Its ranks are in step at their own commits: one saves for
    all."""
    prefix = "(?!)"
    """A regular expression for what a central launcher puts before a line of a worker: its group is
    the rank that the worker had when it was started. By default there is no such line."""
    paused = ""
    """The sentences on a paused job of a central launcher in the help of ``muster pause``."""
    waits_in = ""
    """A regular expression for the files in which its ranks wait for each other."""

    def found_in(self, words: Sequence[str], at: int) -> int:
        """Return the index behind the words at ``at`` that start it; 0 if they do not."""
        if os.path.basename(words[at]) == self.name:
            return at + 1
        return at + 2 if words[at] == "-m" and {*words[at + 1 : at + 2]} & {*self.modules} else 0

    def report(
        self, program: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
    ) -> Optional[Mapping[str, str]]:
        """Return the options that its sidecar checks; None if it becomes no such launcher.

        ``program``: the words that start it; ``words``: those behind.
        """
        return {}

    def found_first(
        self, command: Sequence[str], environ: Mapping[str, str]
    ) -> Tuple[List[str], Dict[str, str]]:
        """Return a container's command and variables so that Muster's program comes first."""
        return list(command), dict(environ)

    def started(
        self,
        own: str,
        words: Sequence[str],
        environ: Mapping[str, str],
        delivered: Mapping[str, str],
        run_dir: str,
    ) -> Tuple[List[str], Dict[str, str], List[str]]:
        """Return the command of the image's program at ``own``, its variables, and what to log.

        ``delivered``: by the sidecar; empty without one. Raises ``ValueError`` with one sentence.
        """
        return [own, *words], dict(environ), []

    def sizes(self, words: Sequence[str]) -> GivenSizes:
        """Parse the sizes that its arguments give."""
        return GivenSizes()

    def local(self, words: Sequence[str], environ: Mapping[str, str]) -> LocalLine:
        """Check the arguments given to ``muster local``; raises ``ValueError`` with a sentence."""
        return LocalLine()

    def started_here(
        self,
        program: Sequence[str],
        words: Sequence[str],
        environ: Mapping[str, str],
        run_dir: str,
        counts: Sequence[int],
    ) -> Tuple[List[str], Dict[str, str]]:
        """Return a central launcher's command and variables for a job on this machine alone.

        ``counts``: processes at the start, fewest and most.
        """
        return [*program, *words], dict(environ)
