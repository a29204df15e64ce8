# SPDX-License-Identifier: Apache-2.0
"""A run's round as drains see it: its members, those that are gone, and its name to its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from launcher_shim.c10d.rounds.inputs import RunSnapshot
from launcher_shim.c10d.rounds.observations import GONE, Standings
from launcher_shim.c10d.rounds.records import Round
from launcher_shim.c10d.stages import round_prefix
from rdzv.drain.inputs import LiveRound, ReformCause
from rdzv.records.commit import Commit, Phase
from rdzv.snapshot import Snapshot


def live_round(
    run_id: str, snapshot: RunSnapshot, standings: Standings, reforms: ReformCause, master: str
) -> LiveRound:
    """Build the live round of ``snapshot``; an open one has no members.

    ``reforms``: as ``reform`` decides. ``master``: as ``master_token`` returns it.
    """
    current = snapshot.round
    return LiveRound(
        run=run_id,
        number=current.number,
        complete=current.complete,
        members=tuple(seat.member for seat in current.frozen),
        left=frozenset(seat.member for seat, where in standings.of.items() if where in GONE),
        reforms=reforms,
        finishing=current.finishing,
        closed=bool(current.closed),
        succeeded=current.closed == "success",
        master=master if current.complete else "",
        first=current.is_first,
        mod_revision=current.mod_revision,
        asking=frozenset(node.member for node in snapshot.asking())
        - snapshot.membership.quarantined,
        restored=current.restored,
        ends=current.ends,
        in_place=current.world > 0 and not current.is_ending and not current.finishing,
        let_go=frozenset(
            node.member
            for node in snapshot.nodes.values()
            if current.takes_in(replace(node, own=True))
            and node.seat not in current.frozen
            and node.member in snapshot.membership.leaving
        ),
    )


def master_token(run_id: str, number: int, value: Callable[[bytes], bytes | None]) -> str:
    """Return ``MASTER_ADDR:MASTER_PORT`` of a round, its name to its ranks; empty if unset.

    torch gives a worker neither its rendezvous nor its round, but every round has a worker store
    of its own. ``value`` looks up a launcher's key.
    """
    prefix = round_prefix(run_id, number)
    address, port = value(prefix + b"MASTER_ADDR"), value(prefix + b"MASTER_PORT")
    if not address or not port:
        return ""
    return f"{address.decode(errors='replace')}:{port.decode(errors='replace')}"


def precedence(run: str, one: Round | LiveRound) -> tuple[bool, bool, int, str]:
    """Return a sort key for rounds of several runs: the one that counts is the greatest."""
    return (not one.closed, one.complete, one.mod_revision, run)


def counting(rounds: Iterable[LiveRound], membership: Snapshot) -> LiveRound | None:
    """Choose the round that counts if there are several runs: they share one commit record.

    A round that stands still after its save counts until it has ended or trains on. If a world of
    another run reset its commit, no sidecar would know that it stands still, and its ranks would
    train on beyond the step that was saved. Otherwise, the round that counts is one that a member
    leaves, whose work would be lost, or else one that is to form again; among several, the one
    whose ranks are held already, or else the newest. A save that has begun ends first: if it were
    broken off, ranks that have not read of its step would train past it, while the others wait for
    them in the save. The choice depends on records, and on each sidecar's gather window: all choose
    the same round in the end. Beside a sidecar whose version knows only the newest round, that one
    counts: otherwise the two would take the commit from each other without end.
    """
    rounds = tuple(rounds)
    live = [one for one in rounds if one.live]
    phase, committing = _commit_of(live, membership.commit)
    if phase == "done":
        return committing
    if any(member.counts_newest_run for member in membership.members.values()):
        return newest(rounds)
    if phase == "commit":
        return committing
    drains = membership.drains.values()
    leaving = {one.member for one in drains if not one.outcome and membership.has_name(one)}
    can_save = [one for one in live if not one.finishing]
    wanted = [one for one in can_save if not leaving.isdisjoint(one.members)]
    wanted = wanted or [one for one in can_save if one.reforms]
    if phase == "hold" and committing in wanted:
        return committing
    return newest(wanted or rounds)


def _commit_of(live: Iterable[LiveRound], commit: Commit | None) -> tuple[Phase, LiveRound | None]:
    """Find the live round that the commit record is about, and the record's phase."""
    if commit is not None:
        for one in live:
            if commit.is_of(one.run, one.number):
                return commit.phase, one
    return "idle", None


def own(rounds: Iterable[LiveRound], member: str) -> LiveRound | None:
    """Choose the live round that ``member`` is in; None if there is none."""
    return newest(
        one for one in rounds if one.live and member in one.members and member not in one.left
    )


def newest(rounds: Iterable[LiveRound]) -> LiveRound | None:
    """Choose the newest round that trains; if none does, the newest."""
    return max(rounds, key=lambda one: precedence(one.run, one), default=None)
