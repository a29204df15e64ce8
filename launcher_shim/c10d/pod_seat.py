# SPDX-License-Identifier: Apache-2.0
"""A pod takes part in its job with one torchrun at a time: a second one beside it is refused.

One that comes *after* the first takes over at once: the first one's connection is gone, or the
sidecar has given it up as hung. Until one of these is known, the newcomer waits; the first one
shows that it lives by a request, which its keep-alive thread sends every few seconds, or by waiting
for a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from launcher_shim.c10d.torch.agent import TorchAgent
from rdzv.errors import WireError
from rdzv.race import first_of


class PodSeat:
    """The pod's one place. ``connected``: its torchruns connected now, each with its run id."""

    def __init__(self, connected: Callable[[], Iterable[tuple[str, TorchAgent]]]) -> None:
        self._connected = connected

    async def vacant(self, newcomer: TorchAgent | None = None) -> None:
        """Wait until no other torchrun takes part; raises ``WireError`` if one is alive."""
        asked: dict[TorchAgent, int] = {}
        while others := self._others(newcomer):
            for run_id, other in others:
                if other.waits or other.asked > asked.setdefault(other, other.asked):
                    raise WireError(_refusal(run_id, other.pid))
            # Until one of them sends a request, ends, or is given up.
            stirs = [wait for _, other in others for wait in (other.stirs(), other.news())]
            await first_of(*stirs)

    def _others(self, newcomer: TorchAgent | None) -> list[tuple[str, TorchAgent]]:
        return [
            (run_id, agent)
            for run_id, agent in self._connected()
            if agent is not newcomer and agent.takes_part
        ]


def _refusal(run_id: str, pid: int) -> str:
    return (
        f"a torchrun of this pod (process {pid}) takes part in the run {run_id} already, and a pod"
        " has one place in its job: end that one first, or start this one by itself, with"
        " --standalone --nnodes=1 --rdzv-conf=is_host=1; see"
        " docs/operations.md#a-second-torchrun-in-a-pod"
    )
