# SPDX-License-Identifier: Apache-2.0
"""The steps that the ranks of one torchrun make, watched for as long as it runs."""

from __future__ import annotations

import asyncio
import os
from typing import Optional

from launcher_shim.rundir import layout
from launcher_shim.rundir.step_count import count_from
from launcher_shim.rundir.step_lines import read_steps

LOOK_S = 2.0
"""Poll interval: the ranks' files give no notification of a change. Ranks that live for less than
this may go uncounted; those after them show how far the job is."""


class StepWatch:
    """A count of the steps that are made from its creation on."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, layout.PROGRESS)
        self._count = count_from(read_steps(self._path))

    async def run(self) -> None:
        """Poll the ranks' steps until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.made()

    def made(self) -> Optional[int]:
        """Read the ranks' steps; return how many were made, None while no rank reports any."""
        self._count = self._count.seen(read_steps(self._path))
        return self._count.made
