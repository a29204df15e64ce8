# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted on purpose, to see that the simulation finds them.

Each takes one rule away from the production code, by name, for as long as one simulation runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import launcher_shim.c10d.rounds.decision
import launcher_shim.c10d.rounds.inputs
import launcher_shim.c10d.rounds.views
import muster.resuming
import rdzv.drain.decision
import rdzv.drain.gate
import rdzv.drain.transactions
import rdzv.members.registration
import rdzv.members.templates
import rdzv.shard_ledger
import rdzv.snapshot
from agent.drain.notice import OwnDrainRecord, Phase
from agent.drain.own import OwnDrain
from agent.hosts import HostDelivery
from agent.neighbour_watch import PeerWatch
from launcher_shim.c10d.rounds.decision import why_it_ends
from launcher_shim.c10d.rounds.decision_loop import DecisionLoop, RoundKey
from launcher_shim.c10d.rounds.inputs import RoundPolicy
from launcher_shim.c10d.rounds.mirrored_run import MirroredRun, live_round, newest_round
from launcher_shim.c10d.rounds.place import Claim
from launcher_shim.c10d.rounds.records import Node
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import KeptMasters, stage_name
from launcher_shim.c10d.rounds.views import View
from launcher_shim.c10d.rounds.world import Reform, in_rank_order, reform
from rdzv.drain.gate import Move
from rdzv.drain.inputs import DrainPolicy
from rdzv.drain.standing import granted
from rdzv.errors import StoreError
from rdzv.job import Watching
from rdzv.members.lease import RENEWALS_PER_TTL, FormerLease, MemberLease, registration_writes
from rdzv.members.registrar import Registrar
from rdzv.members.registration import Refuse
from rdzv.peers import Suspicion
from rdzv.reconcile import DueWrite
from rdzv.records.codec import decode_record, load_record, take
from rdzv.records.job import Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.quarantine import QuarantineDecision, after_death
from rdzv.store import Compare, Delete, GuardedWrites, KeyValue, Operation, Put
from tests.simulation.nodes import KEYS
from tests.simulation.ranks import Rank
from tests.simulation.shards import RankShards
from tests.support.models.world_mutations import MUTATIONS

Patch = AbstractContextManager[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Plant:
    """A bug; it is found in ``plot``, in one of ``seeds``."""

    plot: str
    seeds: range
    patches: Callable[[], list[Patch]]


PLANTS: dict[str, Plant] = {}
"""All of them, by name."""


def plant(plot: str, seeds: int, *, first: int = 0) -> Callable[[Callable[[], list[Patch]]], None]:
    """Enter a bug among the plants, under the name of the function that makes its patches.

    It is found within so many ``seeds``, from ``first`` on, the one that finds it now.
    """

    def enter(patches: Callable[[], list[Patch]]) -> None:
        name = patches.__name__.replace("_", "-")
        PLANTS[name] = Plant(plot, range(first, first + seeds), patches)

    return enter


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one bug for as long as the block runs; none for an empty name."""
    with ExitStack() as stack:
        for one in PLANTS[name].patches() if name else ():
            stack.enter_context(one)
        yield


# --- machines ---


@plant("machines", 30, first=6)
def one_suspicion_evicts() -> list[Patch]:
    """One member alone evicts another one."""
    return [patch("rdzv.peers.VOTES", 1)]


@plant("machines", 60, first=4)
def refused_connections_evict() -> list[Patch]:
    """A member is evicted though only its sidecar is away."""

    def counts(one: Suspicion, suspected: Collection[str], failed: object) -> bool:
        return one.by not in suspected

    return [patch("rdzv.peers.is_vote", counts)]


@plant("machines", 60, first=6)
def one_of_two_is_evicted() -> list[Patch]:
    """In a job of two each may evict the other one."""
    return [
        patch("rdzv.peers.VOTES", 1),
        patch("rdzv.peers.MEMBERS_MIN", 0),
    ]


@plant("machines", 20, first=53)
def suspicions_not_taken_back() -> list[Patch]:
    """A member that is suspected lets that stand, and so do those that reach it."""
    return [patch.object(PeerWatch, "_is_untrue", lambda self, one: False)]


# --- members ---


@plant("members", 30)
def lease_loss_ignored() -> list[Patch]:
    """A sidecar whose lease is lost renews it all the same, for ever."""
    original = Registrar._superseded

    async def renew(self: MemberLease, say: Callable[[str], None]) -> NoReturn:
        interval_s = self._ttl_s / RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._store.lease_keep_alive(self.id, timeout_s=interval_s)
            except StoreError:
                continue

    def superseded(self: Registrar, snapshot: Any) -> Any:
        gone = self.identity.member not in snapshot.members
        return None if gone else original(self, snapshot)

    return [
        patch.object(MemberLease, "renew", renew),
        patch.object(Registrar, "_superseded", superseded),
    ]


@plant("names-taken-over", 5)
def name_of_a_leaver_taken() -> list[Patch]:
    """A fresh pod takes its name over from one that drains, amid the save."""
    return [patch.object(rdzv.members.registration, "_after_the_leaver", lambda *_: None)]


@plant("refusals-in-peace", 30, first=71)
def former_lease_ends() -> list[Patch]:
    """A sidecar that starts again lets the lease before it end, though a full store grants none."""
    return [patch.object(FormerLease, "after_refusal", lambda *_: None)]


@plant("members", 30)
def watch_resumes_late() -> list[Patch]:
    """A watch begins one revision after the one that it should begin with."""

    async def follow(self: Watching) -> None:
        async for batch in self._store.watch(self._mirror.prefix, self._mirror.revision + 2):
            self._mirror.apply(batch.events, batch.revision)

    return [patch.object(Watching, "_follow", follow)]


@plant("evicted-members", 20)
def name_not_compared() -> list[Patch]:
    """A registration does not compare who holds the name by then."""
    original = registration_writes

    def writes(*args: Any) -> Any:
        compares, operations = original(*args)
        return compares[:1], operations

    return [patch("rdzv.members.registrar.registration_writes", writes)]


@plant("bounds-by-hand", 20)
def set_undone_by_the_next_pod() -> list[Patch]:
    """A pod makes the values of its template the job's, although that is in force already."""

    def adopted(job: Job, template: JobPolicy, *, former_wins: bool) -> Job:
        if template.template == job.template_in_force:
            return job.with_policy(template)
        return rdzv.members.templates.adopted(job, template, former_wins=former_wins)

    return [patch("rdzv.members.registration.adopted", adopted)]


@plant("restores-and-drains", 40, first=19)
def masters_forgotten() -> list[Patch]:
    """A sidecar that starts does not know its ranks' world where the store has lost its address."""

    async def read(self: KeptMasters) -> None:
        return

    return [patch.object(KeptMasters, "read", read)]


@plant("restores", 15, first=4)
def restored_name_fences() -> list[Patch]:
    """Whoever held a name when the store was backed up has it for ever."""
    original = rdzv.members.registration.plan

    def plan(snapshot: Any, identity: Any, held: Any, **known: Any) -> Any:
        holder = snapshot.incarnations.get(identity.member)
        if held is not None and holder is not None and holder.pod_uid != identity.pod_uid:
            return Refuse("planted")
        return original(snapshot, identity, held, **known)

    return [patch("rdzv.members.registrar.plan", plan)]


@plant("failing-pods", 8, first=5)
def one_alone_left_out() -> list[Patch]:
    """Where a world without a member fails, too, nothing else is tried: all begins again."""

    def alone(records: Any, *others: Any) -> QuarantineDecision:
        decision = after_death(records, *others)
        on_trial = any(one.out and not one.proven for one in records.values())
        if on_trial and any(one is not None and one.out for one in decision.records.values()):
            return replace(decision, records=dict.fromkeys(records))
        return decision

    return [patch("launcher_shim.c10d.quarantining.after_death", alone)]


@plant("drains", 60)
def drained_member_listed() -> list[Patch]:
    """Whoever drains stays listed."""
    original = rdzv.snapshot._reason_against

    def against(member: Any, snapshot: Any) -> str | None:
        return original(member, replace(snapshot, drains={}))

    return [patch("rdzv.snapshot._reason_against", against)]


@plant("unseen-drains", 20)
def lost_leaver_listed() -> list[Patch]:
    """A host that drained and was lost unseen is one that may return."""
    original = HostDelivery._left

    def left(self: HostDelivery, snapshot: Any) -> Any:
        return original(self, replace(snapshot, drains={}))

    return [patch.object(HostDelivery, "_left", left)]


@plant("unregistered", 10, first=8)
def departures_unseen() -> list[Patch]:
    """A sidecar that is started again follows nobody's departure until it has registered."""

    async def follow(self: HostDelivery, snapshot: Any) -> None:
        """Follow none."""

    return [patch.object(HostDelivery, "_follow_departures", follow)]


# --- rounds ---


@plant("never-started", 8)
def places_by_age() -> list[Patch]:
    """The oldest members have the places, whether or not their torchrun asks for one."""
    original = launcher_shim.c10d.rounds.inputs.run_membership

    def members(snapshot: Any, *others: Any) -> Any:
        oldest = (member.name for member in rdzv.snapshot.listing_of(snapshot).listed)
        return replace(original(snapshot, *others), listed=frozenset(oldest))

    return [patch("launcher_shim.c10d.rounds.inputs.run_membership", members)]


@plant("rounds", 100, first=71)
def round_completed_twice() -> list[Patch]:
    """A decision about the round does not compare what it rests on."""

    def decision(self: RoundKey, wanted: Any, word: Any) -> GuardedWrites:
        return [], [Put(self._keys.round, wanted.to_json())]

    return [patch.object(RoundKey, "decision", decision)]


@plant("refusals-and-cuts", 6, first=3)
def waiters_shown_before_they_are_written() -> list[Patch]:
    """Each sidecar ends its world by what it sees itself, also if nobody can write the next one."""
    original = Rendezvous.view_of

    def view_of(self: Rendezvous, claim: Claim) -> View:
        made, seen = original(self, claim), self._evaluator.evaluate()
        node = self.place.live_node(claim)
        due = why_it_ends(seen.snapshot, seen.standings, seen.reform)
        stays = node is None or node.finished or not due
        return replace(made, phantom=made.phantom or not stays)

    return [patch.object(Rendezvous, "view_of", view_of)]


@plant("earlier-lives-restored", 3)
def lost_rounds_entered() -> list[Patch]:
    """A round that the store had lost, or has lost keys of, counts as any other: it is entered by
    who was not in it yet, and who waits for a key there is given none."""
    known = vars(MirroredRun)["round"].fget
    return [
        patch.object(
            MirroredRun, "round", property(lambda run: replace(known(run), restored=False))
        ),
        patch.object(MirroredRun, "_lacks_keys", property(lambda run: False)),
    ]


@plant("unseen-drains", 4)
def leavers_excused() -> list[Patch]:
    """Nobody waits for who leaves the job to leave a lost world."""
    real = launcher_shim.c10d.rounds.decision._over

    def over(now: float, snapshot: Any, *others: Any) -> Any:
        leaving = snapshot.membership.leaving
        excused = replace(snapshot, membership=replace(snapshot.membership, granted=leaving))
        found, usual = real(now, excused, *others), real(now, snapshot, *others)
        opens = found.round is not None and found.round.number > snapshot.round.number
        return found if opens else usual

    return [patch("launcher_shim.c10d.rounds.decision._over", over)]


def _shown(change: Callable[[View, Any, Node], View]) -> list[Patch]:
    """Show each agent something else: ``change`` gets its view, the snapshot, and its node."""
    real = launcher_shim.c10d.rounds.views.view

    def shown(snapshot: Any, policy: Any, node: Node, **known: Any) -> View:
        return change(real(snapshot, policy, node, **known), snapshot, node)

    return [patch("launcher_shim.c10d.rounds.rendezvous.view", shown)]


@plant("unseen-drains", 4)
def leavers_not_told() -> list[Patch]:
    """A leaver does not see that its world is lost."""

    def change(made: View, snapshot: Any, node: Node) -> View:
        leaves = node.member in snapshot.membership.leaving
        return replace(made, phantom=made.phantom and not leaves)

    return _shown(change)


@plant("rounds", 3, first=25)
def worlds_without_the_gone() -> list[Patch]:
    """A world is shown without the nodes that have left it."""

    def change(made: View, snapshot: Any, node: Node) -> View:
        nodes = snapshot.nodes
        here = {name for name, one in nodes.items() if one.state != "left"} | {node.member}
        frozen = tuple(seat for seat in made.round.frozen if seat.member in here)
        return replace(made, round=replace(made.round, frozen=frozen))

    return _shown(change)


@plant("failures", 20)
def failure_is_final() -> list[Patch]:
    """A run that is closed by failure is closed for good, as one that has succeeded."""

    real = launcher_shim.c10d.rounds.decision.decide

    def shown(*args: Any, **known: Any) -> Any:
        snapshot, *others = args
        return launcher_shim.c10d.rounds.views.view(_as_success(snapshot), *others, **known)

    def decide(now: float, snapshot: Any, *others: Any) -> Any:
        return real(now, _as_success(snapshot), *others)

    return [
        patch("launcher_shim.c10d.rounds.rendezvous.view", shown),
        patch("launcher_shim.c10d.rounds.decision.decide", decide),
    ]


def _as_success(snapshot: Any) -> Any:
    closed = "success" if snapshot.round.closed else ""
    return replace(snapshot, round=replace(snapshot.round, closed=closed))


@plant("other-runs", 10, first=6)
def failed_run_ends_others() -> list[Patch]:
    """A run that begins anew after its failure begins the next life of the job, for all runs."""
    original = DecisionLoop._write_of

    def write_of(self: DecisionLoop, wanted: Any, word: Any) -> DueWrite:
        job = self._client.membership.snapshot().job
        if word.round.closed != "failure" or job is None:
            return original(self, wanted, word)
        following, life = (
            replace(job, generation=job.generation + 1),
            KEYS.in_generation(job.generation),
        )
        operations: list[Operation] = [
            Put(KEYS.job, following.to_json()),
            Delete(life.prefix, prefix=True),
        ]
        return DueWrite(lambda: ([], operations))

    return [patch.object(DecisionLoop, "_write_of", write_of)]


@plant("earlier-lives-restored", 4)
def restored_generation_followed() -> list[Patch]:
    """Whoever lives on while the store is restored goes back to the generation that it has."""
    original = rdzv.members.registration.plan

    def plan(snapshot: Any, identity: Any, held: Any, **known: Any) -> Any:
        if held is not None and snapshot.job is not None:
            held = replace(held, generation=min(held.generation, snapshot.job.generation))
        return original(snapshot, identity, held, **known)

    return [patch("rdzv.members.registrar.plan", plan)]


@plant("uneven-ends", 12, first=5)
def losses_untold_once_one_has_finished() -> list[Patch]:
    """Once one stands in the exit barrier, nobody is told that another one is lost."""

    def ends(snapshot: Any, *others: Any) -> str:
        return "" if snapshot.round.finishing else why_it_ends(snapshot, *others)

    return [patch("launcher_shim.c10d.rounds.decision.why_it_ends", ends)]


# --- drains ---


@plant("drains", 30)
def done_before_all_have_saved() -> list[Patch]:
    """One acknowledgement is enough."""
    original = rdzv.drain.decision._save

    def save(scene: Any, round: Any) -> Any:
        votes = rdzv.drain.decision._votes(scene, round)
        if saved := [member for member in votes if votes[member].acked is not None]:
            return original(scene, replace(round, members=tuple(saved)))
        return original(scene, round)

    return [patch("rdzv.drain.decision._save", save)]


@plant("drains", 40, first=3)
def vote_not_one_more() -> list[Patch]:
    """A vote is the highest boundary, where it has to be the one after it."""
    original = rdzv.drain.gate._vote

    def vote(here: Any, commit: Any, round: Any) -> Any:
        return original(
            replace(here, ranks=tuple(replace(rank, held=True) for rank in here.ranks)),
            commit,
            round,
        )

    return [patch("rdzv.drain.gate._vote", vote)]


@plant("slow-starts", 10, first=45)
def refused_worlds_train_on() -> list[Patch]:
    """The gate is open while a leave is granted without a save, as a rank has not begun."""
    original = rdzv.drain.gate._wanted

    def wanted(here: Any, commit: Any, *rest: Any) -> Any:
        return original(here, commit and replace(commit, refused=False), *rest)

    return [patch("rdzv.drain.gate._wanted", wanted)]


@plant("drains", 50, first=6)
def stale_gate() -> list[Patch]:
    """A rank looks at the gate that it read at the boundary before."""
    original = Rank._gate

    def gate(self: Rank) -> Any:
        step, seen = getattr(self, "_seen", (None, None))
        now = original(self)
        if step != self._told.step:
            self._seen = (self._told.step, now)  # type: ignore[attr-defined]
            return seen
        return now

    return [patch.object(Rank, "_gate", gate)]


@plant("drains", 30)
def released_before_done() -> list[Patch]:
    """The pod is told to go while its ranks still save."""
    original = OwnDrain._phase_now

    def phase(self: OwnDrain, snapshot: Any, drain: Any) -> Any:
        now = original(self, snapshot, drain)
        if now is not None and now.name == "saving":
            return Phase("released", "planted", "committed")
        return now

    return [patch.object(OwnDrain, "_phase_now", phase)]


@plant("cordons", 20)
def outlived_signs_stay() -> list[Patch]:
    """A drain by a sign stays, although its deadline has passed and the pod lives on."""
    return [patch.object(OwnDrainRecord, "outlived_boot_s", property(lambda notes: None))]


@plant("cordons", 20)
def granted_drains_stay() -> list[Patch]:
    """A sign that goes after the grant takes nothing back."""

    def cancel(keys: Any, snapshot: Any, uid: str) -> Any:
        over = uid in snapshot.drains and granted(snapshot.commit, snapshot.drains[uid])
        return "it is released" if over else rdzv.drain.transactions.cancel(keys, snapshot, uid)

    return [patch("tests.simulation.departures.cancel", cancel)]


@plant("drains", 20, first=5)
def saved_by_some() -> list[Patch]:
    """A step counts once the first pods have told of it: the others have it soon, too."""

    def of_round(round: Any, membership: Any, saves: Any) -> Any:
        told = [saves[member] for member in round.members if member in saves]
        told = [one for one in told if (one.run, one.round) == (round.run, round.number)]
        return [told[min(at, len(told) - 1)] for at in range(len(round.members))] if told else []

    return [patch("rdzv.drain.saves.of_round", of_round)]


@plant("drains", 20)
def cancelled_pods_let_go() -> list[Patch]:
    """A pod goes once its drain is cancelled, as if it had been let go."""
    original = OwnDrain._phase_now

    def now(self: OwnDrain, *seen: Any) -> Phase | None:
        phase = original(self, *seen)
        cancelled = phase is not None and phase.name == "cancelled"
        return Phase("released", "", "uncommitted") if cancelled else phase

    return [patch.object(OwnDrain, "_phase_now", now)]


@plant("cordons", 3, first=84)
def grants_outlive_cancels() -> list[Patch]:
    """Whoever was let go, and taken back, is let go at once where it drains again."""
    original = rdzv.drain.transactions.lift

    def lift(keys: Any, snapshot: Any, drain: Any, **others: Any) -> Any:
        compares, operations = original(keys, snapshot, drain, **others)
        commit = snapshot.commit
        if commit is not None and drain.pod_uid in commit.granted:
            operations[1] = replace(operations[1], value=commit.to_json())
        return compares, operations

    return [patch("rdzv.drain.transactions.lift", lift)]


# --- shards ---


@plant("shards", 20)
def shards_not_rolled_back() -> list[Patch]:
    """What is trained stays so, although the weights go back."""
    original = rdzv.shard_ledger.as_of

    def known(ledger: Any, start: int) -> Any:
        found = original(ledger, start)
        return found and rdzv.shard_ledger.sealed(ledger).trained

    return [patch("rdzv.shard_requests.as_of", known)]


@plant("shards", 20)
def saved_before_it_is_told() -> list[Patch]:
    """A step counts as saved before it is on record what it contains; that comes later."""

    async def save(self: RankShards, step: int) -> bool:
        self.log.save(step)
        return True

    return [patch.object(RankShards, "save", save)]


# --- those that only put something else in the place of a name ---


def _as(plot: str, seeds: int, changes: dict[str, Any], *, first: int = 0) -> Plant:
    def patches() -> list[Patch]:
        return [patch(name, other) for name, other in changes.items()]

    return Plant(plot, range(first, first + seeds), patches)


def _hasty_policy(*args: Any, **changes: Any) -> RoundPolicy:
    return replace(RoundPolicy(*args, **changes), confirm_s=0.0, orphan_hold_s=0.0)


def _never(cause: str) -> Callable[..., Reform]:
    def but_for(*args: Any) -> Reform:
        found = reform(*args)
        return Reform() if found.cause == cause else found

    return but_for


def _by_own_record(
    cls: type[T], kv: KeyValue, required: Collection[str] = (), /, **given: object
) -> T:
    name = {Member: "name", Incarnation: "member"}.get(cls)
    own = {} if name is None else {name: take(kv.key, load_record(kv.key, kv.value), name, str)}
    return decode_record(cls, kv, required, **given, **own)


_C10D = "launcher_shim.c10d"
_ORDER = f"{_C10D}.rounds.decision.in_rank_order"

PLANTS |= {
    # Whoever registers has the newest template, be it one that the job has gone by before.
    "former-template-wins": _as(
        "roll-outs", 20, {"rdzv.members.registration.is_upheld": lambda *_, **__: False}
    ),
    # A replacement waits for who has finished, as long as for a world that vanished as a whole.
    "finished-torchruns-awaited": _as(
        "last-uploads", 8, {f"{_C10D}.rounds.observations._is_anybody_at_work": lambda *_: True}
    ),
    # The reserve for a save is kept though nothing is to be saved any more.
    "last-uploads-cut-short": _as(
        "last-uploads",
        8,
        {"launcher_shim.pod.hold.OutgoingNotice.until_s": lambda notice, _: notice.deadline_s},
        first=1,
    ),
    # A pod whose run has succeeded counts as one that had time for a save, and let it pass.
    "success-forgotten": _as(
        "last-uploads",
        8,
        {
            "rdzv.drain.inputs.LiveRound.ends_well": lambda round, _: (
                round.live and round.finishing
            ),
            "rdzv.drain.decision._Scene._succeeded_with": lambda *_: False,
        },
        first=36,
    ),
    # Where no pod registers after the last newer one has gone, its template stays in force.
    "last-pod-of-a-roll-back-missed": _as(
        "roll-outs", 40, {"rdzv.members.gone.RollBack._left": lambda *_: None}
    ),
    # A late pod of a deleted Job takes the job over at once.
    "former-uids-forgotten": _as(
        "strays",
        4,
        {
            "rdzv.members.templates._former_uids": lambda *_: (),
            "rdzv.members.registration.CONTESTED_LEASE_TIMES": 0,
        },
    ),
    # Events that a server shows after it has said that it had are dropped.
    "late-events-dropped": _as(
        "early-progress", 4, {"tests.simulation.network.Link._find_out": lambda *_: None}
    ),
    # A watch whose connection breaks goes on after what it was told, and not what was shown.
    "false-progress-resumed": _as(
        "early-progress",
        15,
        {"tests.simulation.network.Link._resumed_after": staticmethod(lambda certain, told: told)},
        first=26,
    ),
    # Nobody is quarantined.
    "crash-loops-let-in": _as(
        "crash-loops", 8, {"rdzv.snapshot.Snapshot.quarantine_of": lambda *_: None}
    ),
    # Whoever is left out is never let in again.
    "left-out-for-ever": _as(
        "one-fails", 12, {f"{_C10D}.quarantining.after_time": lambda *_, **__: QuarantineDecision()}
    ),
    # A failure that hits all is held against each of them, whatever they make afterwards.
    "progress-clears-nobody": _as(
        "all-fail", 12, {f"{_C10D}.quarantining.after_progress": lambda *_: QuarantineDecision()}
    ),
    # Whoever fails first is left out, also where the others are too few for a world.
    "left-out-below-min": _as(
        "one-fails",
        12,
        {
            f"{_C10D}.quarantining.after_death": (
                lambda records, member, uid, stay, fit, _, terms: after_death(
                    records, member, uid, stay, fit, 0, terms
                )
            ),
            f"{_C10D}.rounds.inputs.RunSnapshot.candidates": lambda run, _: [
                node for node in run.asking() if node.member not in run.membership.quarantined
            ],
        },
        first=22,
    ),
    # Once no pod can start, a new pod waits for the next try like all others.
    "new-pods-wait": _as("none-starts", 40, {f"{_C10D}.rounds.decision._is_new": lambda _: False}),
    # After failed starts the next world waits, though others could train.
    "waits-though-others-can-train": _as(
        "fails-while-loading",
        15,
        {f"{_C10D}.rounds.decision._can_do_without": lambda *_: False},
        first=5,
    ),
    # The death of a torchrun counts, whatever its ranks have made.
    "progress-not-looked-at": _as(
        "failing-pods", 4, {"rdzv.records.quarantine.Stay.has_progress": lambda *_: False}
    ),
    # A world that loads for a while has made progress.
    "loading-is-progress": _as(
        "fails-while-loading",
        4,
        {
            "rdzv.records.quarantine.Stay.has_progress": lambda stay, terms: (
                stay.lasted_s >= terms.brief_s if stay.steps is None else stay.steps >= terms.steps
            )
        },
    ),
    # A host whose record vanishes is off the list at once, be it the last one.
    "lost-hosts-dropped-at-once": _as("cuts-of-all", 20, {"launcher_shim.hosts.CONFIRM_S": -1e9}),
    # Keys that Muster has not written are mirrored like its own.
    "foreign-keys-taken-in": _as("aliens", 4, {"rdzv.mirror.Mirror._is_kept": lambda *_: True}),
    # A member is who its record says, whatever its key says.
    "members-named-by-their-records": _as(
        "untrue-records",
        25,
        {"rdzv.records.job.decode_record": _by_own_record},
    ),
    # Ranks are given by address, wherever the nodes are, and whichever they had before.
    "ranks-by-address": _as(
        "blocks", 2, {_ORDER: lambda chosen, *_: sorted(chosen, key=lambda node: node.rank_order)}
    ),
    # Blocks stand together, in whatever order: nobody knows the world before.
    "ranks-forgotten": _as(
        "blocks",
        60,
        {_ORDER: lambda chosen, _, locations: in_rank_order(chosen, (), locations)},
        first=23,
    ),
    # What a launcher stores does not compare the registration of its sidecar.
    "launchers-not-fenced": _as(
        "evicted-rounds",
        30,
        {"rdzv.job.Registered.holds": lambda known: Compare(known.member_key, "version", ">", -1)},
        first=5,
    ),
    # Nobody is given time to return from a cut.
    "cut-taken-for-death": _as(
        "outages",
        60,
        {
            f"{_C10D}.rounds.observations._return_until": lambda *_, **__: -math.inf,
            f"{_C10D}.endpoint.RoundPolicy": _hasty_policy,
        },
        first=12,
    ),
    # The first world of a later life forms at once, whoever has trained in that life before.
    "lost-worlds-not-awaited": _as(
        "earlier-lives-restored",
        10,
        {f"{_C10D}.rounds.decision._worlds_return_until_s": lambda *_: -math.inf},
        first=9,
    ),
    # Who asks in a round that does not form is left to torch's time to join.
    "nobody-parked-below-min": _as(
        "scarce", 2, {f"{_C10D}.endpoint.RoundPolicy": partial(RoundPolicy, park_s=math.inf)}
    ),
    # A stage goes on from the last commit of the one before.
    "steps-shared-by-stages": _as(
        "stages", 8, {"rdzv.records.drain.LastCommit.is_of": lambda *_: True}, first=18
    ),
    # Every torchrun of a container comes to the run that the first one has closed.
    "stages-not-told-apart": _as(
        "stages", 2, {f"{_C10D}.rounds.stages.Stages.next": lambda self, container, run_id: run_id}
    ),
    # A container that is started again begins at the stage that the one before it was in.
    "containers-not-told-apart": _as(
        "stages",
        8,
        {
            f"{_C10D}.rounds.stages.Stages.next": lambda known, _, run_id: stage_name(
                run_id, 1 + known.finished.get(run_id, 0)
            )
        },
    ),
    # A container that is started again is to run what has ended well once more.
    "no-stage-passed-over": _as(
        "stages", 8, {f"{_C10D}.launchers.StageStarts._ended_well": lambda *_: False}
    ),
    # A torchrun that asks for anything is waited for, however long its workers take to end.
    "stuck-workers-awaited": _as(
        "stuck-workers",
        12,
        {f"{_C10D}.endpoint.RoundPolicy": partial(RoundPolicy, leave_s=math.inf)},
        first=4,
    ),
    # A rank begins its first step though the others of its round are held.
    "late-ranks-begin": _as(
        "slow-starts", 10, {"muster.boundary.begin": lambda rank, _: ("go", rank)}, first=48
    ),
    # What is written of drains compares no registration.
    "drains-not-fenced": _as(
        "evicted-drains", 20, {"rdzv.members.registrar.Registrar.fence": lambda *_: ()}
    ),
    # Drains look at the newest round alone, and who is not in it is in none.
    "leavers-of-other-runs-forgotten": _as(
        "other-runs-and-drains",
        10,
        {
            f"{_C10D}.generation.counting_round": lambda rounds, _: newest_round(rounds),
            "rdzv.drain.decision._Scene.trains_elsewhere": lambda *_: False,
        },
        first=8,
    ),
    # Whoever drains is let go below min.
    "min-not-compared": _as(
        "drains",
        40,
        {
            "rdzv.drain.decision.is_enough": lambda *_: True,
            f"{_C10D}.rounds.inputs.is_enough": lambda *_: True,
        },
        first=6,
    ),
    # What a restored store has lost of a rank's saves is handed to it again.
    "lost-saves-of-shards-unseen": _as(
        "shards-restored", 20, {"rdzv.shard_requests._forgotten": lambda *_: False}
    ),
    # What all ranks have saved counts, though a restored store has lost what is in it.
    "lost-saves-of-shards-on-record": _as(
        "shards-restored", 25, {"rdzv.drain.inputs.DrainingSnapshot.is_known": lambda *_: True}
    ),
    # Ranks wait for a store that takes no writes, for as long as it takes none.
    "gate-never-cut": _as(
        "refused-saves", 7, {"agent.drain.gate_writer.CUT_S": math.inf}, first=13
    ),
    # A world trains on though its job is paused.
    "pause-ignored": _as(
        "bounds", 40, {f"{_C10D}.rounds.own_node.reform": _never("pause")}, first=18
    ),
    # A world keeps more nodes than the sizes that were set since allow.
    "too-large-a-world-stays": _as(
        "sizes", 20, {f"{_C10D}.rounds.own_node.reform": _never("shrink")}
    ),
    # Nodes that keep coming replace each world before its first step.
    "first-steps-not-awaited": _as(
        "long-starts", 4, {f"{_C10D}.rounds.world.joins_from_s": lambda *_: -math.inf}
    ),
    # A torchrun that is silent is given up at once, however well its ranks are.
    "silent-agents-do-not-save": _as(
        "silent-agents", 6, {f"{_C10D}.rounds.decision_loop.WELL_S": math.inf}, first=1
    ),
    # A pod that cannot vote is awaited for ever.
    "mute-pods-awaited": _as(
        "broken-disks",
        6,
        {"agent.parts.DrainPolicy": lambda below_min: DrainPolicy(below_min, tries=1_000_000)},
    ),
    # The others wait for the save of a pod that has voted and cannot open its gate.
    "unasked-saves-awaited": _as(
        "broken-disks", 1, {"rdzv.drain.gate._unasked": lambda _: Move()}, first=8199
    ),
    # Newcomers are gathered for ever.
    "waves-never-over": _as("bounds", 40, {f"{_C10D}.rounds.own_node.reform": _never("join")}),
    # A world forms of all who ask, whatever sizes are allowed.
    "any-size-forms": _as(
        "sizes",
        20,
        {
            f"{_C10D}.rounds.inputs.RoundPolicy.largest": lambda policy, nodes: (
                policy.bounds_alone.largest(nodes)
            ),
            f"{_C10D}.rounds.inputs.RoundPolicy.smallest": property(
                lambda policy: policy.min_nodes
            ),
        },
    ),
}


# --- worlds that are cut off ---


@plant("long-cuts", 3, first=1)
def tag_of_no_world() -> list[Patch]:
    """All worlds save with one tag."""
    return [patch("muster.resuming._tag", lambda *place: "life00001-round000000-0123456789")]


@plant("drains", 6)
def tags_in_no_order() -> list[Patch]:
    """A tag tells worlds apart, and not which of them is the newer one."""
    original = muster.resuming._tag
    return [
        patch("muster.resuming._tag", lambda life, round, *at: original(life, 999_999 - round, *at))
    ]


@plant("long-cuts-held", 3, first=4)
def cut_never_holds() -> list[Patch]:
    """Ranks train on for as long as their pod has no lease, whatever the job says."""
    return [patch("rdzv.drain.gate.held_on_cut", lambda wanted, *others: wanted)]


@plant("long-cuts-held", 3, first=2)
def cut_holds_for_good() -> list[Patch]:
    """Ranks that wait for a lease still wait once their pod has one."""
    original = rdzv.drain.gate.held_on_cut

    def held(wanted: Any, shown: Any, leaseless_s: float, on_cut_s: float) -> Any:
        leaseless_s = max(leaseless_s, 1.0) if shown is not None and shown.on_cut else leaseless_s
        return original(wanted, shown, leaseless_s, on_cut_s)

    return [patch("rdzv.drain.gate.held_on_cut", held)]


# --- worlds that change in place ---


def _mutations(seeds: Mapping[str, range]) -> None:
    """Enter mistakes that the exploration of such worlds finds, too."""
    for name, told in seeds.items():
        PLANTS[f"in-place-{name}"] = Plant("in-place", told, partial(_of_worlds, name))


def _of_worlds(name: str) -> list[Patch]:
    return list(MUTATIONS[name].patches())


_mutations(
    {
        "number-tried-again": range(3, 10),
        "formed-before-the-state": range(12),
        "step-before-all-have-formed": range(12),
        "state-of-the-rank-behind": range(19, 20),
    }
)


@plant("in-place", 12)
def sigterm_before_formed() -> list[Patch]:
    """A pod that leaves a world in place goes before the others have its state."""
    original = live_round

    def hurried(run_id: str, snapshot: Any, *others: Any) -> Any:
        live = original(run_id, snapshot, *others)
        goes = snapshot.membership.leaving if live.in_place else frozenset()
        return replace(live, let_go=live.let_go | goes)

    return [patch("launcher_shim.c10d.rounds.rendezvous.live_round", hurried)]


@plant("in-place", 12)
def own_round_of_a_real_number() -> list[Patch]:
    """A newcomer's torchrun is in a round of its own with the number of the real one."""
    return [patch("launcher_shim.c10d.rounds.views.own_round", lambda seat: 0)]
