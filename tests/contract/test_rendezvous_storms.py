# SPDX-License-Identifier: Apache-2.0
"""Random kills, cuts, hangs and restarts under torch's own handlers: they come together again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

pytest.importorskip("torch.distributed", reason="the handlers are torch's")

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from rdzv.records.quarantine import Terms
from tests.support.sidecars.rendezvous import Job, job

POLICY = RoundPolicy(
    min_nodes=2,
    max_nodes=5,
    last_call_s=0.5,
    first_call_s=2.0,
    confirm_s=0.4,
    return_s=3.0,
    orphan_hold_s=30.0,
    hung_s=2.5,
)
STORM_S = 12.0
CALM_S = 40.0
RATE_MAX = 5
"""Compare-and-sets of one agent in any second; a re-join takes three."""


@pytest.mark.virtual
@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_ends_in_one_world(seed: int) -> None:
    random = Random(seed)
    names = "abcde"[: random.randint(3, 5)]
    # Nothing is held against those that a storm kills: worlds form again of all.
    patient = Terms(worlds=1000)
    async with job(replace(POLICY, max_nodes=len(names)), ttl_s=1.0, terms=patient) as one:
        for name in names:
            await one.sidecar(name)
            one.torchrun(name)
        await one.world(names)
        left_s = STORM_S
        while left_s > 0:
            pause_s = random.uniform(0.1, 1.5)
            left_s -= pause_s
            await one.passed(pause_s)
            await strike(one, random.choice(names), random)
        for name in names:
            one.sidecars[name].cut.mend()
            one.torchruns[name].awake.set()
            await start(one, name)
        await one.world(names, CALM_S)
        assert one.sidecars["a"].rendezvous.round.closed == ""
        assert max(torchrun.busiest_second() for torchrun in one.everyone) <= RATE_MAX


async def strike(one: Job, name: str, random: Random) -> None:
    """One thing goes wrong at one node, or is mended there."""
    torchrun, sidecar = one.torchruns[name], one.sidecars[name]
    match random.choice(["kill", "rejoin", "cut", "mend", "hang", "wake", "start", "crash"]):
        case "kill":
            torchrun.kill()
        case "rejoin":
            torchrun.order("rejoin")
        case "cut":
            sidecar.cut.cut()
        case "mend":
            sidecar.cut.mend()
        case "hang":
            torchrun.awake.clear()
        case "wake":
            torchrun.awake.set()
        case "crash" if name in one.running:
            torchrun.kill()
            await one.stop_sidecar(name)
        case "start":
            await start(one, name)


async def start(one: Job, name: str) -> None:
    """Bring back what is down at a node."""
    if name not in one.running:
        await one.sidecar(name)
    if one.torchruns[name].ended:
        one.torchrun(name)
