# SPDX-License-Identifier: Apache-2.0
"""The hold of a container that is ending: its grace, the notice to the sidecar, and its release.

The notice is one line of JSON; the answer is a line for each phase of the drain, up to the last.
After a lost connection the notice is sent again, with the seconds left then. ``muster-run`` holds a
SIGTERM so; the program ``muster-hold`` does as a preStop command, for an entry point that stays:
the kubelet sends SIGTERM to the container when it has ended, and until then training goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from typing import Dict, Mapping, NamedTuple, Optional, Tuple

from launcher_shim.exit_status import EXIT_USAGE, unblock_signals
from launcher_shim.pod.delivery import RunDirectory, configure_log

GRACE_VARIABLE = "MUSTER_GRACE_S"
DEFAULT_GRACE_S = 30.0
"""Kubernetes' own default of terminationGracePeriodSeconds."""

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s?")


def grace_s(environ: Mapping[str, str]) -> float:
    """Read the grace in seconds; raises ``ValueError`` with one sentence."""
    text = environ.get(GRACE_VARIABLE) or str(DEFAULT_GRACE_S)
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{GRACE_VARIABLE} is {text!r}: give the pod's terminationGracePeriodSeconds, as in 30"
        )
    return float(match.group(1))


FAREWELL_S = 1.0
"""The reserve of a job that is finishing, in seconds: with nothing to save, all that is left to do
is to end."""


def reserve_s(grace: float) -> float:
    """Return how long before its end a container gets SIGTERM at the latest, in seconds."""
    return max(1.0, min(5.0, grace / 3))


log = logging.getLogger(__name__)

ABSENT_S = 3.0
"""If the socket does not exist for this many seconds, there is no sidecar."""
RETRY_S = 0.1
LINE_MAX = 64 * 1024
FINISHING = "finishing"
"""The phase in which nothing is to be saved, as ``rdzv.drain.standing`` names it."""


class Release(NamedTuple):
    """The end of the hold.

    ``how``: "released" or "refused" by the sidecar; "cancelled": there is nothing to hold for any
    more; "expired": the deadline came first; "absent": there is no sidecar. ``step``: the one that
    all ranks saved, if they did and the sidecar (0.2.0 or later) says so.
    """

    how: str
    sentence: str
    step: Optional[int] = None


class OutgoingNotice(NamedTuple):
    """A notice to send. ``end_s``: the end of the container; ``deadline_s``: the end of the wait.

    Both are of the running event loop's clock. While the job is finishing, the wait goes on up to
    ``FAREWELL_S`` before the end.
    """

    source: str
    reason: str
    end_s: float
    deadline_s: float

    def until_s(self, phase: str) -> float:
        """Return the end of the wait in ``phase`` of the drain."""
        last_s = max(self.deadline_s, self.end_s - FAREWELL_S)
        return last_s if phase == FINISHING else self.deadline_s

    def line(self, now_s: float) -> bytes:
        """Encode it for the sidecar."""
        fields: Dict[str, object] = {
            "notice": self.source,
            "reason": self.reason,
            "seconds_left": round(max(0.0, self.end_s - now_s), 3),
        }
        return json.dumps(fields).encode() + b"\n"


async def give_notice(path: str, notice: OutgoingNotice) -> Release:
    """Give notice at the socket ``path``; return once the container may go."""
    loop = asyncio.get_running_loop()
    connected = False
    absent_since_s: Optional[float] = None
    phase = last_sentence = ""
    while True:
        left_s = notice.until_s(phase) - loop.time()
        if left_s <= 0:
            return Release("expired", last_sentence or "the sidecar did not answer")
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_unix_connection(path, limit=LINE_MAX), left_s
            )
        except FileNotFoundError:
            if absent_since_s is None:
                absent_since_s = loop.time()
            if not connected and loop.time() - absent_since_s >= ABSENT_S:
                return Release("absent", "there is no sidecar to agree with")
        except (OSError, asyncio.TimeoutError):
            absent_since_s = None
        else:
            connected = True
            try:
                writer.write(notice.line(loop.time()))
                while True:
                    left_s = max(0.0, notice.until_s(phase) - loop.time())
                    line = await asyncio.wait_for(reader.readline(), left_s)
                    if not line.endswith(b"\n"):
                        break
                    before, (phase, last_sentence, step) = phase, _read(line, last_sentence)
                    if phase == "released" and before == FINISHING:
                        # Its ranks have ended well: the command is about to end by itself.
                        await asyncio.sleep(notice.until_s(FINISHING) - loop.time())
                    if phase in ("released", "cancelled", "refused"):
                        return Release(phase, last_sentence, step)
            except asyncio.TimeoutError:
                continue
            except (OSError, ValueError) as error:
                log.info("reconnecting to the sidecar: %s", error)
            finally:
                writer.close()
        await asyncio.sleep(RETRY_S)


def _read(line: bytes, last_sentence: str) -> "Tuple[str, str, Optional[int]]":
    """Parse a phase, its sentence and its step, and log a new sentence; raises ``ValueError``."""
    try:
        fields = json.loads(line.decode())
    except RecursionError as error:
        raise ValueError("the sidecar's answer is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("the sidecar's answer is no JSON object")
    phase, sentence = str(fields.get("phase", "")), str(fields.get("sentence", ""))
    if sentence != last_sentence:
        log.info("%s: %s", phase, sentence)
    step = fields.get("step")
    return phase, sentence, step if isinstance(step, int) else None


USAGE = "usage: muster-hold, without arguments, as the preStop command of the training container"


def main() -> int:
    """Hold SIGTERM back until the release; return the exit status."""
    unblock_signals()
    configure_log("muster-hold")
    if sys.argv[1:]:
        sys.stderr.write(USAGE + "\n")
        return 0 if sys.argv[1:] == ["--help"] else EXIT_USAGE
    run_dir = RunDirectory.find(os.environ, sys.argv[0])
    delivered: Dict[str, str] = {}
    try:
        delivered = run_dir.delivered() or {}
    except ValueError as error:  # SIGTERM is held all the same, for the usual grace
        log.warning("holding as if nothing had been delivered: %s", error)
    try:
        grace = grace_s({**os.environ, **delivered})
    except ValueError as error:
        log.error("%s", error)
        return EXIT_USAGE
    return asyncio.run(_hold(run_dir, grace))


async def _hold(run_dir: RunDirectory, grace: float) -> int:
    end_s = asyncio.get_running_loop().time() + grace
    notice = OutgoingNotice(
        "hold", "preStop of the training container", end_s, end_s - reserve_s(grace)
    )
    release = await give_notice(run_dir.notice_socket, notice)
    log.info("the container may end: %s (%s)", release.how, release.sentence)
    return 0
