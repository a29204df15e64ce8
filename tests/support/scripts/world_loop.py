# SPDX-License-Identifier: Apache-2.0
"""A training script that lives through changes of its world, by the files of the run directory.

It speaks for a rank as the library does, without it: a number as the model, one all_reduce a step.
It writes the step lines of ``step_loop.py``; the number of the world is the last field. It ends,
with all ranks at the same step, when ``STEP_LOOP_STOP`` exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEP_S = float(os.environ.get("WORLD_LOOP_STEP_S", "0.05"))
RUN_DIR = Path(os.environ["MUSTER_RUN_DIR"])
LOCAL = int(os.environ["LOCAL_RANK"])
STARTED = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
STOP = Path(os.environ["STEP_LOOP_STOP"])


class Rank:
    """One rank: its line, its file, its model."""

    def __init__(self) -> None:
        self.part: dict[str, Any] = {
            "number": -1,
            "step": 0,
            "epoch": 0,
            "torch": torch.__version__,
        }
        self.rank, self.size = -1, 0

    @property
    def step(self) -> int:
        return int(self.part["step"])

    def say(self, **changes: object) -> None:
        """Publish the line."""
        self.part.update(changes)
        said = {name: value for name, value in self.part.items() if value is not None}
        line = {
            **{"pid": os.getpid(), "started": STARTED, "rank": max(0, self.rank)},
            **{"local_rank": LOCAL, "world_size": self.size, "restart": 0, "time": time.time()},
            "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            **{"step": self.step, "epoch": 0, "drain": True, "held": False, "page": True},
            **{"acked": None, "failed": None, "world": said},
        }
        path = RUN_DIR / "progress" / f"{LOCAL}.json"
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        rest = f",{json.dumps(line)[1:]}\n".encode()
        aside.write_bytes(b'{"crc":"%08x"' % zlib.crc32(rest) + rest)
        aside.replace(path)

    def shown(self) -> dict[str, Any]:
        """What the sidecar shows."""
        content: dict[str, Any] = json.loads((RUN_DIR / "world").read_bytes())
        return content

    def boundary(self) -> None:
        """Wait until the rank may make its next step in the world that it is in."""
        while True:
            shown = self.shown()
            phase, number = shown["phase"], int(self.part["number"])
            if phase == "form" and shown["number"] > self.part.get("tried", 0):
                self.form(shown)
            elif (
                phase == "train"
                and dist.is_initialized()
                and shown["number"] == (self.part.get("formed") or number)
            ):
                self.say(number=shown["number"], formed=None, held=None, epoch=shown["epoch"])
                return
            elif phase == "hold" and number > 0:
                if shown["step"] is not None and self.step < shown["step"]:
                    return
                if self.part.get("held") != shown["epoch"]:
                    self.say(held=shown["epoch"], epoch=shown["epoch"])
            elif phase == "broken" and self.part["epoch"] < shown["epoch"]:
                self.destroy()
                self.say(epoch=shown["epoch"], broken=None, held=None, formed=None)
            elif phase == "over":
                sys.exit(0)
            time.sleep(0.002)

    def form(self, shown: dict[str, Any]) -> None:
        """Form the world that is shown, with the state of its source."""
        self.destroy()
        number = self.part["tried"] = shown["number"]
        rank, size = shown["first_rank"] + LOCAL, shown["size"]
        try:
            host, port = shown["store"].rsplit(":", 1)
            base = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(shown["prefix"], base),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=25),
            )
            state = torch.tensor([self.step])
            dist.broadcast(state, shown["source"])
            assert int(state) == shown["step"], f"the source is at {int(state)}"
        except RuntimeError as error:
            self.say(failed=[number, f"{error}"[:80].encode("ascii", "replace").decode()])
            return
        self.rank, self.size = rank, size
        self.say(step=int(state), formed=number, ready=None, epoch=shown["epoch"], held=None)

    def destroy(self) -> None:
        """Give the group up."""
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    me = Rank()
    me.say(ready=True)
    name = f"{os.environ['STEP_LOOP_NODE']}.{os.getpid()}"
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with open(Path(os.environ["STEP_LOOP_DIR"]) / name, "a", buffering=1) as steps:
        while True:
            me.boundary()
            wishes = torch.tensor([1, int(me.rank == 0 and STOP.exists())])
            try:
                dist.all_reduce(wishes)
            except RuntimeError:
                me.destroy()
                me.say(broken=me.part["number"])
                continue
            assert int(wishes[0]) == me.size, f"summed {int(wishes[0])} ranks of {me.size}"
            world = me.part["number"]
            steps.write(
                f"{time.monotonic()} {me.step + 1} {me.rank} {me.size} {restarts} {os.getpid()}"
                f" {world}\n"
            )
            if int(wishes[1]):
                me.say(over=True)
                break
            me.say(step=me.step + 1)
            time.sleep(STEP_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
