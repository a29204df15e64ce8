# SPDX-License-Identifier: Apache-2.0
"""What a sidecar shows its ranks, and when it votes and acknowledges for them: pure.

The order is what makes it safe: the gate is written, *then* progress is read, *then* a note is
written that a vote will be sent, *then* it is sent. ``local`` gives the next of these alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from rdzv.commit import Commit, LastCommit, Phase, Vote
from rdzv.live_round import LiveRound
from rdzv.model import Drain


@dataclass(frozen=True, slots=True)
class Gate:
    """What the ranks of one pod read at each step boundary.

    ``leaving`` and ``granted`` are this pod's. ``deadline_boot_s`` is the CLOCK_BOOTTIME at which
    SIGTERM passes at the latest, None without a drain or a deadline.
    """

    epoch: int = 0
    run: str = ""
    round: int = -1
    master: str = ""
    phase: Phase = "idle"
    step: int | None = None
    leaving: bool = False
    granted: bool = False
    deadline_boot_s: float | None = None
    reason: str = ""
    last_commit: LastCommit | None = None

    def to_json(self) -> bytes:
        """Encode for the run directory."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, name: str, content: bytes) -> Gate:
        """Decode; raises ``RecordError`` naming the file."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What one rank of this pod has published. ``drain``: from within ``muster.drain()``.

    ``alive``: its process is still the one that wrote it. ``acked`` is (epoch, step), ``failed``
    (epoch, why).
    """

    local_rank: int
    local_world_size: int
    master: str
    step: int
    drain: bool
    held: bool
    alive: bool = True
    acked: tuple[int, int] | None = None
    failed: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """What a sidecar knows on its own. ``ranks`` must be read after ``shown`` was written.

    ``shown``: the gate as it lies in the run directory, None where there is none. ``sent``: the
    epoch that the note of the last vote names, 0 without one. ``cut_for_s``: for how long the
    store has been out of reach, 0 while it is not. ``deadline_boot_s``: as in ``Gate``.
    """

    member: str
    pod_uid: str
    shown: Gate | None
    ranks: tuple[RankProgress, ...]
    sent: int
    cut_for_s: float = 0.0
    deadline_boot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """The next thing to do; at most one of ``gate``, ``note`` and ``vote`` is not None.

    ``gate``: to be written. ``note``: the epoch to be noted as sent. ``vote``: to be created where
    none is on record, or to be put with the acknowledgement. ``reason``: one sentence.
    """

    gate: Gate | None = None
    note: int | None = None
    vote: Vote | None = None
    reason: str = ""


def local(
    here: Here,
    *,
    commit: Commit | None,
    round: LiveRound | None,
    drain: Drain | None,
    vote: Vote | None,
    last_commit: LastCommit | None,
    hold_s: float,
) -> Move:
    """Give the next thing this sidecar is to do for its ranks.

    ``commit``, ``round``, ``drain`` (this pod's), ``vote`` (this member's, on record) and
    ``last_commit`` are the store's word as far as it is known.
    """
    raise NotImplementedError
