# SPDX-License-Identifier: Apache-2.0
"""The gate, by which the sidecar tells this pod's ranks what to do: ``$MUSTER_RUN_DIR/gate.json``.

The sidecar renames a new one into place whenever something changes. A rank checks for that with one
``stat`` at each step boundary. The standard library has no notification of a change made in another
container, so a rank that has to wait polls every few milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any, NamedTuple, Optional, Tuple

from muster.boundary import RankGate
from muster.cursor import CommittedStep, decode
from muster.progress import RankIdentity

log = logging.getLogger(__name__)

SCHEMA = 1
GATE_NAME = "gate.json"
ENVIRONMENT_NAME = "env"
"""A file in the run directory; if there is a sidecar, it has put it there."""
PHASES = ("idle", "hold", "commit", "done", "void")

POLL_S = 0.005
"""Poll interval of a rank that waits."""

OWN_ROUND_WAIT_S = 5.0
"""Maximum wait of a new rank until its sidecar has seen that the round is complete."""


class Reading(NamedTuple):
    """The content of a gate. ``deadline_boot_s`` is on CLOCK_BOOTTIME, common to all containers.

    ``of_former_life``: ``last_commit`` was made by a job of this name that was deleted since.
    ``ended``: this pod was let go, and the others have ended well since. ``ask`` names the drain of
    a Horovod launcher for which a rank is to save; 0 without one. ``ending``: the round is about to
    end without a save. ``run`` and ``round``: those that ``gate.master`` belongs to.
    """

    gate: RankGate
    leaving: bool
    deadline_boot_s: Optional[float]
    reason: str
    last_commit: Optional[CommittedStep]
    of_former_life: bool = False
    ended: bool = False
    ask: int = 0
    ending: bool = False
    run: str = ""
    round: int = -1


class GateFile:
    """The gate file of one run directory; parsed only when it has changed."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._path = os.path.join(run_dir, GATE_NAME)
        self._seen: Optional[Tuple[int, int, int]] = None
        self._reading: Optional[Reading] = None
        self._warned = False

    def read(self) -> Optional[Reading]:
        """Read the present gate; None if there is none.

        If it cannot be read or parsed, the last one stays in force, and a warning is logged once:
        to go on without knowing could mean to train past the step that all others save.
        """
        try:
            status = os.stat(self._path)
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._reading = parse(file.read())
                self._seen = seen
        except FileNotFoundError:
            if self._reading is None:
                return None
            self._warn("it is gone")
        except (OSError, ValueError, RecursionError) as error:
            self._warn(error)
        return self._reading

    def wait_for_own(self, rank: RankIdentity) -> bool:
        """Wait for the gate of this rank's round, which has all earlier commits.

        Returns whether it has come. Only a rank of torchrun beside a sidecar waits, for
        ``OWN_ROUND_WAIT_S`` at most; it logs a warning if the gate has not come by then.
        """
        waits = rank.of_torchrun and os.path.exists(os.path.join(self._run_dir, ENVIRONMENT_NAME))
        deadline_s = time.monotonic() + (OWN_ROUND_WAIT_S if waits else 0.0)
        while True:
            reading = self.read()
            if reading is not None and reading.gate.master == rank.master:
                return True
            if not waits:
                return False
            if time.monotonic() >= deadline_s:
                log.warning(
                    "the sidecar has not confirmed within %g s that this round (%s) is complete;"
                    " training goes on without it, and the last commit may be missed",
                    OWN_ROUND_WAIT_S,
                    rank.master,
                )
                return False
            time.sleep(POLL_S)

    def _warn(self, why: object) -> None:
        if not self._warned:
            self._warned = True
            log.warning("cannot read %s, keeping the last gate read, if any: %s", self._path, why)


def parse(content: bytes) -> Reading:
    """Parse a gate; raises ``ValueError``."""
    fields = json.loads(content.decode("utf-8"))
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ValueError("no gate of schema %d" % SCHEMA)
    try:
        phase, step, last = fields["phase"], fields["step"], fields["last_commit"]
        deadline_boot_s = fields["deadline_boot_s"]
        if phase not in PHASES:
            raise ValueError("no phase of a commit: %r" % (phase,))
        return Reading(
            RankGate(
                epoch=int(fields["epoch"]),
                master=str(fields["master"]),
                phase=phase,
                step=None if step is None else int(step),
            ),
            leaving=fields["leaving"] is True,
            deadline_boot_s=None if deadline_boot_s is None else float(deadline_boot_s),
            reason=str(fields["reason"]),
            last_commit=None if last is None else _committed(last),
            of_former_life=fields.get("of_former_life") is True,
            ended=fields.get("ended") is True,
            ask=int(fields.get("ask", 0)),
            ending=fields.get("ending") is True,
            run=str(fields.get("run", "")),
            round=int(fields.get("round", -1)),
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("a field is missing or of another type: %s" % error) from error


def _committed(last: Any) -> CommittedStep:
    tag = str(last.get("tag", ""))
    return CommittedStep(int(last["step"]), decode(str(last.get("cursor", ""))), tag)
