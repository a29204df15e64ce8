# SPDX-License-Identifier: Apache-2.0
"""The launch lines of the table, as their users write them."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.training.pods import ROOT

SCRIPTS = ROOT / "tests" / "support" / "scripts"
PREPARE, TRAIN = "prepare.py", "train.py"
NUMBER = "$JOB_COMPLETION_INDEX"
"""A pod's number, as an Indexed Job gives it."""
PREPARED = "prepared"
"""What the first of two stages writes, in the folder that all pods share."""
FIRST_STAGE_STEPS = 10

OWN = "--nproc-per-node=1"
STATIC = f"--nnodes=2 {OWN} --node-rank={NUMBER} --master-addr=train-0.train --master-port=29500"
ACCELERATE = (
    f"accelerate launch --multi_gpu --num_machines 2 --num_processes 2 --machine_rank {NUMBER}"
    " --main_process_ip train-0.train --main_process_port 29500"
)
FROM_PYTHON = """\
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

config = LaunchConfig(
    min_nodes=2, max_nodes=2, nproc_per_node=1, max_restarts=3,
    run_id="train", rdzv_backend="c10d", rdzv_endpoint="train-0.train:29400",
)
elastic_launch(config, sys.executable)(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Row:
    """One way to start a training.

    ``line``: what the container runs. ``library``: what trains in ``train.py``; empty: torch alone.
    ``files``: those that the image has beside it.
    """

    name: str
    line: str
    library: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def staged(self) -> bool:
        """Whether the line has two stages of its own."""
        return PREPARE in self.line

    def command(self, number: int, image: Path, shared: Path, *, stages: bool) -> list[str]:
        """Build the command of a pod, and write the files of its image.

        ``shared``: a folder of all pods. ``stages``: the line is the second of two stages, of which
        the first is the same line for another script.
        """
        line = self.line
        if stages and not self.staged:
            line = f"{line.replace(TRAIN, PREPARE)} && {line}"
        line = line.replace("/opt/venv/bin", str(programs())).replace(NUMBER, str(number))
        image.mkdir(exist_ok=True)
        for name, text in self.files.items():
            (image / name).write_text(text.replace(NUMBER, str(number)))
            (image / name).chmod(0o755)
            line = line.replace(f"./{name}", str(image / name))
        steps, checkpoints = shared / PREPARED, shared / f"{PREPARED}-checkpoints"
        for folder in (steps, checkpoints):
            folder.mkdir(exist_ok=True)
        first = f"env STEP_LOOP_DIR={steps} CHECKPOINT_DIR={checkpoints}"
        parts = [
            f"{first} DRAIN_LOOP_STEPS={FIRST_STAGE_STEPS} {part}" if PREPARE in part else part
            for part in line.split(" && ")
        ]
        script = shlex.join(self._script())
        text = " && ".join(parts).replace(PREPARE, f"{script} first").replace(TRAIN, script)
        return ["sh", "-c", text] if PREPARE in line else shlex.split(text)

    def _script(self) -> list[str]:
        if self.library:
            return [str(SCRIPTS / "trainers_loop.py"), self.library]
        return [str(SCRIPTS / "drain_loop.py")]

    def environ(self, shared: Path) -> dict[str, str]:
        """Build the container's own environment."""
        environ = {
            "PATH": f"{programs()}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(shared / "huggingface"),
        }
        if self.library == "deepspeed":
            packages = deepspeed_folder()
            environ |= {
                "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{packages}",
                "TORCH_EXTENSIONS_DIR": f"{packages}/extensions",
                "DS_ACCELERATOR": "cpu",
            }
        return environ


def programs() -> Path:
    """Return the folder of torchrun and python."""
    return Path(sys.executable).parent


@functools.cache
def deepspeed_folder() -> str:
    """Return the folder of packages that has DeepSpeed; make it if it is not there."""
    program = ROOT / "scripts" / "toolchain" / "deepspeed"
    made = subprocess.run([program, sys.executable], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip()


ROWS = (
    Row("`torchrun`", f"torchrun {OWN} {TRAIN}"),
    Row("`torchrun`, static flags", f"torchrun {STATIC} {TRAIN}"),
    Row("`torchrun --standalone`", f"torchrun --standalone {OWN} {TRAIN}"),
    Row("`torchrun` by its path", f"/opt/venv/bin/torchrun {OWN} {TRAIN}"),
    Row("`python -m torch.distributed.run`", f"python -m torch.distributed.run {OWN} {TRAIN}"),
    Row("`sh -c` with two stages", f"torchrun {OWN} {PREPARE} && torchrun {OWN} {TRAIN}"),
    Row(
        "a script inside the image",
        f"./train.sh {TRAIN}",
        files={"train.sh": f'#!/bin/sh\nset -e\ntorchrun {STATIC} "$@"\n'},
    ),
    Row("`accelerate launch`", f"{ACCELERATE} {TRAIN}", "accelerate"),
    Row("`accelerate launch`, c10d", f"{ACCELERATE} --rdzv_backend c10d {TRAIN}", "accelerate"),
    Row(
        "`elastic_launch` from Python",
        f"python ./launch.py {TRAIN}",
        files={"launch.py": FROM_PYTHON},
    ),
    Row("`torchrun` around Lightning", f"torchrun {OWN} {TRAIN}", "lightning"),
    Row("`torchrun` around transformers", f"torchrun {OWN} {TRAIN}", "transformers"),
    Row("`torchrun` around `deepspeed.initialize`", f"torchrun {OWN} {TRAIN}", "deepspeed"),
)
