# SPDX-License-Identifier: Apache-2.0
"""The change from one generation of the job to the next, as the endpoint goes through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from launcher_shim.c10d.generation import Generation, Run
from rdzv.job import JobClient
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Loop, Outlook
from rdzv.store import WatchEvent


class Generations(Loop):
    """The generations that the member registers in, each with runs of its own.

    ``enter`` creates the one of a number. ``current`` is None until the member is registered.
    """

    def __init__(
        self, client: JobClient, registrar: Registrar, enter: Callable[[int], Generation]
    ) -> None:
        super().__init__()
        self.current: Generation | None = None
        self.closing = False
        """Whether the sidecar ends, and starts no run any more."""
        self._client = client
        self._registrar = registrar
        self._enter = enter
        self._entered = asyncio.Event()

    @property
    def number(self) -> int | None:
        """The number of the current generation; None before the first."""
        return self.current.number if self.current is not None else None

    async def run(self) -> None:
        """Follow the registration until cancelled."""
        unsubscribe = self._client.mirror.subscribe(self._apply)
        try:
            await super().run()
        finally:
            unsubscribe()

    async def step(self) -> Outlook:
        """Change the generation with the registration."""
        generation, membership = self._registrar.generation, self._client.membership
        if generation is None:
            return Outlook(self._registrar.registered.wait)
        if generation != self.number:
            self._change(generation)
        return Outlook(partial(membership.changed_from, membership.snapshot()))

    def run_of(self, name: str) -> Run:
        """Return a run of the current generation; start it if it is not followed yet."""
        assert self.current is not None
        return self.current.run(name)

    async def first(self) -> Generation:
        """Wait until the member is registered; return the current generation."""
        while self.current is None:
            await self._entered.wait()
        return self.current

    async def caught_up(self) -> None:
        """Wait until the current generation is the one that the member is registered in.

        Returns at once if it is not registered: the last known one still counts.
        """
        while self._registrar.generation not in (None, self.number):
            await self._entered.wait()

    def follow_runs(self) -> None:
        """Start the runs to be followed, and end others, unless this sidecar is closing."""
        if self.current is not None and not self.closing:
            self.current.follow()

    def _change(self, generation: int) -> None:
        former = self.current.end() if self.current is not None else {}
        self.current = self._enter(generation)
        self.follow_runs()
        for name, attached in former.items():
            self.current.take_over(name, attached)
        entered, self._entered = self._entered, asyncio.Event()
        entered.set()

    def _apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply one batch of the mirror's events, so that drains see the runs of that moment."""
        revision = self._client.mirror.revision
        if self.current is not None and self.current.rounds.apply(events, revision):
            self.follow_runs()
