# SPDX-License-Identifier: Apache-2.0
"""One connection of a torchrun agent, as the rendezvous sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from launcher_shim.c10d.rounds.place import Claim
from launcher_shim.c10d.rounds.records import ClosedWhy, Node, Round
from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.rounds.stages import COUNTED_APART, made_up, round_key, torch_run_id
from launcher_shim.c10d.rounds.views import LAST_OUT, Row, View, filler, portray
from launcher_shim.c10d.state_codec import (
    SENTINEL,
    Flavour,
    NodeDesc,
    TorchState,
    Wish,
    decode,
    encode,
    first_name,
    foreign_size,
    read_flavour,
    spell_flavour,
    wish,
)
from rdzv.errors import StateError

log = logging.getLogger(__name__)

HELD_LOOK_S = 0.1
"""Interval of looks whether a held answer is to be given now: not all that ends a hold is news."""


class TorchAgent:
    """A torchrun agent behind one client connection, as the server calls it.

    A newer connection of the same member replaces the older one when it first names itself.
    """

    def __init__(self, rendezvous: Rendezvous, claim: Claim) -> None:
        self.claim = claim
        self.asked = 0
        """The number of requests that it has made."""
        self.waits = 0
        """The number of requests under way that wait for a key, for as long as that takes."""
        self.finished_round = -1
        self.foreign_size = False
        """Whether its ``--nnodes`` has turned out to differ from the job's."""
        self._rendezvous = rendezvous
        self._watchers: set[asyncio.Event] = set()
        self._gone = False
        self._me: NodeDesc | None = None
        self._flavour = Flavour()
        self._row = Row()
        self._drawn: tuple[View, bytes] | None = None
        self._shown = (SENTINEL, TorchState())
        if claim.named:
            self._me = NodeDesc(claim.addr, claim.pid, claim.local_id)
            self._flavour = read_flavour(claim.flavour)
            claim.parks = self._flavour.redundancy

    # --- for the server ---

    def request_began(self) -> None:
        """Note a request; one that is pending shows that the agent is not hung."""
        self.claim.pending += 1
        self.claim.seen_s = self._rendezvous.clock()
        self.asked += 1
        for watcher in self._watchers:
            watcher.set()

    def request_ended(self) -> None:
        """Note an answer."""
        self.claim.pending -= 1
        self.claim.seen_s = self._rendezvous.clock()

    def wait_began(self) -> None:
        """Note that it waits for a key."""
        self.waits += 1

    def wait_ended(self) -> None:
        """Note that a wait for a key has ended, with the key or without."""
        self.waits -= 1

    def stirs(self) -> Coroutine[Any, Any, None]:
        """Wait until it has sent a request since this call, or its connection is gone.

        Since the call, and not since it was awaited: a task for it begins some turns later.
        """
        return self._stirs_after(self.asked)

    async def _stirs_after(self, asked: int) -> None:
        watcher = asyncio.Event()
        self._watchers.add(watcher)
        try:
            if self.asked == asked and not self._gone:
                await watcher.wait()
        finally:
            self._watchers.discard(watcher)

    def get_state(self) -> bytes:
        """Answer a GET of the state key, at once and from the mirror."""
        if self._me is None:
            return SENTINEL
        return self._draw(self._rendezvous.view_of(self.claim))

    def held_for(self, asked_s: float) -> float:
        """Return for how many seconds to hold back the answer to a GET of ``asked_s``."""
        drawn = self._drawn
        return self._rendezvous.held_for(self.claim, asked_s, drawn[0]) if drawn else 0.0

    def is_held(self) -> bool:
        """Return whether to hold back the answer to a GET that has just come."""
        return self.held_for(self._rendezvous.clock()) > 0

    async def hold(self) -> None:
        """Wait until ``get_state`` answers differently, or may be held back no longer."""
        asked_s = self._rendezvous.clock()
        while (left_s := self.held_for(asked_s)) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, HELD_LOOK_S)):
                    await self._rendezvous.news()

    async def compare_set(self, expected: bytes, desired: bytes) -> bytes:
        """Answer a COMPARE_SET of the state key.

        Waits while a wish in it has to be written and the store is away.
        """
        if desired == SENTINEL:
            return self.get_state()
        try:
            after, flavour = decode(desired)
            before = self._expected_state(expected)
        except StateError as error:
            log.warning("ignoring a compare-and-set whose value is no rendezvous state: %s", error)
            return await self._answer(fruitless=True)
        if self._me is None or expected in (SENTINEL, b""):
            self._introduce(after, flavour)
        if self._me is None:
            return await self._answer(fruitless=True)
        wanted = wish(before, after, self._me)
        if wanted.closes and not await self._close():
            return desired
        if wanted.change == "step_off":
            return await self._step_off(before)
        if wanted.change:
            return await self._change(wanted)
        return await self._answer(fruitless=not wanted.closes)

    async def exit_barrier(self) -> int | None:
        """Record that the agent's workers are done; return once that may be answered.

        To be awaited before the answer to an ADD on ``.../terminal_state/...``, which is the number
        returned, if there is one: torchruns of different rounds are not counted in the store.
        """
        await self._note_done()
        return COUNTED_APART if self._rendezvous.counts_apart else None

    async def _note_done(self) -> None:
        node = self._rendezvous.place.live_node(self.claim)
        if node is None:
            own = self.node
            if own is not None and own.state == "in" and self._rendezvous.round.closed == "success":
                # Its pod was let go; the others have ended well in a later round, and so has this
                # one.
                self.finished_round = own.round
            return
        if self.finished_round == node.round:
            return
        self.finished_round = node.round
        await self._rendezvous.edit_round(node, _finishing)
        await self._rendezvous.place.finish_written(self.claim)

    def filler(
        self, key: bytes, value: Callable[[bytes], bytes | None] = lambda key: None
    ) -> bytes | None:
        """Return a value for an unset key that no agent will set; else None.

        Its round is over or doomed, or is one of its own. ``value`` looks up a launcher's key.
        """
        of_round = round_key(key, torch_run_id(self.run_id))
        if of_round is None:
            return None
        number, name = of_round
        rendezvous, made = self._rendezvous, filler(name)
        if rendezvous.counts_apart:
            if name == LAST_OUT:
                return b"" if rendezvous.all_are_done else None
            own, current = self.node, rendezvous.round
            if own is not None and own.own and own.round == number:
                goes_on = current.takes_in(own) and not current.is_ending
                real = current.number
                return (
                    made_up(name, torch_run_id(self.run_id), number, real, value)
                    if goes_on
                    else made
                )
        if made is not None and rendezvous.round.restored and number == rendezvous.round.number:
            # The key may have been set and lost: the nodes that wait for it meet nowhere.
            rendezvous.place.forfeit(self.claim)
        return made if rendezvous.is_dead(number) else None

    def news(self) -> Coroutine[Any, Any, object]:
        """Wait until ``filler`` or ``get_state`` may answer differently than at this call."""
        return self._rendezvous.news()

    def closed(self) -> None:
        """Withdraw what the agent has asked for: the connection is gone."""
        self._gone = True
        self._rendezvous.place.leave(self.claim, "done" if self._is_done() else "closed")
        for watcher in self._watchers:
            watcher.set()

    # --- its state ---

    @property
    def run_id(self) -> str:
        """The run that it is in."""
        return self._rendezvous.run_id

    @property
    def ended_well(self) -> bool:
        """Whether its workers were done when it left."""
        node = self.node
        return node is not None and (node.state, node.left_reason) == ("left", "done")

    @property
    def pid(self) -> int:
        """Its torchrun's process number, in its own container; 0 while it has not named itself."""
        return self.claim.pid if self.claim.named else 0

    @property
    def takes_part(self) -> bool:
        """Whether it holds the place of its pod, and has not left for good."""
        node = self.node
        return node is not None and (node.state != "left" or node.left_reason == "exit")

    @property
    def node(self) -> Node | None:
        """Its record as it should be; None if it does not hold the place of its member."""
        return self._rendezvous.place.own_node(self.claim)

    @property
    def world(self) -> Round | None:
        """The round that it takes part in, if that is the live one; else None."""
        return (
            None if self._rendezvous.place.live_node(self.claim) is None else self._rendezvous.round
        )

    def resume(self, finished_round: int) -> None:
        """Restore its state from the sidecar before this one."""
        self.finished_round = finished_round
        if self._is_done():
            # Its record lacks this if that sidecar was of an older version.
            self._rendezvous.place.finish(self.claim)

    def move(self, rendezvous: Rendezvous) -> None:
        """Move to the run of the job's next generation."""
        self._rendezvous = rendezvous
        self._drawn = None
        self.finished_round = -1
        rendezvous.place.adopt(self.claim)

    # --- wishes ---

    def _expected_state(self, expected: bytes) -> TorchState:
        if expected in (b"", SENTINEL):
            return TorchState()
        shown, state = self._shown
        return state if expected == shown else decode(expected)[0]

    def _introduce(self, first: TorchState, flavour: Flavour) -> None:
        me = first_name(first)
        if me is None or flavour.aware is None:
            log.warning(
                "ignoring a client: its first state has no valid node descriptor or timestamp"
            )
            return
        self._me, self._flavour = me, flavour
        self._drawn = None
        claim = self.claim
        claim.addr, claim.pid, claim.local_id = me.addr, me.pid, me.local_id
        claim.flavour, claim.parks = spell_flavour(flavour), flavour.redundancy
        launched = self._rendezvous.launched
        self.foreign_size = foreign_size(first, launched.min_nodes, launched.max_nodes)
        if self.foreign_size:
            log.warning(
                "the --nnodes of this torchrun is not %d:%d, which its sidecar was given: the job's"
                " min and max count",
                launched.min_nodes,
                launched.max_nodes,
            )
        self._rendezvous.place.take_over(self.claim)

    async def _change(self, wanted: Wish) -> bytes:
        rendezvous = self._rendezvous
        if wanted.change == "join":
            granted = await rendezvous.place.join(self.claim)
            # It was on no list: the views before this one do not count.
            self.claim.parked = False
            self.claim.asked_s = rendezvous.clock()
        else:
            granted = await rendezvous.place.leave_written(self.claim)
        if granted:
            # torch would sleep for a second and ask again: hold the answer back for news instead.
            await self._hold(while_shown="asking" if wanted.change == "join" else "full")
        return await self._answer(fruitless=not granted)

    async def _step_off(self, before: TorchState) -> bytes:
        if before.participants and self.claim.parks:
            self.claim.parks = False
            self.foreign_size = True
            log.warning(
                "the maximum of this torchrun's --nnodes is not %d, which its sidecar was given:"
                " the job's max counts",
                self._rendezvous.launched.max_nodes,
            )
        self.claim.parked = False
        self.claim.asked_s = self._rendezvous.clock()
        await self._hold(while_shown="asking")
        shown = self._rendezvous.view_of(self.claim).role
        return await self._answer(fruitless=shown in ("parked", "promoted"))

    async def _close(self) -> bool:
        """Close the run if this agent may; return whether that is final, and shown to all.

        This agent is shown a closed run in any case: otherwise torch would ask again and again.
        """
        rendezvous = self._rendezvous
        node = rendezvous.place.live_node(self.claim)
        if node is None:
            own = rendezvous.place.own_node(self.claim)
            # torch takes itself off the lists first if it still has the time.
            self.claim.gave_up = own is not None and (
                own.state == "asking" or own.left_reason == "exit"
            )
            return False
        closed: ClosedWhy = "success" if self._is_done() else "failure"
        if rendezvous.vetoes_close(node, closed):
            rendezvous.place.leave(self.claim, "done" if closed == "success" else "closed")
            return False
        await rendezvous.edit_round(
            node,
            lambda current: None if current.closed else replace(current, closed=closed),
        )
        return closed == "success"

    def _is_done(self) -> bool:
        node = self._rendezvous.place.own_node(self.claim)
        return node is not None and node.state == "in" and node.round == self.finished_round

    # --- answers ---

    async def _hold(self, while_shown: str) -> None:
        rendezvous, view = self._rendezvous, self._rendezvous.view_of(self.claim)
        with suppress(TimeoutError):
            async with asyncio.timeout(rendezvous.policy().hold_s):
                while view.full if while_shown == "full" else view.role == while_shown:
                    await rendezvous.news()
                    view = rendezvous.view_of(self.claim)

    async def _answer(self, *, fruitless: bool) -> bytes:
        delay_s = self._row.count(self._rendezvous.clock(), fruitless=fruitless)
        if delay_s:
            await asyncio.sleep(delay_s)
        return self.get_state()

    def _draw(self, view: View) -> bytes:
        if view.role == "parked":
            self.claim.parked = True
        if self._drawn is None or self._drawn[0] != view:
            assert self._me is not None
            rendezvous = self._rendezvous
            state = portray(view, self._me, rendezvous.member, rendezvous.launched.max_nodes)
            blob = encode(state, self._flavour)
            self._drawn = (view, blob)
            self._shown = (blob, state)
        return self._drawn[1]


def connect(
    rendezvous: Rendezvous, nonce: str | None = None, kept: Node | None = None
) -> TorchAgent:
    """Create the agent behind a new client connection; see ``Place.claim``."""
    return TorchAgent(rendezvous, rendezvous.place.claim(nonce, kept))


def _finishing(current: Round) -> Round | None:
    return None if current.finishing else replace(current, finishing=True)
