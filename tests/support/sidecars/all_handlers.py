# SPDX-License-Identifier: Apache-2.0
"""Several of torch's handlers at once."""

from __future__ import annotations

from launcher_shim.c10d.rounds.inputs import RoundPolicy
from tests.support.sidecars.rendezvous import Job

QUICK = RoundPolicy(
    min_nodes=2,
    max_nodes=4,
    last_call_s=0.5,
    first_call_s=30.0,
    confirm_s=0.4,
    return_s=4.0,
    orphan_hold_s=60.0,
    hung_s=30.0,
)


async def all_of(one: Job, names: str) -> None:
    for name in names:
        await one.sidecar(name)
    for name in names:
        one.torchrun(name)
