# SPDX-License-Identifier: Apache-2.0
"""The run that a torchrun's connection takes part in: another one in each generation of the job."""

from __future__ import annotations

from dataclasses import dataclass

from launcher_shim.c10d.rounds.rendezvous import Rendezvous
from launcher_shim.c10d.torch.agent import TorchAgent
from launcher_shim.c10d.values.operations import Kv


@dataclass(slots=True, eq=False)
class Attachment:
    """A connection's run: held by its session, moved by the endpoint.

    ``kv`` has the keys of the run, ``agent`` takes part in its rendezvous.
    """

    kv: Kv
    agent: TorchAgent

    def move(self, kv: Kv, rendezvous: Rendezvous) -> None:
        """Go on in the run of the job's next generation."""
        self.kv = kv
        self.agent.move(rendezvous)
