# SPDX-License-Identifier: Apache-2.0
"""A small world of sidecars, agents and one store, to be explored step by step.

Decisions, views and handing are the real pure functions. What is modelled is everything around
them that can go wrong: mirrors that lag, writes whose answer is lost or that land late, leases that
lapse, cuts, crashes, connections that close, pods that are drained, fillers. Each step is one
atomic change, and any order of steps may happen. Time is not modelled: whatever takes time may take
any. A member's age is its place among the names; there may be more members than places. Of the
commit only so much is: while a world is whole it may save, and then let go and let in; who is in no
whole world has nothing to save, and is let go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Literal, NamedTuple, get_args

from launcher_shim.c10d.rounds.decision import decide, why_it_ends
from launcher_shim.c10d.rounds.inputs import RoundMembers, RoundPolicy, RunSnapshot
from launcher_shim.c10d.rounds.observations import LOST, RoundObservations, Standings, stand
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from launcher_shim.c10d.rounds.views import View, hand, view
from launcher_shim.c10d.rounds.world import Reform, reform
from tests.support.models.explorer import Broken, put

NOW = 1000.0
NEVER = -1e9
CONFIRMED = NOW - 10
HELD = NOW - 100

Mode = Literal["off", "joining", "meeting", "in", "failed"]
Nodes = tuple[Node | None, ...]
Fault = Literal[
    "kill", "fail", "cut", "lapse", "crash", "lose_answer", "land_late", "close", "give_up",
    "hurry", "drain", "cancel", "replace", "set", "refuse",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True)
class Rules:
    """The size of the job, and what is left out of the protocol on purpose.

    ``calm``: nothing goes wrong, so that no world may form twice. ``commits``: its ranks save
    before anybody is let in, or let go from a whole world. ``meets``: who was handed a world waits
    until its first rank has said where they meet, or for a filler. ``never``: members whose
    launcher never comes, so that any call for them may be over at any moment. ``waits_long``: one
    that asks in an open round is parked there, sooner or later. ``later``: the policy that
    somebody may set in the place of ``policy``, and ``policy`` again after that.
    """

    nodes: int
    policy: RoundPolicy
    faults: tuple[Fault, ...] = FAULTS
    commits: bool = True
    drains_compare: bool = True
    leavers_excused: bool = False
    leavers_told: bool = True
    saves_end_rounds: bool = True
    never: str = ""
    waits_long: bool = False
    keeps_places: bool = True
    range_compare: bool = True
    whole_world: bool = True
    by_create_revision: bool = False
    calm: bool = False
    incarnation_compare: bool = True
    meets: bool = False
    written: bool = True
    failures_reopen: bool = True
    later: RoundPolicy | None = None
    reforms: Callable[..., Reform] = reform

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("abcdefgh"[: self.nodes])


class Drains(NamedTuple):
    """Who was told to go; ``saved``: the round in which somebody was let go or in, ``admitted``."""

    leaving: tuple[bool, ...]
    granted: tuple[bool, ...]
    saved: int = -1
    admitted: int = -1


class Mirror(NamedTuple):
    """What a sidecar knows of the store."""

    revision: int
    round: Round
    nodes: Nodes
    created: tuple[int, ...]
    registered: tuple[int, ...]
    drains: Drains
    is_set: bool = False


class Late(NamedTuple):
    """A write that was sent and may still land."""

    node: Node
    known: int
    incarnation: int
    round_revision: int | None


class Side(NamedTuple):
    """One sidecar and its agent. ``own``: what the record should be.

    ``filled``: the round that its agent was given a filler for.
    """

    up: bool
    connected: bool
    incarnation: int
    own: Node | None
    stored: Node | None
    mirror: Mirror
    missing: tuple[int, ...]
    parked: bool
    late: Late | None
    mode: Mode
    nonce: int
    asked: int
    world: tuple[int, tuple[Seat, ...]] | None
    filled: int = -1


class State(NamedTuple):
    """Everything. ``asked`` and ``shown`` are ghosts: what was true when the round was frozen.

    ``said``: the newest round whose first rank has said where they meet. ``is_set``: the policy is
    the later one. ``full``: the store takes no writes; leases end all the same.
    """

    revision: int
    round: Round
    nodes: Nodes
    created: tuple[int, ...]
    registered: tuple[int, ...]
    drains: Drains
    is_set: bool
    drained_at: int
    sides: tuple[Side, ...]
    faults: int
    asked: tuple[Seat | None, ...]
    shown: tuple[Seat, ...] | None
    said: int = -1
    full: bool = False

    @property
    def mirror(self) -> Mirror:
        return Mirror(*self[:7])


Step = tuple[str, State]


def start(rules: Rules, faults: int) -> State:
    """Every sidecar is registered, every torchrun connected, nobody has asked."""
    count = rules.nodes
    empty: Nodes = (None,) * count
    nobody = Drains((False,) * count, (False,) * count)
    first = Mirror(1, Round(), empty, (0,) * count, (1,) * count, nobody)
    side = Side(True, True, 1, None, None, first, (0,) * count, False, None, "joining", 1, 0, None)
    sides = tuple(side._replace(mode="off") if n in rules.never else side for n in rules.names)
    return State(*first, 0, sides, faults, (None,) * count, None)


# --- what a sidecar sees ---


class Sight(NamedTuple):
    """What one sidecar makes of its mirror."""

    view: View | None
    standings: Standings
    handed: Node | None
    decided: Round | None
    hurried: Round | None
    world: tuple[Seat, ...]


def _policy(rules: Rules, known: Mirror | State) -> RoundPolicy:
    return rules.later if known.is_set and rules.later else rules.policy


def _membership(rules: Rules, mirror: Mirror) -> RoundMembers:
    drains, number = mirror.drains, mirror.round.number
    leaving = _those(rules, drains.leaving)
    return RoundMembers(
        listed=_those(rules, mirror.registered) - leaving,
        leaving=leaving,
        granted=_those(rules, drains.granted),
        ages={name: age for age, name in enumerate(rules.names)},
        joins_wait=rules.commits and drains.admitted != number,
        ends_round=rules.saves_end_rounds and drains.saved == number,
    )


def _those(rules: Rules, which: tuple[int, ...]) -> frozenset[str]:
    return frozenset(name for name, one in zip(rules.names, which, strict=True) if one)


def _told_apart_by_create_revision(nodes: Nodes, created: tuple[int, ...]) -> Nodes:
    return tuple(
        node and replace(node, nonce=str(created[at]), ask=0) for at, node in enumerate(nodes)
    )


@cache
def look(
    rules: Rules, me: int, mirror: Mirror, own: Node | None, missing: tuple[int, ...], parked: bool
) -> Sight:
    """Call the real functions on what sidecar ``me`` sees."""
    nodes, mine = mirror.nodes, own
    if rules.by_create_revision:
        nodes = _told_apart_by_create_revision(nodes, mirror.created)
        mine = own and replace(own, nonce=str(mirror.created[me]), ask=0)
    membership = _membership(rules, mirror)
    current = mirror.round
    if current.closed and not rules.failures_reopen:
        current = replace(current, closed="success")
    word = RunSnapshot(
        mirror.revision,
        current if rules.keeps_places else replace(current, former=()),
        {n: node for n, node in zip(rules.names, nodes, strict=True) if node},
        membership,
    )
    since = (NOW, CONFIRMED, HELD)
    seen = RoundObservations(
        healthy_since_s=NEVER,
        missing_s={
            seat: since[missing[rules.names.index(seat.member)]] for seat in mirror.round.frozen
        },
        round_number=mirror.round.number,
        met_min_s=NOW,
    )
    known = word
    if mirror.round.complete and rules.leavers_excused:
        known = replace(word, membership=replace(membership, granted=membership.leaving))
    policy = _policy(rules, mirror)
    reforms = rules.reforms(NOW, word, seen, policy)
    decided = decide(NOW, known, seen, policy, reforms).round
    hurried = decide(NOW, known, replace(seen, met_min_s=NEVER), policy, reforms).round
    shown = word if mine is None else replace(word, nodes={**word.nodes, rules.names[me]: mine})
    standings = stand(NOW, shown, seen, policy)
    seen_by_agent = None
    handed = None
    if mine is not None:
        seen_by_agent = view(
            shown, policy, mine, parked=parked, parks=True, waited_s=math.inf if parked else 0.0
        )
        if rules.names[me] in membership.leaving and not rules.leavers_told:
            seen_by_agent = replace(seen_by_agent, phantom=False)
        if not rules.written and seen_by_agent.role == "participant":
            due = why_it_ends(shown, standings, reforms)
            seen_by_agent = replace(seen_by_agent, phantom=seen_by_agent.phantom or bool(due))
        handed = hand(shown, mine)
        if handed is not None and own is not None and rules.by_create_revision:
            handed = replace(handed, nonce=own.nonce, ask=own.ask + handed.ask)
    frozen = mirror.round.frozen
    world = (
        frozen
        if rules.whole_world
        else tuple(seat for seat in frozen if standings.of[seat] not in LOST)
    )
    return Sight(seen_by_agent, standings, handed, decided, hurried, world)


def sight(rules: Rules, me: int, side: Side) -> Sight:
    """What sidecar ``me`` makes of what it knows."""
    return look(rules, me, side.mirror, side.own, side.missing, side.parked)


# --- states that differ in names only ---


def essence(rules: Rules, state: State) -> tuple[object, ...]:
    """A key under which two states are one if they differ in how far numbers have grown only.

    Revisions, round numbers, connections, asks and incarnations are compared with each other, and
    nothing is computed from them but a next one: only their order counts.
    """
    mirrors = {id(s.mirror): s.mirror for s in state.sides}
    mirrors[id(state)] = state.mirror
    nodes = [n for m in mirrors.values() for n in m.nodes if n]
    for side in state.sides:
        nodes += [n for n in (side.own, side.stored, side.late and side.late.node) if n]
    rounds = [m.round for m in mirrors.values()]
    seats = [seat for r in rounds for seat in r.frozen]
    seats += [seat for seat in state.asked if seat]
    seats += [seat for side in state.sides if side.world for seat in side.world[1]]
    revisions = {0, *(n.mod_revision for n in nodes), *(r.mod_revision for r in rounds)}
    numbers = {n.round for n in nodes} | {r.number for r in rounds}
    numbers |= {state.said, *(side.filled for side in state.sides)}
    incarnations = {0}
    revisions.add(state.drained_at)
    for mirror in mirrors.values():
        revisions |= {mirror.revision, *mirror.created}
        incarnations.update(mirror.registered)
        numbers |= {mirror.drains.saved, mirror.drains.admitted}
    for side in state.sides:
        incarnations.add(side.incarnation)
        if side.late:
            revisions |= {side.late.known, side.late.round_revision or 0}
            incarnations.add(side.late.incarnation)
        if side.world:
            numbers.add(side.world[0])
    rev, number, inc = _ranks(revisions), _ranks(numbers), _ranks(incarnations)
    tries = {n.seat for n in nodes} | set(seats)
    tries |= {
        Seat(name, str(side.nonce), side.asked)
        for name, side in zip(rules.names, state.sides, strict=True)
    }
    asks, nonces = {}, {}
    for name in rules.names:
        asks[name] = _ranks({ask for member, _, ask in tries if member == name})
        nonces[name] = _ranks({int(nonce) for member, nonce, _ in tries if member == name})

    def of_seat(seat: Seat) -> tuple[object, ...]:
        name = seat.member
        return (name, nonces[name][int(seat.nonce)], asks[name][seat.ask])

    def of_node(n: Node | None) -> tuple[object, ...] | None:
        if n is None:
            return None
        return (n.state, *of_seat(n.seat), number[n.round], n.left_reason, rev[n.mod_revision])

    def of_mirror(m: Mirror) -> tuple[object, ...]:
        r = m.round
        return (
            rev[m.revision],
            number[r.number],
            r.complete,
            r.closed,
            rev[r.mod_revision],
            bool(r.ends),
            *map(of_seat, r.frozen),
            r.former,
            *map(of_node, m.nodes),
            *(rev[c] for c in m.created),
            *(inc[i] for i in m.registered),
            *m.drains.leaving,
            *m.drains.granted,
            number[m.drains.saved],
            number[m.drains.admitted],
            m.is_set,
        )

    described = {at: of_mirror(m) for at, m in mirrors.items()}
    sides = tuple(
        (
            s.up,
            s.connected,
            inc[s.incarnation],
            of_node(s.own),
            of_node(s.stored),
            described[id(s.mirror)],
            s.missing,
            s.parked,
            s.late
            and (
                of_node(s.late.node),
                rev[s.late.known],
                inc[s.late.incarnation],
                rev[s.late.round_revision or 0],
            ),
            s.mode,
            of_seat(Seat(rules.names[at], str(s.nonce), s.asked)),
            s.world and (number[s.world[0]], *map(of_seat, s.world[1])),
            number[s.filled],
        )
        for at, s in enumerate(state.sides)
    )
    asked = tuple(of_seat(seat) if seat else None for seat in state.asked)
    shown = None if state.shown is None else tuple(map(of_seat, state.shown))
    ghosts = (asked, shown)
    said = number[state.said]
    left = (state.faults, state.full)
    return (described[id(state)], rev[state.drained_at], sides, *left, said, *ghosts)


def _ranks(values: set[int]) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(values))}


# --- how it is explored ---


@dataclass(frozen=True)
class Rounds:
    """The model of rounds under ``rules``; ``faults``: how many things go wrong."""

    rules: Rules
    faults: int = 0
    rare: float = 0.1

    def start(self) -> State:
        return start(self.rules, self.faults)

    def begin_walk(self) -> None:
        pass

    def offered(self, state: State, random: Random | None) -> tuple[list[Step], Iterator[Step]]:
        wrong = _go_wrong(self.rules, state) if state.faults else iter(())
        less = ((name, after._replace(faults=state.faults - 1)) for name, after in wrong)
        return list(_progress(self.rules, state)), less

    def check_end(self, state: State) -> None:
        check_end(self.rules, state)

    def key(self, state: State) -> tuple[object, ...]:
        return essence(self.rules, state)

    def pick(self, random: Random, state: State, steps: list[Step]) -> Step:
        return random.choice(steps)


def check_end(rules: Rules, state: State) -> None:
    """Nothing is left to do: all that live are one world, or wait for enough others."""
    leaving = state.drains.leaving
    live = [
        me
        for me, side in enumerate(state.sides)
        if side.up and not leaving[me] and rules.names[me] not in rules.never
    ]
    if state.round.closed == "success":
        return
    if state.round.closed and live:
        raise Broken(f"it ends closed by {state.round.closed}, though {live} live")
    if any(side.up and leaving[me] for me, side in enumerate(state.sides)):
        raise Broken(f"it ends with {state.drains}, and nobody lets them go")
    if live and state.round.complete and state.drains.saved == state.round.number:
        raise Broken(f"it ends in round {state.round.number}, whose ranks stand still for ever")
    inside = [me for me in live if state.sides[me].mode == "in"]
    policy = _policy(rules, state)
    expected = 0 if policy.paused else policy.largest(len(live))
    nowhere = [me for me in inside if state.sides[me].filled == state.round.number]
    if nowhere:
        raise Broken(f"it ends with {nowhere} in a world of nowhere")
    worlds = {state.sides[me].world for me in inside}
    members = [rules.names.index(seat.member) for seat in state.round.frozen]
    if len(inside) != expected or len(worlds) > 1:
        raise Broken(f"it ends with {inside} in {worlds}, {live} live")
    if expected and (not state.round.complete or sorted(members) != inside):
        raise Broken(f"it ends with {state.round}, but {inside} are in it")


# --- steps ---


def _progress(rules: Rules, state: State) -> Iterator[Step]:
    if state.full:
        yield "the store takes writes again", state._replace(full=False)
    else:
        yield from _let_go_and_in(rules, state)
    for me, side in enumerate(state.sides):
        if not side.up:
            if state.registered[me]:
                yield f"the lease of {me} ends", _lapse(state, me)
            continue
        if side.late is not None and not state.full:
            yield f"a late write of {me} lands", _land(rules, state, me)
        if side.connected:
            yield from _connected(rules, state, me)
        else:
            yield f"{me} is connected again", _mend(state, me)
            if state.registered[me]:
                yield f"the lease of {me} ends", _lapse(state, me)
        if side.connected and rules.never and not state.full:
            yield from _hurry(rules, state, me)
        if rules.names[me] in rules.never:
            continue
        done = state.round.closed == "success" or state.drains.granted[me]
        if side.mode == "off" and not done:
            yield (
                f"a new torchrun starts at {me}",
                _with(
                    state,
                    me,
                    mode="joining",
                    nonce=side.nonce + 1,
                    asked=0,
                    world=None,
                    parked=False,
                    filled=-1,
                ),
            )
        elif side.mode != "off":
            yield from _agent(rules, state, me)


def _let_go_and_in(rules: Rules, state: State) -> Iterator[Step]:
    """Grants and admissions, as the drain state machine makes them; then the leaver's end."""
    drains, number = state.drains, state.round.number
    whole = _is_whole(rules, state)
    frozen = [rules.names.index(seat.member) for seat in state.round.frozen]
    for me, side in enumerate(state.sides):
        if drains.leaving[me] and not drains.granted[me]:
            inside = me in frozen and _here(rules, state, me)
            if whole or not inside or not rules.commits:
                saved = number if whole and inside and rules.commits else drains.saved
                granted = put(drains.granted, me, True)
                yield f"{me} may go", _drained(state, granted=granted, saved=saved)
        elif drains.granted[me] and side.up:
            gone = _close_connection(rules, state, me)
            yield f"{me} is terminated", gone if side.mode != "off" else _down(state, me)
    policy = _policy(rules, state)
    asks = [
        node
        for at, node in enumerate(state.nodes)
        if node and node.state == "asking" and not drains.leaving[at] and state.registered[at]
    ]
    newcomers = [node for node in asks if node.seat not in state.round.frozen]
    size = policy.largest(len(frozen) + len(newcomers))
    if rules.commits and whole and drains.admitted != number:
        if policy.paused:
            yield "all save for a pause", _drained(state, admitted=number, saved=number)
        elif 0 < size < len(frozen):
            yield "all save to be fewer", _drained(state, admitted=number, saved=number)
        elif size > len(frozen):
            yield "newcomers are let in", _drained(state, admitted=number, saved=number)


def _is_whole(rules: Rules, state: State) -> bool:
    """Whether all of the world can save: each was handed it, and is still there."""
    return state.round.complete and all(
        _here(rules, state, rules.names.index(seat.member)) for seat in state.round.frozen
    )


def _here(rules: Rules, state: State, me: int) -> bool:
    node = state.nodes[me]
    return (
        node is not None
        and state.round.complete
        and node.state == "in"
        and node.round == state.round.number
    )


def _drained(state: State, **changes: object) -> State:
    drains = state.drains._replace(**changes)  # type: ignore[arg-type]
    return state._replace(revision=state.revision + 1, drains=drains)


def _down(state: State, me: int) -> State:
    return _with(state, me, up=False, connected=False, mode="off", world=None, late=None)


def _connected(rules: Rules, state: State, me: int) -> Iterator[Step]:
    side = state.sides[me]
    if state.registered[me] != side.incarnation and not state.full:
        yield f"{me} registers again", _register(state, me)
    if side.mirror != state.mirror:
        yield f"{me} sees the newest", _sync(state, me)
    for other, level in _missed(rules, side):
        levels = put(side.missing, other, level)
        yield f"{me} has missed {other} for long", _with(state, me, missing=levels)
    if state.full:
        return
    if _due(side):
        yield f"{me} writes its node", _write(rules, state, me)
        return
    seen = sight(rules, me, side)
    if seen.handed is not None and side.own is not None:
        yield f"{me} hands over", _hand(rules, state, me, seen.handed)
    if seen.decided is not None:
        after = _carry_out(rules, state, me, seen.decided)
        if after is not None:
            yield f"{me} decides", after


def _missed(rules: Rules, side: Side) -> Iterator[tuple[int, int]]:
    """Frozen nodes that are away, and what that comes to once it has lasted."""
    frozen = [rules.names.index(seat.member) for seat in side.mirror.round.frozen]
    away = [at for at in frozen if side.mirror.nodes[at] is None]
    level = 2 if len(away) == len(frozen) else 1
    for at in away:
        if side.missing[at] < level:
            yield at, level


def _agent(rules: Rules, state: State, me: int) -> Iterator[Step]:
    """What torch does with what it is shown; nothing while its compare-and-set is held."""
    side = state.sides[me]
    if _due(side) or (side.stored and side.mirror.revision < side.stored.mod_revision):
        return
    if side.own is None or side.own.nonce != str(side.nonce):
        yield f"the agent of {me} asks", _ask(rules, state, me)
        return
    shown = sight(rules, me, side).view
    assert shown is not None
    if side.mode == "joining":
        after = _join(rules, state, me, shown)
        if after is not None:
            yield f"the agent of {me} joins", after
    elif side.mode == "meeting":
        yield from _meet(state, me)
    elif side.mode == "in" and shown.phantom:
        if shown.role == "participant" and not _is_written(state, side):
            raise Broken(f"{me} is told to form again, and nobody has written that")
        if rules.calm:
            raise Broken(f"{me} is told to form again, though nothing has happened")
        yield f"the agent of {me} forms again", _leave_world(rules, state, me, shown)


def _join(rules: Rules, state: State, me: int, shown: View) -> State | None:
    side = state.sides[me]
    if shown.closed and shown.role != "participant":
        return _close_connection(rules, state, me)
    match shown.role:
        case "participant":
            return _finish(rules, state, me)
        case "apart":
            return _ask(rules, state, me)
        case "promoted":
            return _with(state, me, parked=False)
        case "parked" if not side.parked:
            return _with(state, me, parked=True)
        case "asking" if rules.waits_long and not side.mirror.round.complete:
            return _with(state, me, parked=True)
    return None


def _finish(rules: Rules, state: State, me: int) -> State:
    """The agent is handed a world: check that it is the one that everybody is handed."""
    side = state.sides[me]
    number, world = side.mirror.round.number, sight(rules, me, side).world
    if number == state.round.number:
        if state.asked[me] != _true_seat(rules, side, me):
            raise Broken(f"{me} was handed round {number}, which it did not ask for")
        if state.shown not in (None, world):
            raise Broken(f"{me} was handed {world}, others {state.shown}")
        state = state._replace(shown=world)
    mode: Mode = "meeting" if rules.meets else "in"
    return _with(state, me, mode=mode, world=(number, world))


def _is_written(state: State, side: Side) -> bool:
    """Whether the store says that the world of ``side`` must form again, or has."""
    assert side.world is not None
    current = state.round
    return bool(current.ends or current.closed) or current.number > side.world[0]


def _meet(state: State, me: int) -> Iterator[Step]:
    """The first rank says where; the others wait for that, or for a filler."""
    side = state.sides[me]
    assert side.world is not None
    assert side.own is not None
    number, world = side.world
    registered = side.connected and state.registered[me] == side.incarnation
    if world[0].member == side.own.member:
        if registered:
            said = state._replace(said=max(state.said, number))
            yield f"{me} says where round {number} meets", _with(said, me, mode="in")
    elif side.connected and state.said >= number:
        yield f"{me} meets the others", _with(state, me, mode="in")
    elif side.mirror.round.number > number or side.mirror.round.is_ending:
        yield f"{me} is given a filler", _with(state, me, mode="in", filled=number)


def _ask(rules: Rules, state: State, me: int) -> State:
    side = state.sides[me]
    ask = side.own.ask + 1 if side.own else 1
    node = Node(rules.names[me], "asking", str(side.nonce), ask, "10.0.0.1", 7, 0)
    return _with(state, me, own=node, asked=ask)


def _leave_world(rules: Rules, state: State, me: int, shown: View) -> State:
    side = state.sides[me]
    assert side.own is not None
    own = side.own
    if shown.role == "participant":
        own = replace(own, state="left", left_reason="exit", round=0)
    return _with(state, me, own=own, mode="joining", world=None, filled=-1)


def _true_seat(rules: Rules, side: Side, me: int) -> Seat:
    return Seat(rules.names[me], str(side.nonce), side.own.ask if side.own else 0)


# --- the sidecar's writes ---


def _payload(node: Node | None) -> Node | None:
    return node and replace(node, mod_revision=0)


def _due(side: Side) -> bool:
    return side.own is not None and _payload(side.stored) != _payload(side.own)


def _write(rules: Rules, state: State, me: int) -> State:
    side = state.sides[me]
    assert side.own is not None
    late = Late(side.own, _mod(side.stored), side.incarnation, None)
    after = _apply(rules, state, me, late)
    return _learn(after or state, me)


def _hand(rules: Rules, state: State, me: int, handed: Node) -> State:
    side = state.sides[me]
    late = Late(handed, _mod(side.stored), side.incarnation, side.mirror.round.mod_revision)
    after = _apply(rules, state, me, late)
    if after is None:
        return _learn(state, me)
    return _learn(_with(after, me, own=_payload(handed)), me)


def _apply(rules: Rules, state: State, me: int, write: Late) -> State | None:
    """One transaction on the own key, or None where a compare fails."""
    if rules.incarnation_compare and state.registered[me] != write.incarnation:
        return None
    if _mod(state.nodes[me]) != write.known:
        return None
    if write.round_revision not in (None, state.round.mod_revision):
        return None
    revision = state.revision + 1
    created = state.created
    if rules.by_create_revision and state.nodes[me] is None:
        created = put(created, me, revision)
    node = replace(write.node, mod_revision=revision)
    return state._replace(revision=revision, nodes=put(state.nodes, me, node), created=created)


def _learn(state: State, me: int) -> State:
    """A transaction was answered: its sidecar knows its own key."""
    return _with(state, me, stored=state.nodes[me])


def _land(rules: Rules, state: State, me: int) -> State:
    late = state.sides[me].late
    assert late is not None
    after = _apply(rules, state, me, late)
    if after is not None and late.incarnation != state.registered[me]:
        raise Broken(f"incarnation {late.incarnation} of {me} wrote, it is stale")
    return _with(after or state, me, late=None)


def _carry_out(rules: Rules, state: State, me: int, decided: Round) -> State | None:
    """Complete or open the round; check what must hold then. None where a compare fails."""
    mirror = state.sides[me].mirror
    if state.registered[me] != state.sides[me].incarnation:
        return None
    if state.round.mod_revision != mirror.round.mod_revision:
        return None
    if rules.range_compare and any(_mod(n) > mirror.revision for n in state.nodes):
        return None
    if rules.drains_compare and state.drained_at > mirror.revision:
        return None
    if state.round.closed == "success":
        raise Broken(f"round {decided.number} after the run was closed")
    asked: list[Seat | None] = [None] * rules.nodes
    if decided.ends:
        if replace(decided, ends="") != state.round:
            raise Broken(f"{decided} ends {state.round}")
        asked = list(state.asked)
    elif decided.complete:
        _check_frozen(rules, state, decided, _policy(rules, mirror))
        for seat in decided.frozen:
            at = rules.names.index(seat.member)
            node = state.nodes[at] or mirror.nodes[at]
            asked[at] = node.seat if node else None
    else:
        _check_over(rules, state, mirror)
    revision = state.revision + 1
    return state._replace(
        revision=revision,
        round=replace(decided, mod_revision=revision),
        asked=tuple(asked),
        shown=state.shown if decided.ends else None,
    )


def _check_frozen(rules: Rules, state: State, decided: Round, policy: RoundPolicy) -> None:
    size = len(decided.frozen)
    if policy.paused or policy.largest(size) != size:
        raise Broken(f"a world of {size}")
    for seat in decided.frozen:
        node = state.nodes[rules.names.index(seat.member)]
        if node is not None and node.state != "asking":
            raise Broken(f"{seat} is frozen, but it is {node.state}")
        if state.drains.leaving[rules.names.index(seat.member)]:
            raise Broken(f"{seat} is frozen, but it leaves")
    _check_places(rules, state, decided)


def _check_places(rules: Rules, state: State, decided: Round) -> None:
    """Who was in the world before and asks again has lost its place to nobody."""
    frozen = {seat.member for seat in decided.frozen}
    strangers = frozen - set(state.round.former)
    for member in state.round.former:
        at = rules.names.index(member)
        node = state.nodes[at]
        asks = node is not None and node.state == "asking" and state.registered[at]
        if strangers and asks and member not in frozen and not state.drains.leaving[at]:
            raise Broken(f"{member} trained and asks, but {sorted(strangers)} have the places")


def _check_over(rules: Rules, state: State, mirror: Mirror) -> None:
    for seat in state.round.frozen:
        at = rules.names.index(seat.member)
        node = state.nodes[at]
        if node is None or node.state == "left":
            continue
        if not rules.by_create_revision and node.seat != seat:
            continue
        if state.drains.granted[at]:
            continue
        raise Broken(f"round {state.round.number} is over, but {seat} is {node.state} in it")


# --- what goes wrong, and comes back ---


def _go_wrong(rules: Rules, state: State) -> Iterator[Step]:
    may: Callable[[Fault], bool] = rules.faults.__contains__
    if may("refuse") and not state.full:
        yield "the store refuses writes", state._replace(full=True)
    if rules.later is not None and may("set"):
        changed = state._replace(revision=state.revision + 1, is_set=not state.is_set)
        yield "the bounds are set", changed
    for me, side in enumerate(state.sides):
        leaving = state.drains.leaving[me]
        if not side.up:
            if leaving and not state.registered[me] and may("replace"):
                yield f"a new pod takes the name of {me}", _replaced(state, me)
            continue
        if leaving and not state.drains.granted[me] and may("cancel"):
            stays = put(state.drains.leaving, me, False)
            yield f"the drain of {me} is cancelled", _drained(state, leaving=stays)
        if not leaving and may("drain"):
            leaves = _drained(state, leaving=put(state.drains.leaving, me, True))
            yield f"{me} is told to go", leaves._replace(drained_at=leaves.revision)
        if side.mode != "off" and may("kill"):
            yield f"the torchrun of {me} is killed", _close_connection(rules, state, me)
        if side.mode == "in" and not _due(side) and may("fail"):
            shown = sight(rules, me, side).view
            assert shown is not None
            yield f"the workers of {me} fail", _leave_world(rules, state, me, shown)
        if may("crash"):
            yield f"the node {me} crashes", _down(state, me)
        if side.connected and may("cut"):
            yield f"{me} is cut off", _with(state, me, connected=False)
        if state.registered[me] and may("lapse"):
            yield f"the lease of {me} is lost", _lapse(state, me)
        if side.connected and _due(side) and not state.full:
            yield from _lose(rules, state, me)
        if side.connected and may("hurry") and not state.full:
            yield from _hurry(rules, state, me)
        current = state.round
        inside = side.mode == "in" and side.world is not None and side.world[0] == current.number
        if inside and current.complete and not current.closed and not state.full:
            revision = state.revision + 1
            if may("close"):
                closed = replace(current, closed="success", mod_revision=revision)
                yield f"{me} closes the run", state._replace(revision=revision, round=closed)
            if may("give_up"):
                closed = replace(current, closed="failure", mod_revision=revision)
                after = state._replace(revision=revision, round=closed)
                yield f"{me} gives the run up", _close_connection(rules, after, me)


def _lose(rules: Rules, state: State, me: int) -> Iterator[Step]:
    side = state.sides[me]
    assert side.own is not None
    write = Late(side.own, _mod(side.stored), side.incarnation, None)
    if "lose_answer" in rules.faults:
        applied = _apply(rules, state, me, write)
        if applied is not None:
            yield f"the answer to a write of {me} is lost", applied
    if "land_late" in rules.faults and side.late is None:
        yield f"a write of {me} is under way for long", _with(state, me, late=write)


def _hurry(rules: Rules, state: State, me: int) -> Iterator[Step]:
    """The last call is over before everybody who is coming has come."""
    seen = sight(rules, me, state.sides[me])
    if seen.hurried is not None and seen.hurried != seen.decided:
        after = _carry_out(rules, state, me, seen.hurried)
        if after is not None:
            yield f"{me} decides in a hurry", after


def _close_connection(rules: Rules, state: State, me: int) -> State:
    side = state.sides[me]
    own = side.own
    if own is not None and own.nonce == str(side.nonce) and own.state != "left":
        own = replace(own, state="left", left_reason="closed", round=0)
    return _with(state, me, own=own, mode="off", world=None)


def _lapse(state: State, me: int) -> State:
    return state._replace(
        revision=state.revision + 1,
        nodes=put(state.nodes, me, None),
        created=put(state.created, me, 0),
        registered=put(state.registered, me, 0),
    )


def _register(state: State, me: int) -> State:
    incarnation = state.sides[me].incarnation + 1
    after = state._replace(
        revision=state.revision + 1, registered=put(state.registered, me, incarnation)
    )
    return _with(after, me, incarnation=incarnation)


def _replaced(state: State, me: int) -> State:
    """A pod of the same name and another UID comes: nobody told that one to go."""
    side = state.sides[me]
    after = _with(state, me, up=True, connected=True, own=None, mode="joining", parked=False)
    after = _with(after, me, nonce=side.nonce + 1, asked=0)
    drains = state.drains
    after = _register(after, me)._replace(
        drains=drains._replace(
            leaving=put(drains.leaving, me, False), granted=put(drains.granted, me, False)
        )
    )
    return _sync(after, me)


def _mend(state: State, me: int) -> State:
    return _sync(_with(state, me, connected=True), me)


def _sync(state: State, me: int) -> State:
    side = state.sides[me]
    missing = tuple(
        level if state.nodes[at] is None else 0 for at, level in enumerate(side.missing)
    )
    if side.mirror.round.number != state.round.number:
        missing = (0,) * len(missing)
    return _with(state, me, mirror=state.mirror, missing=missing, stored=state.nodes[me])


# --- small things ---


def _mod(node: Node | None) -> int:
    return node.mod_revision if node else 0


def _with(state: State, me: int, **changes: object) -> State:
    side = state.sides[me]._replace(**changes)  # type: ignore[arg-type]
    return state._replace(sides=put(state.sides, me, side))
