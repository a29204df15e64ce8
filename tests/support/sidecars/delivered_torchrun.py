# SPDX-License-Identifier: Apache-2.0
"""The ``torchrun`` of the run directory, which is found before the one of the image."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agent.rundir.programs import program
from tests.support.sidecars.processes import PATIENCE_S

OF_THE_IMAGE = b"""#!/bin/sh
echo "$@"
exit 7
"""


class DeliveredTorchrun:
    """Both programs, below ``folder``; making them blocks."""

    def __init__(self, folder: Path) -> None:
        self._ours, own = folder / "run" / "torchrun", folder / "image" / "torchrun"
        for path, content in ((self._ours, program("torchrun")), (own, OF_THE_IMAGE)):
            path.parent.mkdir()
            path.write_bytes(content)
            path.chmod(0o755)
        self._path = os.pathsep.join([str(self._ours.parent), str(own.parent), os.environ["PATH"]])

    async def run(self, port: int, *arguments: str, **environ: str) -> tuple[int | None, str]:
        """Run it for a rendezvous at ``port``: its status, and what it has printed."""
        process = await asyncio.create_subprocess_exec(
            self._ours,
            *arguments,
            env={
                "PATH": self._path,
                "PET_RDZV_BACKEND": "c10d",
                "PET_RDZV_ENDPOINT": f"localhost:{port}",
                "PET_RDZV_ID": "digits",
                "PET_NNODES": "1:3",
                **environ,
            },
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode, out.decode()
