# SPDX-License-Identifier: Apache-2.0
"""The drain state machine: when all ranks save the same step, and who may leave or join then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rdzv.commit import Commit, LastCommit
from rdzv.keys import JobKeys
from rdzv.live_round import DrainingSnapshot, Observations, Policy
from rdzv.model import Drain
from rdzv.store import Compare, Operation


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be written, in one transaction; nothing where all three are empty.

    ``commit``: what the commit record should become. ``last_commit``: to be written with it.
    ``drains``: drains that end, with their outcome, by pod UID. ``reason``: one sentence.
    ``wake_at_s``: when time alone would change the answer.
    """

    commit: Commit | None
    last_commit: LastCommit | None
    drains: Mapping[str, Drain] = field(default_factory=dict)
    reason: str = ""
    wake_at_s: float = math.inf


def decide(
    now: float, snapshot: DrainingSnapshot, observations: Observations, policy: Policy
) -> Decision:
    """Decide what becomes of the drains and of the commit."""
    raise NotImplementedError


def transaction(
    keys: JobKeys, snapshot: DrainingSnapshot, decision: Decision
) -> tuple[list[Compare], list[Operation]]:
    """Make the transaction that carries ``decision`` out; the caller adds its registration.

    It rests on the commit, the round and each drain being what they are in ``snapshot``, and on no
    drain having come since.
    """
    raise NotImplementedError


def cancel(
    keys: JobKeys, snapshot: DrainingSnapshot, pod_uid: str
) -> tuple[list[Compare], list[Operation]] | str:
    """Make the transaction that cancels a drain, or say why it cannot be cancelled."""
    raise NotImplementedError


def joins_wait(commit: Commit | None, run: str, number: int) -> bool:
    """Whether newcomers of this round wait for a save (else they are let in at once)."""
    raise NotImplementedError


def ends_round(commit: Commit | None, run: str, number: int) -> bool:
    """Whether somebody was let go or in after a save: this round must end, whoever still asks."""
    raise NotImplementedError


def granted(commit: Commit | None, drain: Drain) -> bool:
    """Whether the drained pod may go: SIGTERM passes."""
    raise NotImplementedError


_ = Sequence
