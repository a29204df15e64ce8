# SPDX-License-Identifier: Apache-2.0
"""The inputs of a decision about a run: its records, its part of the membership, and the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.dataclass import dataclass
from rdzv.drain.decision import savers
from rdzv.drain.standing import granted
from rdzv.membership import Membership as JobMembership
from rdzv.records.drain import Commit, Drain
from rdzv.records.policy import JobPolicy
from rdzv.records.troubles import Failure
from rdzv.snapshot import Listing, Snapshot, is_enough


@dataclass(frozen=True, slots=True)
class RoundPolicy(JobPolicy):
    """The policy of the job, with the timeouts of its rounds, in seconds."""

    desired: int | None = None
    """The number of nodes to wait for, up to ``last_call_s``, while more may come; None: none."""
    paused: bool = False
    """Whether the job is paused: no world may train."""
    shrinks: bool = True
    """Whether a world that has become too large gives nodes up, instead of training on as it is."""
    last_call_s: float = 2.0
    """Wait of a world of ``min_nodes`` for a torchrun that was in the world before, counted from
    when it left or may ask again. Longer: fewer worlds that form twice. Shorter: less time without
    training after a loss."""
    first_call_s: float = 30.0
    """Wait of a world of fewer than ``max_nodes`` for a member whose torchrun has never connected.
    Generous: a world that starts too small has to be formed again."""
    confirm_s: float = 4.0
    """Time for which a node's key must be away before the node counts as dead. A reconnect and a
    renewal of its lease must fit in; every recovery from a lost node takes this much longer."""
    return_s: float = 15.0
    """The same, after this sidecar or the whole world was cut off: others may be reconnecting."""
    orphan_hold_s: float = 60.0
    """Time for which a world whose keys all vanished at once is kept for its return. Longer than
    the outages that it is to survive; until it is over, no other world can form."""
    hung_s: float = 30.0
    """Time without a request after which an agent counts as hung. Its keep-alive thread sends one
    every 5 s."""
    leave_s: float = 120.0
    """Time for which an agent may take to leave a world that must form again, if its key is there.
    torch gives workers 30 s before it kills them, and waits for those that the kernel
    cannot end. Too short: the others form a round without a slow node, and then another one with
    it. Too long: they wait for one that hangs."""
    hold_s: float = 2.0
    """Time for which an answer may be held back for news, where torch would sleep for 1 s and ask
    again. It covers the last call; an agent handles a signal only after the answer."""
    life_s: float = 2.0
    """Wait of a sidecar that has just come into this life of the job, before it forms a world, for
    one that trains already and has only now seen that a restored store has lost it."""
    park_s: float = 2.0
    """Time after which an agent that asks in a round that does not form is parked, if its join has
    no timeout."""


@dataclass(frozen=True, slots=True)
class RoundMembers:
    """The part of the membership that rounds depend on; members go by name."""

    listed: frozenset[str] = frozenset()
    """Members that may have a place, those on standby included: each round chooses among them."""
    leaving: frozenset[str] = frozenset()
    """Members that are drained, terminating or fenced."""
    granted: frozenset[str] = frozenset()
    """Of those that leave, the ones whose leave was granted."""
    joins_wait: bool = False
    """Whether the present world saves before it lets a newcomer in, makes room or pauses: a
    newcomer must not end it."""
    join_agreed: bool = False
    """Whether the ranks of the present world are held, or save, to form it again, or do so without
    a save."""
    ends_round: bool = False
    """Whether the present world has saved and waits for a leave or a join: it must form again."""
    saved: frozenset[str] = frozenset()
    """Of those that leave, the ones that have saved while others still do: if they are lost, the
    others still finish their save."""
    ages: Mapping[str, int] = field(default_factory=dict)
    """The order of members by age: the smallest number is the oldest."""
    quarantined: frozenset[str] = frozenset()
    """Of those listed, the ones that worlds form without while enough others ask."""
    locations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The topology of each of those listed, as in ``rdzv.records.job.Member``."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """The block of each of those listed whose topology is known."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """By member: the newest failure of its own workers in one of the row of failed starts."""
    job_revision: int = 0
    """The store's revision of the job's record: what changes the job is tried at once."""

    def may_join(self, member: str) -> bool:
        """Return whether a node of ``member`` may be frozen into a round."""
        return member in self.listed and member not in self.leaving


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """One run at one store revision; immutable."""

    revision: int
    round: Round = field(default_factory=Round)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    membership: RoundMembers = field(default_factory=RoundMembers)
    done: frozenset[Seat] = frozenset()
    """Nodes of the present world that reached torch's exit barrier, whatever their record says."""
    left_out: tuple[Node, ...] = ()
    """Records of a backup that contradict the present world. They do not count in it, but a node
    that asks in one limits how long a vanished world is kept."""

    def asking(self) -> list[Node]:
        """Return the nodes that ask and may join, in the order of their claims."""
        may_join = self.membership.may_join
        return self.in_order_of_claims(
            node for node in self.nodes.values() if node.state == "asking" and may_join(node.member)
        )

    def in_order_of_claims(self, nodes: Iterable[Node]) -> list[Node]:
        """Return ``nodes`` in the order in which places are given.

        Nodes of the world before come first, so that one that comes back does not take the place
        of one that trains; then members by age. The quarantined are last.
        """
        ages, quarantined = self.membership.ages, self.membership.quarantined
        former = frozenset(self.round.former)
        return sorted(
            nodes,
            key=lambda node: (
                node.member in quarantined,
                node.member not in former,
                ages.get(node.member, 0),
                node.mod_revision,
                node.member,
            ),
        )

    def anybody_asks(self) -> bool:
        """Return whether a node asks whose member does not leave, even if it may not join now."""
        leaving = self.membership.leaving
        return any(n.state == "asking" and n.member not in leaving for n in self.nodes.values())

    def left_out_ask(self) -> bool:
        """Return whether a node asks, and may join, by a record that is left out."""
        may_join = self.membership.may_join
        return any(n.state == "asking" and may_join(n.member) for n in self.left_out)

    def candidates(self, min_nodes: int) -> list[Node]:
        """Return the nodes to choose from: the quarantined only if the others are too few."""
        asking = self.asking()
        fit = [node for node in asking if node.member not in self.membership.quarantined]
        return fit if len(fit) >= min_nodes else asking

    def newcomers(self) -> list[Node]:
        """Return the nodes that ask to join the present world, whether or not it has room."""
        frozen, quarantined = self.round.frozen, self.membership.quarantined
        return [
            node
            for node in self.asking()
            if node.seat not in frozen and node.member not in quarantined
        ]

    def next_size(self, min_nodes: int) -> int:
        """Return how many nodes are to choose from if the present world lets the newcomers in."""
        joining, frozen = len(self.newcomers()), self.round.frozen
        fit = sum(seat.member not in self.membership.quarantined for seat in frozen) + joining
        return fit if fit >= min_nodes else len(frozen) + joining


def run_membership(
    snapshot: Snapshot,
    listing: Listing,
    run_id: str,
    current: Round,
    fenced: str | None = None,
    saved: frozenset[str] = frozenset(),
    failures: Mapping[str, Failure] | None = None,
) -> RoundMembers:
    """Return the part of ``snapshot`` that round ``current`` of ``run_id`` depends on: pure.

    ``listing`` is that of ``snapshot``. ``fenced``: this sidecar's member name if another pod has
    taken it over. ``saved``: as in ``RoundMembers``; computed from votes, which no snapshot has.
    ``failures``: the newest of each member; they count after failed starts alone.
    """
    kept_out = (snapshot.members[name] for name in listing.quarantined & listing.excluded.keys())
    fit = sorted([*listing.listed, *listing.standby, *kept_out], key=lambda one: one.age_order)
    drains = [
        drain
        for drain in snapshot.drains.values()
        if snapshot.has_name(drain) and not _is_of_backup(drain, current)
    ]
    leaving = {drain.member for drain in drains}
    if fenced is not None:
        leaving.add(fenced)
    return RoundMembers(
        listed=frozenset(member.name for member in fit),
        leaving=frozenset(leaving),
        granted=frozenset(drain.member for drain in drains if granted(snapshot.commit, drain)),
        joins_wait=joins_wait(snapshot, listing, run_id, current.number),
        join_agreed=join_agreed(snapshot.commit, run_id, current.number),
        ends_round=ends_round(snapshot, run_id, current.number),
        saved=saved,
        ages={member.name: age for age, member in enumerate(fit)},
        quarantined=listing.quarantined,
        locations={member.name: member.location for member in fit},
        blocks={member.name: member.block for member in fit if member.block},
        failed={
            name: one for name, one in (failures or {}).items() if _is_in_row(one, run_id, current)
        },
        job_revision=snapshot.job.mod_revision if snapshot.job and failures else 0,
    )


def _is_in_row(failure: Failure, run_id: str, current: Round) -> bool:
    """Return whether workers failed by themselves in a failed start right before ``current``."""
    row = range(current.number - current.failed_starts, current.number)
    return failure.run == run_id and failure.round in row and not failure.follows


def _is_of_backup(drain: Drain, current: Round) -> bool:
    """Return whether ``drain`` is a backup's, from before its member got a place in ``current``.

    A draining member gets no place. So it is the drain of an earlier pod, which has the name in the
    backup until the present pod has registered again.
    """
    return 0 < drain.created_revision <= current.restored_at and any(
        seat.member == drain.member for seat in current.frozen
    )


def joins_wait(membership: Snapshot, listing: Listing, run: str, number: int) -> bool:
    """Return whether this round has to save before it forms again; if not, it does so at once."""
    rules = membership.rules
    paused = rules is not None and rules.paused
    if not paused and not is_enough(membership, listing):
        return True
    commit = _commit_about(membership.commit, run, number)
    return not (commit.admitted or (commit.refused and commit.joins))


def join_agreed(commit: Commit | None, run: str, number: int) -> bool:
    """Return whether the ranks of this round are held or save to re-form it, or do so without."""
    here = _commit_about(commit, run, number)
    return here.joins and (here.refused or here.phase in ("hold", "commit", "done"))


def ends_round(membership: Snapshot, run: str, number: int) -> bool:
    """Return whether a leave or a join was granted after a save of this round.

    Its ranks stay parked, so it must end, even if the newcomer or the leaver has vanished since.
    """
    commit = _commit_about(membership.commit, run, number)
    return commit.admitted or bool(commit.granted)


def _commit_about(commit: Commit | None, run: str, number: int) -> Commit:
    """Return the commit record if it is about this round; else an idle one."""
    return commit if commit is not None and commit.is_of(run, number) else Commit()


class MembershipOfRun:
    """A cache of ``run_membership`` for one run, valid until one of its inputs changes.

    ``fenced`` returns this sidecar's member name while another pod has taken it over, else None.
    """

    def __init__(
        self, membership: JobMembership, run_id: str, fenced: Callable[[], str | None]
    ) -> None:
        self._membership = membership
        self._run_id = run_id
        self._fenced = fenced
        self._cached: tuple[Snapshot, tuple[object, ...], RoundMembers] | None = None

    def at(self, current: Round) -> RoundMembers:
        """Return the membership that round ``current`` depends on."""
        snapshot, fenced, cached = self._membership.snapshot(), self._fenced(), self._cached
        saved = self._saved(snapshot, current.number)
        failures = self._membership.failures() if current.failed_starts else None
        others = (current, fenced, saved, failures)
        if cached is None or cached[0] is not snapshot or cached[1] != others:
            listing = self._membership.listing()
            made = run_membership(snapshot, listing, self._run_id, current, fenced, saved, failures)
            cached = self._cached = (snapshot, others, made)
        return cached[2]

    def _saved(self, snapshot: Snapshot, number: int) -> frozenset[str]:
        """Return the members that leave and have saved while others still save."""
        if not snapshot.drains or snapshot.commit is None or snapshot.commit.phase != "commit":
            return frozenset()
        votes = self._membership.votes()
        return frozenset(savers(snapshot, votes, self._run_id, number).values())
