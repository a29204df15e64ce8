# SPDX-License-Identifier: Apache-2.0
"""What a rank does at its boundaries, as ``muster.drain()`` would; its time is that of the test."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from launcher_shim.rundir import layout
from muster import boundary, resuming
from muster.process import RankIdentity
from muster.saved_steps import SavedSteps
from rdzv.drain.gate import Gate
from rdzv.records.progress import RankProgress


class BoundaryRank:
    """One rank, beside the ``files`` of its pod. A subclass trains, publishes, and waits.

    ``_reads``: the file that has its gate, ``gate.json`` for one of 0.1.
    """

    _reads = layout.GATE_PAGE

    def __init__(self, master: str, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._told = boundary.Rank(master)
        self._saved = SavedSteps()
        self._save_s = 0.0
        self._tag = ""

    def gave_up(self, epoch: int) -> bool:
        """Whether it has trained on in an epoch, as the store took no writes."""
        return self._told.failed == (epoch, boundary.CUT)

    async def _publish(self) -> None:
        raise NotImplementedError

    async def _look_again(self) -> None:
        """Wait until the gate may be another one."""
        raise NotImplementedError

    async def _begin(self) -> None:
        """Wait until it may begin its first step."""
        while True:
            verdict, self._told = boundary.begin(self._told, self._rank_gate())
            if verdict == boundary.GO:
                return
            if verdict == boundary.PUBLISH:
                await self._publish()
            else:
                await self._look_again()

    async def _follow(self) -> bool:
        """Do as the gate says until it says to go on, or to save (True)."""
        while True:
            verdict, self._told = boundary.decide(self._told, self._rank_gate())
            if verdict == boundary.PUBLISH:
                await self._publish()
            elif verdict == boundary.WAIT:
                await self._look_again()
            else:
                return verdict == boundary.SAVE

    def _progress(
        self, local_rank: int = 0, ranks: int = 1, *, drain: bool, away: bool = False
    ) -> RankProgress:
        told, saved = self._told, self._saved.named
        done = (told.held, told.acked, told.failed, away, saved)
        place = (local_rank, ranks, told.master, told.step, drain)
        page = self._reads == layout.GATE_PAGE
        return RankProgress(
            *(*place, *done), page=page, tag=self._tag, save_s=self._save_s, epoch=told.saving
        )

    def _ask_for_tag(self) -> str:
        """Return the tag of its world, as ``muster.save_tag()`` does."""
        if self._tag < resuming.FIRST:
            gate = self._gate()
            if gate is not None and gate.master == self._told.master:
                own = resuming.world_tag(gate.run, gate.round, gate.master)
            else:
                address, _, port = self._told.master.partition(":")
                environ = {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": ""}
                own = resuming.unconfirmed_tag(RankIdentity(environ), environ)
            if own != self._tag:
                self._tag = own
                self._saved.forget()
        return self._tag

    def _gate(self) -> Gate | None:
        content = self._files.get(self._reads)
        return None if content is None else _gate(content)

    def _rank_gate(self) -> boundary.RankGate | None:
        gate = self._gate()
        if gate is None:
            return None
        return boundary.RankGate(gate.epoch, gate.master, gate.phase, gate.step, gate.cut)


@lru_cache(maxsize=256)
def _gate(content: bytes) -> Gate:
    return Gate.from_json(layout.GATE_PAGE, content)
