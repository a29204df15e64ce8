# SPDX-License-Identifier: Apache-2.0
"""The steps that all ranks of a world have saved, whether or not a drain asked for it: pure.

Ranks that have saved a step say where in the data it is (the cursor), which world's path they saved
to (the tag), and whether it keeps the samples. A step whose ranks are at different places in the
data is no place to resume from: in the next world some samples would be trained twice, and others
never. A rank that gives no cursor leaves it to the others, as when rank 0 alone saves and reports.

A step that every member of the live round's frozen list names becomes the last commit: a world that
begins after it can go on from there. Nothing of a former round is stored late, nor a step that no
world of shards could begin from, as after a restore of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from rdzv.drain.inputs import DrainingSnapshot, LiveRound, unchanged
from rdzv.keys import JobKeys
from rdzv.records.codec import KEPT
from rdzv.records.drain import LastCommit, verdict
from rdzv.records.progress import CENTRAL_RUN, STEPS_MAX, PodSaves, RankProgress
from rdzv.snapshot import Snapshot
from rdzv.store import Compare, GuardedWrites, Put

CURSORS = "the data cursors of step "
TAGS = "the save tags of step "
DIFFER = (CURSORS, TAGS)
"""The starts of the sentences about a difference."""

SHOWN_GROUPS = 3
SHOWN_CHARACTERS = 80
"""The number of different cursors that the sentence shows, and the characters of each."""

MOVED = 0.1
"""Change of a rank's share of waiting that is worth a report."""


class Said(NamedTuple):
    """The words of one member's ranks on a step that they have saved; each empty for nothing.

    They say where in the data it is (the cursor), which world's path they saved to (the tag),
    and whether it keeps the samples: a world that goes on from it then trains each once an
    epoch.
    """

    ranks: Sequence[int]
    """Their numbers. A sidecar of an earlier version names none."""
    member: str
    cursor: str
    tag: str = ""
    samples: str = ""

    @classmethod
    def by(cls, rank: RankProgress, step: int, member: str) -> Said:
        """Return what ``rank``, which is of ``member``, says of its save of ``step``."""
        cursor = cursor_of(step, rank.saved, rank.cursors)
        return cls((rank.rank,), member, cursor, rank.tag, rank.samples)


def cursor_of(step: int, saved: Sequence[int], cursors: Sequence[str]) -> str:
    """Return the data cursor that was given with the save of ``step``; empty for none."""
    return dict(zip(saved, cursors, strict=False)).get(step, "")


def difference(step: int, said: Sequence[Said]) -> str:
    """Return a sentence that names who gave which cursor, or tag; empty if all that did agree."""
    for what, given in ((CURSORS, attrgetter("cursor")), (TAGS, attrgetter("tag"))):
        by_value: dict[str, list[Said]] = {}
        for one in filter(given, said):
            by_value.setdefault(given(one), []).append(one)
        if len(by_value) > 1:
            groups = sorted(by_value.items(), key=lambda group: (min(group[1]), group[0]))
            shown = [f"{_who(who)} gave {value[:SHOWN_CHARACTERS]}" for value, who in groups]
            more = [f"and {len(shown) - SHOWN_GROUPS} others"] if len(shown) > SHOWN_GROUPS else []
            return f"{what}{step} differ: {', '.join(shown[:SHOWN_GROUPS] + more)}"
    return ""


def left_to_others(said: Sequence[Said]) -> str:
    """Return who gave no cursor while others gave one, to end a sentence with; empty for none."""
    none = [one for one in said if one.ranks and not one.cursor]
    if not none or not agreed(one.cursor for one in said):
        return ""
    return f"; {_who(none)} gave no data cursor, which is left to the others"


def _who(who: Sequence[Said]) -> str:
    ranks = sorted({rank for one in who for rank in one.ranks})
    members = list(dict.fromkeys(one.member for one in who))
    names = ", ".join(members[:3]) + (", ..." if len(members) > 3 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {spell(ranks)} ({names})"


def spell(ranks: Sequence[int]) -> str:
    """Render numbers of ranks in short: ``0-3, 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)


def agreed(given: Iterable[str]) -> str:
    """Return what all gave that gave anything; empty if that is nothing, or not the same."""
    values = set(filter(None, given))
    return values.pop() if len(values) == 1 else ""


def samples_of(said: Iterable[str]) -> str:
    """Return what ranks or pods say of the samples together; empty if they say nothing.

    One that does not keep them counts for all. One that says nothing leaves it to the others.
    """
    verdicts = sorted(filter(None, said))
    return next((one for one in verdicts if one != KEPT), verdicts[0] if verdicts else "")


def with_agreement(last: LastCommit, said: Sequence[Said]) -> LastCommit:
    """Return ``last`` with what all say of it, who do not differ."""
    cursor = agreed(one.cursor for one in said)
    samples = verdict(samples_of(one.samples for one in said), cursor)
    return replace(last, cursor=cursor, tag=agreed(one.tag for one in said), samples=samples)


def saves_of(
    ranks: Iterable[RankProgress], round: LiveRound | None, member: str, pod_uid: str
) -> PodSaves | None:
    """Return this pod's report about ``round``; None unless its ranks are all in it.

    A rank that has left its loop, or has ended, counts as well: what it saved is on disk.
    """
    if round is None or not round.live or not round.master or member not in round.members:
        return None
    own = [rank for rank in ranks if rank.master == round.master]
    if not own or any(rank.local_world_size != len(own) for rank in own):
        return None
    common = frozenset.intersection(*(frozenset(rank.saved) for rank in own))
    said = {step: [Said.by(rank, step, member) for rank in own] for step in common}
    alike = [step for step in common if not difference(step, said[step])]
    steps = tuple(sorted(alike, reverse=True))[:STEPS_MAX]
    named = [step for rank in own for step in rank.saved]
    cursors = tuple(agreed(one.cursor for one in said[step]) for step in steps)
    return PodSaves(
        member,
        pod_uid,
        round.run,
        round.number,
        steps,
        max(named, default=None),
        max(rank.step for rank in own),
        cursors=cursors if any(cursors) else (),
        ranks=tuple(sorted(rank.rank for rank in own)),
        tag=agreed(rank.tag for rank in own) if common else "",
        save_s=max(rank.save_s for rank in own),
        samples=samples_of(rank.samples for rank in own) if steps else "",
        waits=_waits(own),
    )


def _waits(own: Sequence[RankProgress]) -> tuple[float, ...]:
    """Return the share of waiting of each rank, by its number; none if one is unknown."""
    known = [(rank.rank, rank.waits) for rank in own if rank.waits is not None]
    return tuple(share for _, share in sorted(known)) if len(known) == len(own) else ()


def steady(own: PodSaves, stored: PodSaves) -> PodSaves:
    """Return ``own`` with the shares of waiting that are stored, unless one is another by now."""
    if (own.run, own.round, own.ranks) != (stored.run, stored.round, stored.ranks):
        return own
    pairs = list(zip(own.waits, stored.waits, strict=False))
    moved = len(own.waits) != len(stored.waits) or any(abs(a - b) >= MOVED for a, b in pairs)
    return own if moved else replace(own, waits=stored.waits)


def of_central(
    ranks: Iterable[RankProgress], commands: int | None, member: str, pod_uid: str
) -> PodSaves | None:
    """Return the report of a pod whose ranks a central launcher starts: without run or rounds.

    ``commands``: how many of them run; None if none ever came, and then there is no report.
    """
    if commands is None:
        return None
    own = list(ranks) if commands else []
    step = max((rank.step for rank in own), default=-1)
    numbers = tuple(sorted(rank.rank for rank in own))
    return PodSaves(member, pod_uid, CENTRAL_RUN, 0, step=step, ranks=numbers, waits=_waits(own))


def timed(own: PodSaves, took_s: float, grace_s: float, reserve_s: float) -> PodSaves:
    """Return ``own`` with the time of its slowest save, if a drain has less; else without one.

    ``took_s``: how long the last commit took, 0.0 if there was none.
    """
    save_s = round(max(own.save_s, took_s), 1)
    if save_s <= grace_s - reserve_s:
        return replace(own, save_s=0.0)
    return replace(own, save_s=save_s, grace_s=grace_s, reserve_s=reserve_s)


def differing(ranks: Iterable[RankProgress], round: LiveRound | None, member: str) -> str:
    """Return what this pod's ranks say differently of one save; empty if they agree."""
    own = [rank for rank in ranks if round is not None and rank.master == round.master]
    for step in sorted({step for rank in own for step in rank.saved}, reverse=True):
        if differ := difference(step, [Said.by(rank, step, member) for rank in own]):
            return differ
    return ""


def of_round(
    round: LiveRound | None, membership: Snapshot, saves: Mapping[str, PodSaves]
) -> Sequence[PodSaves]:
    """Return the reports of the members of ``round`` about it, in rank order.

    Each pod stores which steps all of its ranks have saved in this round. A step that every
    member of the round's frozen list names becomes the last commit: a world that begins after
    it can go on from there. This holds for the live round only: nothing of a former one is
    stored late. Nor is a step stored that no world of shards could begin from, as after a
    restore of the store.
    """
    if round is None:
        return ()
    told = (saves.get(member) for member in round.members)
    here = (round.run, round.number)
    return [
        one
        for one in told
        if one is not None
        and (member := membership.members.get(one.member)) is not None
        and (one.run, one.round, one.pod_uid) == (*here, member.pod_uid)
    ]


def newest_saved(
    snapshot: DrainingSnapshot, saves: Mapping[str, PodSaves]
) -> tuple[LastCommit | None, str]:
    """Return the last commit to store, if any, and why, in one sentence."""
    round, membership, commit = snapshot.round, snapshot.membership, snapshot.commit
    if membership.job is None or round is None or not round.live or not round.members:
        return None, "no round is live"
    if commit.is_of(round.run, round.number) and commit.phase in ("hold", "commit", "done"):
        return None, "a commit is under way"
    last = membership.last_commit
    told = of_round(round, membership, saves)
    same_world = last is not None and last.is_of(round.run) and last.round == round.number
    if last is not None and same_world and not last.periodic:
        # The commit is newer than every report before it, however a loop counts its steps.
        told = [one for one in told if one.mod_revision > last.mod_revision]
    if len(told) < len(round.members):
        return None, f"{len(round.members) - len(told)} members have reported no new save"
    common = frozenset.intersection(*(frozenset(one.steps) for one in told))
    newer = sorted((step for step in common if step > _floor(snapshot, round)), reverse=True)
    said = {
        step: [
            Said(
                *(one.ranks, one.member, cursor_of(step, one.steps, one.cursors)),
                *(one.tag, one.samples),
            )
            for one in told
        ]
        for step in newer
    }
    differ = {step: difference(step, given) for step, given in said.items()}
    alike = (step for step in newer if not differ[step])
    step = next((step for step in alike if snapshot.is_known(step, round)), None)
    if step is None:
        lost = "the store has lost which records their weights contain"
        return None, (differ[newer[0]] or lost) if newer else "no newer step is saved by all ranks"
    epoch = last.epoch if last is not None else 0
    saved = LastCommit(step, round.number, epoch, membership.job.uid, periodic=True, run=round.run)
    saved = with_agreement(saved, said[step])
    return saved, f"all ranks have saved step {step}{left_to_others(said[step])}"


def _floor(snapshot: DrainingSnapshot, round: LiveRound) -> int:
    """Return the step that a new last commit has to exceed; -1 for none."""
    last = snapshot.membership.last_commit
    if last is None or snapshot.membership.commit_is_of_former_life or not last.is_of(round.run):
        return -1
    # A forgotten commit binds no later world. In the same one it would only come back.
    return -1 if last.forgotten and last.round != round.number else last.step


def newest_transaction(
    keys: JobKeys, snapshot: DrainingSnapshot, saved: LastCommit
) -> GuardedWrites:
    """Build the transaction that stores ``saved``; the caller adds its registration guard.

    It requires that the round is still the live one, that no commit has begun or ended since, and
    that no other sidecar has stored another step.
    """
    last = snapshot.membership.last_commit
    known = Compare(keys.last_commit, "mod", "=", last.mod_revision if last else 0)
    return [*unchanged(keys, snapshot), known], [Put(keys.last_commit, saved.to_json())]
