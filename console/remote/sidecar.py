# SPDX-License-Identifier: Apache-2.0
"""Commands in a sidecar of a job, next to its store's settings, and their output on a terminal.

A command is asked once, or followed. What comes back is bounded, whoever writes it: a pod may have
anything in the place of its sidecar, and a sidecar may hang with its store.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from console.job.changing import ASKED_BY, requester
from console.job.rows import UNREADABLE, StatusObject
from console.remote.pods import FORBIDDEN, JobPod, forbidden
from console.styling import TERMINAL, columns_of, is_styled
from controller.cluster.api import NOT_FOUND, ClusterApi
from controller.cluster.executed import KEPT_MOST, Ran, Wrote
from rdzv.errors import ClusterError, ClusterRefused, ClusterUnavailable

SHELL = (
    'while [ "$1" != -- ]; do export "$1"; shift; done; shift; '
    "exec 3<&0 </dev/null; { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; "
    'muster "$@" 3<&- & p=$!; '
    "{ read -r _; kill $p; } <&3 >/dev/null 2>&1 & w=$!; "
    "exec 3<&-; wait $p; s=$?; { kill $w; wait $w; } 2>/dev/null; exit $s"
)
"""Variables, ``--``, and the words of the command are its arguments.

If the container runs out of memory, the kernel ends the command, and never the sidecar. Its stdin
is open for as long as somebody is connected: the command ends with it. A container's runtime does
not end a command whose connection is gone. The shell waits for both children: the first process of
the container is the sidecar, which reaps none.
"""

WITHOUT_ANSWER_MOST = 3
"""The most pods that are tried: more would keep the user waiting for one outage."""

LINE_MAX = 2**20
"""The longest line that is read, in characters: the state of a job of 2,000 pods."""

AGAIN_S = 2.0
AGAIN_MOST_S = 10.0
"""Pause before a sidecar is asked again. It doubles up to the second while those that run
say nothing."""

SILENCE_S = 120.0
"""Time without a line after which a sidecar is asked again: a new command says the present state,
or why it cannot."""

ERR_MAX = 4096
"""Length of the beginning of stderr that is kept, in characters."""

PRINTED_MOST = 10_000
"""The lines of a history to know again: more than a store keeps of one job."""

TAIL = 4096
"""Length of the end of stderr that is kept, to see why a command failed, in characters."""

_SEQUENCE = re.compile(r"\x1b\[(?:[0-9;]{0,32}[A-HJKm]|\?(?:25|1049)[hl])")
"""The sequences that Muster itself prints: colours, moves of the cursor, the screen of a table."""
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]{0,32})?\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


async def ask(
    api: ClusterApi,
    pods: Sequence[JobPod],
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    wrote: Wrote | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``muster ARGV`` in a sidecar of the job; in the next pod's if one does not answer.

    ``pods``: the job's. ``environ``: more variables. Once a pod's output has gone to ``wrote``, no
    other pod is tried.
    Raises ``ClusterUnavailable`` if no sidecar can be asked, and ``ClusterRefused`` as ``run_in``.
    """
    asked = able(pods)
    if not asked:
        raise ClusterUnavailable(f"no pod has a running sidecar that could be asked{_why(pods)}")
    began = False

    def heard(is_stderr: bool, text: str) -> None:
        nonlocal began
        began = True
        assert wrote is not None
        wrote(is_stderr, text)

    failures: list[str] = []
    for pod in asked:
        try:
            return await ask_one(
                api,
                pod,
                argv,
                timeout_s=timeout_s,
                wrote=heard if wrote else None,
                environ=environ,
            )
        except ClusterUnavailable as error:
            if began:
                raise
            failures.append(str(error))
    raise ClusterUnavailable(f"no sidecar of the job answers: {failures[-1]}")


async def ask_one(
    api: ClusterApi,
    pod: JobPod,
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    wrote: Wrote | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``muster ARGV`` in the sidecar of one pod, with more variables.

    It ends there if the caller is cancelled or ends.
    Raises ``ClusterUnavailable`` if it gives no answer, and ``ClusterRefused`` as ``run_in``.
    """
    variables = [f"{name}={value}" for name, value in (environ or {}).items()]
    words = ["sh", "-c", SHELL, "muster", *variables, "--", *argv]
    try:
        return await api.run_in(
            pod.namespace, pod.name, pod.sidecar, words, timeout_s=timeout_s, wrote=wrote, held=True
        )
    except ClusterRefused as error:
        if error.status != NOT_FOUND:
            raise
        raise ClusterUnavailable(f"pod {pod.name} is gone") from error


def able(pods: Sequence[JobPod], *, last: str = "") -> list[JobPod]:
    """Return the pods whose sidecars can be asked, the best first; a few, of many.

    ``last``: the name of a pod that is about to go.
    """
    runs = [one for one in pods if one.sidecar_runs]
    order = sorted(runs, key=lambda pod: (pod.deleting, pod.name == last, not pod.ready))
    return order[:WITHOUT_ANSWER_MOST]


def _why(pods: Sequence[JobPod]) -> str:
    """Return what is known of why, for the end of a sentence."""
    if not pods:
        return ": the job has no pods"
    waiting = next((f": {one.name}: {one.why_pending}" for one in pods if one.why_pending), "")
    return waiting or f": {', '.join(f'{one.name} ({one.phase})' for one in pods[:3])}"


class Lines:
    """The whole lines of a text that comes in pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def take(self, text: str) -> list[str]:
        """Return the lines that ``text`` completes; raises ``ValueError`` for one too long."""
        first, *others = text.split("\n")
        self._pieces.append(first)
        self._size += len(first)
        lines: list[str] = []
        if others and self._size <= LINE_MAX:
            *lines, rest = ["".join(self._pieces), *others]
            self._pieces, self._size = [rest], len(rest)
        if max(self._size, *map(len, others), 0) > LINE_MAX:
            raise ValueError(f"it wrote a line of more than {LINE_MAX >> 20} MiB")
        return lines


def object_in(line: str) -> dict[str, Any] | None:
    """Return the JSON object that a sidecar has written as one line; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def last_object(text: str) -> dict[str, Any] | None:
    """Return the object of the last line of ``text`` that has one; None without one."""
    found = map(object_in, reversed(text.splitlines()))
    return next((one for one in found if one is not None), None)


def sentence(error: ClusterError, command: str, namespace: str) -> str:
    """Return why no sidecar answers ``command``, for its user."""
    if isinstance(error, ClusterRefused) and error.status == FORBIDDEN:
        return forbidden(command, "create pods/exec", namespace, str(error))
    return str(error)


def first_line(text: str) -> str:
    """Return what an error says before it explains itself."""
    return text.strip().partition("\n")[0].removeprefix("muster: ")


@dataclass(frozen=True, slots=True)
class FollowedCommand:
    """A command to follow. ``argv``: its words, without ``muster``; ``command``: the user's own.

    ``present``: the pods of the job, as they were listed last. ``line`` gets each line, ``fail``
    a sentence if no sidecar says anything, or one says too much.
    """

    command: str
    argv: Sequence[str]
    present: Callable[[], Sequence[JobPod]]
    line: Callable[[str], None]
    fail: Callable[[str], None]

    async def run(self, api: ClusterApi) -> None:
        """Follow it in one sidecar after the other, until cancelled."""
        pause_s = AGAIN_S
        while True:
            spoke, why = await self._in_one(api)
            if why:
                self.fail(why)
            costs = not spoke and bool(able(self.present()))
            pause_s = min(2 * pause_s, AGAIN_MOST_S) if costs else AGAIN_S
            await asyncio.sleep(pause_s)

    async def _in_one(self, api: ClusterApi) -> tuple[bool, str]:
        """Follow it in one sidecar; return whether it wrote a line, and what to say of its end."""
        lines, err, spoke = Lines(), "", False
        clock, pods = asyncio.get_running_loop().time, self.present()

        def wrote(is_stderr: bool, text: str) -> None:
            nonlocal err, spoke
            if is_stderr:
                err = (err + text)[:ERR_MAX]
                return
            for one in lines.take(text):
                spoke = True
                silence.reschedule(clock() + SILENCE_S)
                self.line(one)

        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                ran = await ask(api, pods, self.argv, timeout_s=None, wrote=wrote)
        except TimeoutError:
            why = "" if spoke else f"its sidecars have said nothing for {SILENCE_S:g} s"
            return spoke, why
        except ClusterError as error:
            return spoke, sentence(error, self.command, api.namespace)
        # A pod that goes ends the command. The next sidecar says whether anything is wrong.
        return spoke, "" if spoke else _end(ran, err, self.argv[0])


def _end(ran: Ran, err: str, verb: str) -> str:
    """Return what a command without a line said of its end; nothing if it ended well."""
    ended = f"muster {verb} in a sidecar ended with {ran.status}" if ran.status else ""
    return first_line(err) or ended


@dataclass(slots=True)
class StatusNews:
    """The state of one job, as its sidecars say it. ``pods``: as they were listed last.

    ``status``: the newest object, None before the first one; ``trouble``: why there is no newer.
    """

    pods: Sequence[JobPod]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    status: StatusObject | None = None
    trouble: str = "no sidecar has answered yet"

    def take(self, line: str) -> None:
        """Take in a line of ``muster status --json``."""
        found = object_in(line)
        if found is None:
            self.fail(UNREADABLE)
            return
        self.status, self.trouble = found, ""
        self.changed.set()

    def fail(self, trouble: str) -> None:
        """Note why no sidecar answers. What was said last stays, while one may say more."""
        self.trouble = trouble
        if not able(self.pods):
            self.status = None
        self.changed.set()

    async def follow(self, api: ClusterApi, command: str, interval_s: float) -> None:
        """Keep ``status`` up to date, until cancelled."""
        argv = ("status", "--json", "--watch", "--interval", f"{interval_s:g}s")
        await FollowedCommand(command, argv, lambda: self.pods, self.take, self.fail).run(api)


def cut_sequence(text: str) -> tuple[str, str]:
    """Cut off the begin of a terminal's sequence at the end of ``text``: pure."""
    begun = _BEGUN.search(text)
    at = begun.start() if begun else len(text)
    return text[:at], text[at:]


def harmless(text: str) -> str:
    """Return ``text`` with those sequences alone that Muster prints: pure.

    A pod may have anything in the place of its sidecar. Its words must not act on the terminal.
    """
    pieces, at = [], 0
    for found in _SEQUENCE.finditer(text):
        pieces += [_shown(text[at : found.start()]), found.group()]
        at = found.end()
    return "".join([*pieces, _shown(text[at:])])


def _shown(text: str) -> str:
    return _CONTROL.sub(lambda one: repr(one.group())[1:-1], text.replace("\x1b", "\\x1b"))


class ReaderGone(Exception):
    """The reader of our output has exited."""


@dataclass(slots=True)
class ShownOutput:
    """The output of the command, on its way to the user.

    ``history``: lines that another pod has printed before are left out. ``err``: the end of stderr.
    """

    whole: bool
    history: bool = False
    err: str = ""
    out: str = ""
    began: bool = False
    _printed: dict[bytes, None] = field(default_factory=dict)
    """Digests of the lines that were printed last."""
    lines: Lines = field(default_factory=Lines)
    """Those of one pod."""
    _held: dict[bool, str] = field(default_factory=dict)
    """The begin of a sequence whose end has not come yet, for stderr or not."""

    def take(self, is_stderr: bool, text: str) -> None:
        """Print a piece of output, or keep it if it is to be shown as a whole."""
        self.began = True
        if is_stderr:
            self.err = (self.err + text)[-TAIL:]
            self._print(sys.stderr, text)
        elif self.whole:
            self.out += text
            if len(self.out) > KEPT_MOST:
                raise ValueError(f"it wrote more than {KEPT_MOST >> 20} MiB")
        elif self.history:
            self._take_lines(text)
        else:
            self._print(sys.stdout, text)

    def _take_lines(self, text: str) -> None:
        for line in self.lines.take(text):
            digest = blake2b(line.encode("utf-8", "replace"), digest_size=16).digest()
            if digest not in self._printed:
                self._print(sys.stdout, f"{line}\n")
            self._printed[digest] = None
            if len(self._printed) > PRINTED_MOST:
                del self._printed[next(iter(self._printed))]

    def _print(self, stream: Any, text: str) -> None:
        held = self._held.get(stream is sys.stderr, "") + text
        whole, self._held[stream is sys.stderr] = cut_sequence(held)
        try:
            stream.write(harmless(whole))
            stream.flush()
        except BrokenPipeError as error:
            # The client of the API server takes an OSError for one of its connection.
            raise ReaderGone from error


def environment() -> dict[str, str]:
    """Return the variables by which a command prints for this terminal, and knows who asks."""
    far = [name for name, one in (("stdout", sys.stdout), ("stderr", sys.stderr)) if one.isatty()]
    environ = {ASKED_BY: requester()}
    if not far:
        return environ
    environ[TERMINAL] = ",".join(far)
    shown = sys.stdout if sys.stdout.isatty() else sys.stderr
    environ["COLUMNS"] = str(columns_of(shown))
    environ["LINES"] = str(os.get_terminal_size(shown.fileno()).lines or 24)
    environ["TERM"] = os.environ.get("TERM", "xterm")
    if not is_styled(shown):
        environ["NO_COLOR"] = "1"
    return environ
