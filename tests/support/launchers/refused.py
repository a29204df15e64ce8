# SPDX-License-Identifier: Apache-2.0
"""What is said of launch lines before they run, and those that are refused."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from injection.injection import Request, inject
from rdzv.errors import ConfigError
from tests.support.injection.injecting import FLAGS, manifest


class Refused(NamedTuple):
    """One way to start a training that is refused; ``sentence``: empty for that of inject."""

    name: str
    line: str
    sentence: str = ""

    def said(self) -> str:
        """Return the sentence that refuses it, with the line that works."""
        return self.sentence or refusal(self.line)


OWN_LAUNCHER = (
    "Lightning has started the 16 ranks of this world itself, so no pod can leave or join it: start"
    " the script with torchrun --nproc-per-node=8 SCRIPT"
)

REFUSED = (
    Refused("the `deepspeed` launcher", "deepspeed --num_gpus=8 train.py"),
    Refused(
        "`accelerate launch` with DeepSpeed's launcher",
        "accelerate launch --use_deepspeed --num_machines 2 train.py",
    ),
    Refused("Lightning's `fabric run`", "fabric run --devices=8 --num-nodes=2 train.py"),
    Refused(
        "Lightning's own, by its command line",
        "python train.py fit --trainer.devices=8 --trainer.num_nodes=2",
    ),
    Refused(
        "Lightning's own, by `Trainer(devices=8, num_nodes=2)` in the script",
        "python train.py",
        OWN_LAUNCHER,
    ),
)


def notes(line: str) -> list[str]:
    """Return what ``muster inject`` says of a container that runs a line.

    Raises ``ConfigError`` if it refuses the line.
    """
    command = ["sh", "-c", line] if "$" in line or "&&" in line else shlex.split(line)
    job = manifest("Job", name="train", command=command)
    of_object, of_container = "Job/digits: ", "container train: "
    said = [note.removeprefix(of_object) for note in inject(job, Request(FLAGS, {})).notes]
    return [note.removeprefix(of_container) for note in said if note.startswith(of_container)]


def refusal(line: str) -> str:
    """Return the sentence with which ``muster inject`` refuses a line."""
    try:
        notes(line)
    except ConfigError as error:
        first, *_ = str(error).splitlines()
        return first.partition(": ")[2]
    raise AssertionError(f"{line} is not refused")
