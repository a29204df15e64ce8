# SPDX-License-Identifier: Apache-2.0
"""torchrun, one beside each pod's ranks: it asks the pod's sidecar for rounds."""

from __future__ import annotations

import os
from typing import Mapping, Optional, Sequence

from launcher_shim.launcher import Launcher
from launcher_shim.torchrun.options import NESTED, given_options, starts_own_job

_REPORTED = ("nnodes", "rdzv-endpoint", "rdzv-backend", "standalone")
"""Options of torchrun that the report contains."""
_ACCELERATE = ("accelerate", "accelerate-launch", "accelerate.commands.launch")


class TorchrunLauncher(Launcher):
    """torchrun, and accelerate's launcher where torchrun is what it becomes."""

    name = "torchrun"
    library = "torch"
    folder = "torchrun"
    program = "pod.torchrun"
    modules = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
    nested = NESTED[0]
    waits_in = (
        r"/torch/distributed/(?!checkpoint/)|/torch/nn/parallel/distributed\.py$"
        r"|/torch/autograd/(graph|__init__)\.py$|/torch/cuda/(__init__|streams)\.py$"
    )

    def found_in(self, words: Sequence[str], at: int) -> int:
        """See ``Launcher``."""
        name = os.path.basename(words[at])
        if name == "accelerate-launch" or (name, *words[at + 1 : at + 2]) == (
            "accelerate",
            "launch",
        ):
            return at + 1
        return super().found_in(words, at)

    def report(
        self, program: Sequence[str], words: Sequence[str], environ: Mapping[str, str]
    ) -> Optional[Mapping[str, str]]:
        """See ``Launcher``."""
        if starts_own_job(environ):
            words = ()  # whatever it was given is overruled
        elif os.path.basename(program[-1]) in _ACCELERATE:
            return None
        return given_options(words, environ, _REPORTED)


TORCHRUN = TorchrunLauncher()
