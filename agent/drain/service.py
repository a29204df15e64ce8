# SPDX-License-Identifier: Apache-2.0
"""Everything of one sidecar that has to do with drains, put together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from agent.drain.decisions import Coordinator, DrainView, RoundSource
from agent.drain.gate_writer import GateWriter
from agent.drain.notice import NoticeSocket
from agent.drain.own import OwnDrain
from agent.drain.saves import LauncherSaves, SaveReporter
from agent.rundir.files import RunDir
from agent.stuck import StillWatch
from rdzv.drain.gate import ON_CUT_S
from rdzv.drain.inputs import DrainPolicy
from rdzv.members.registrar import Registrar
from rdzv.reconcile import Kernel
from rdzv.records.codec import KEPT
from rdzv.records.drain import Commit
from rdzv.shard_ledger import ShardLedger


class Drains:
    """The parts that see drains through, for one member whose launcher is in ``rounds``.

    ``notice_path``: the socket that takes notices, or None for no socket. ``grace_s``: the pod's
    termination grace. ``below_min``: as in ``rdzv.drain.inputs.DrainPolicy``. ``on_cut``: whether
    ranks wait once their pod has had no lease for ``ON_CUT_S``. ``stuck_after_s`` and
    ``when_stuck``: as in ``MemberSettings``. ``ledgers`` returns those of all data sets in shards.
    ``boot_clock`` is that of ``agent.process``, in seconds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        kernel: Kernel,
        registrar: Registrar,
        rounds: RoundSource,
        *,
        notice_path: Path | None,
        grace_s: float,
        below_min: Literal["hold", "commit"],
        on_cut: Literal["train", "hold"],
        stuck_after_s: float,
        when_stuck: Literal["tell", "reform"],
        ledgers: Callable[[], Sequence[ShardLedger]],
        boot_clock: Callable[[], float],
    ) -> None:
        identity = registrar.identity
        view = DrainView(kernel.client, rounds, identity.pod_uid, run_dir, ledgers)
        self.own = OwnDrain(kernel, run_dir, identity, grace_s=grace_s, boot_s=boot_clock)
        on_cut_s = ON_CUT_S if on_cut == "hold" else math.inf
        self.gate_writer = GateWriter(kernel, run_dir, registrar, view, self.own, on_cut_s=on_cut_s)
        policy = DrainPolicy(below_min)
        self.coordinator = Coordinator(kernel, identity.member, view, self.own, policy)
        watch = StillWatch(run_dir, kernel.clock, stuck_after_s)
        self.saves = SaveReporter(
            *(kernel, run_dir, registrar, view, rounds),
            watch=watch,
            ends_stuck=when_stuck == "reform",
            grace_s=grace_s,
        )
        self.launcher_saves = LauncherSaves(kernel, run_dir, identity.member)
        self.notices = NoticeSocket(notice_path, self.own.notify, self.own.phase_after)
        self._client = kernel.client

    @property
    def commit(self) -> Commit:
        """The commit record; an idle one if there is none."""
        return self._client.membership.snapshot().commit or Commit()

    @property
    def last_commit_step(self) -> int:
        """The newest step that all ranks saved; -1 for none."""
        last = self._client.membership.snapshot().commit_to_start_from
        return -1 if last is None else last.step

    @property
    def last_commit_keeps_samples(self) -> int:
        """1 if the last commit keeps the samples, 0 if it does not; -1 for none."""
        last = self._client.membership.snapshot().commit_to_start_from
        return -1 if last is None else int(last.samples == KEPT)

    @property
    def last_saved_step(self) -> int:
        """The newest step that a rank of this pod saved in its round; -1 for none."""
        own = self.saves.own
        return -1 if own is None or own.newest is None else own.newest

    def by_outcome(self) -> dict[str, float]:
        """Count this generation's drain records by outcome."""
        counted = dict.fromkeys(("", "committed", "uncommitted", "expired"), 0.0)
        for drain in self._client.membership.snapshot().drains.values():
            counted[drain.outcome] += 1
        return {outcome or "none yet": count for outcome, count in counted.items()}

    async def run(self) -> None:
        """Take notices and see drains through until cancelled."""
        await asyncio.to_thread(self._restore)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.notices.run(), name="notices")
            tasks.create_task(self.own.run(), name="own-drain")
            await self.gate_writer.wait_for_store()
            tasks.create_task(self.coordinator.run(), name="coordinator")
            tasks.create_task(self.gate_writer.run(), name="gate-writer")
            tasks.create_task(self.saves.run(), name="saves")
            tasks.create_task(self.launcher_saves.run(), name="launcher-saves")

    def _restore(self) -> None:
        self.own.restore()
        self.gate_writer.restore()
