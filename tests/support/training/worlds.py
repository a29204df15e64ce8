# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the sidecars of pods whose world changes in place, and their ranks as processes.

It hosts the store, writes each pod's order and reads what its rank publishes; what is decided, the
test says.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher_shim.rundir.rank_reports import read_whole
from tests.support.training.survivor import BATCH, ROWS, Case, train, undisturbed
from tests.support.training.worker import forks

DEADLINE_S = 100.0
NEAR = 1e-5
"""What weights differ by that were summed in another order."""


class Worlds:
    """Pods of one rank each, and the world that they are in. ``given``: fields of each ``Case``.

    ``life``: what each rank's process calls.
    """

    def __init__(self, folder: Path, life: Callable[[Case], None] = train, **given: Any) -> None:
        self.folder = folder
        self._life = life
        self.members: list[str] = []
        self.number = 0
        self.waits_s = 0.0
        """Time between the last rank's word that it has formed and the order to train."""
        self._given = given
        self._epochs: Counter[str] = Counter()
        self._orders: dict[str, dict[str, Any]] = {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[str, Any] = {}
        self._context = forks()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(DEADLINE_S)

    def start(self, *names: str, **given: Any) -> None:
        """Start the rank of each pod."""
        for name in names:
            case = replace(Case(name, self.folder), **{**self._given, **given})
            (case.run_dir / "progress").mkdir(parents=True, exist_ok=True)
            self.order(name, phase="idle")
            process = self._context.Process(target=self._life, args=(case,), daemon=True)
            process.start()
            self.processes[name] = process

    def begin(self, *names: str) -> None:
        """Let these form the first world; those of them that are not started yet are."""
        self.start(*(name for name in names if name not in self.processes))
        self.ready(*names)
        assert self.form(*names), self.shown()

    def order(self, name: str, **fields: Any) -> int:
        """Write a pod's order; return its epoch."""
        self._epochs[name] += 1
        epoch = self._epochs[name]
        self._orders[name] = {"number": self.number, **fields}
        path = self.folder / name / "world"
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps({"epoch": epoch, **self._orders[name]}))
        aside.replace(path)
        return epoch

    def told(self, name: str) -> dict[str, Any]:
        """What a rank has published of its world; empty before."""
        line = read_whole(self.folder / name / "progress" / "0.json")
        found: dict[str, Any] = json.loads(line or b"{}").get("world") or {}
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}: {self.shown()}"
            time.sleep(0.002)

    def shown(self) -> str:
        """What there is to see where something has not come."""
        errors = "".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.err")))
        told = {name: self.told(name) for name in self.processes}
        return f"orders {self._orders}, ranks say {told}\n{errors}"

    def is_dead(self, name: str) -> bool:
        return not self.processes[name].is_alive()

    def ready(self, *names: str) -> None:
        self.until(lambda: all(self.told(name).get("ready") for name in names), f"{names} ready")

    def at(self, step: int, *names: str) -> None:
        """Wait until ranks, by default all members, have made a step."""
        self.until(
            lambda: all(self.told(name).get("step", -1) >= step for name in names or self.members),
            f"step {step}",
        )

    def form(self, *names: str, source: str = "", step: int = 0) -> bool:
        """Let these form the next world; return whether they have."""
        self.number += 1
        source = source or names[0]
        for rank, name in enumerate(names):
            self.order(
                name,
                phase="form",
                step=step,
                size=len(names),
                first_rank=rank,
                source=names.index(source),
                store=f"127.0.0.1:{self._store.port}",
                prefix=f"muster.world/{self.number}/",
                local_size=1,
                seats=list(names),
            )

        def all_formed() -> bool:
            return all(self.told(name).get("formed") == self.number for name in names)

        def one_failed() -> bool:
            told = [self.told(name) for name in names]
            failed = [one for one in told if (one.get("failed") or [0])[0] == self.number]
            return bool(failed) or any(self.is_dead(name) for name in names)

        self.until(lambda: all_formed() or one_failed(), f"world {self.number} forms")
        if one_failed():
            return False
        time.sleep(self.waits_s)
        assert {self.told(name)["step"] for name in names} == {step}, "a step was made too early"
        self.members = list(names)
        for name in names:
            self.order(name, phase="train")
        return True

    def hold(self) -> int:
        """Let all members stand at one boundary; return its step."""
        epochs = {name: self.order(name, phase="hold", step=None) for name in self.members}
        votes = []
        for name, epoch in epochs.items():
            told = self.told(name)
            votes.append(told["step"] + (told.get("held") != epoch))
        step: int = max(votes)
        epochs = {name: self.order(name, phase="hold", step=step) for name in self.members}
        self.until(
            lambda: all(self.told(name).get("held") == epoch for name, epoch in epochs.items()),
            f"all held at {step}",
        )
        assert {self.told(name)["step"] for name in self.members} == {step}
        return step

    def join(self, *names: str) -> None:
        self.ready(*names)
        step = self.hold()
        assert self.form(*self.members, *names, step=step), self.shown()

    def leave(self, name: str) -> None:
        step = self.hold()
        others = [one for one in self.members if one != name]
        assert self.form(*others, step=step), self.shown()
        self.order(name, phase="leave")
        os.kill(self.processes[name].pid, signal.SIGTERM)
        self.until(lambda: self.is_dead(name), f"{name} ends")

    def lose(self, *lost: str, joined: Iterable[str] = ()) -> None:
        """Break the world as these are lost, and let the others form the next one."""
        others = [*(one for one in self.members if one not in lost), *joined]
        epochs = {name: self.order(name, phase="broken") for name in others}
        self.until(
            lambda: all(self.told(name)["epoch"] == epoch for name, epoch in epochs.items()),
            "all have given the world up",
        )
        steps = {name: self.told(name)["step"] for name in others}
        step = max(steps.values())
        source = next(name for name in others if steps[name] == step)
        assert self.form(*others, source=source, step=step), self.shown()

    def end(self, after: int = 6) -> int:
        """Let all members train some steps more, to their end; return the last step."""
        step = self.hold()
        (self.folder / "goal.part").write_text(str(step + after))
        (self.folder / "goal.part").replace(self.folder / "goal")
        for name in self.members:
            self.order(name, phase="train")
        self.until(lambda: all(map(self.is_dead, self.members)), "all end")
        assert [self.processes[name].exitcode for name in self.members] == [0] * len(self.members)
        return step + after

    def finish(self, after: int = 6, *, compared: bool = True) -> int:
        """End; see that no step was lost, and be ``compared`` with a run that nothing disturbs."""
        last = self.end(after)
        self.check(last)
        if compared:
            assert self.difference(last) < NEAR
        return last

    def log(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def digests(self) -> dict[int, set[str]]:
        """For each world, the digests of the state in which its ranks made their first step."""
        found: dict[int, set[str]] = {}
        for name in self.processes:
            for line in self.log(name):
                if "at" in line:
                    found.setdefault(line["world"], set()).add(f"{line['at']} {line['digest']}")
        return found

    def check(self, last: int) -> None:
        """No step lost or doubled, one state for all: against a run that nothing disturbs."""
        assert {number: len(ones) for number, ones in self.digests().items() if len(ones) > 1} == {}
        for name in self.processes:
            # One that took a step's state from a rank that had made it has not made it itself.
            steps = [line["step"] for line in self.log(name) if line.get("whole")]
            assert steps == sorted({*steps}), f"{name} has made a step twice"
            tries = [line["tries"] for line in self.log(name) if "tries" in line]
            assert len({*tries}) == len(tries), f"{name} has tried a world twice"
        assert sorted(step for step, _ in self.made()) == list(range(1, last + 1))
        ended = {self.log(name)[-1]["digest"] for name in self.members}
        assert len(ended) == 1 or self._given.get("norm")  # each moves its own statistics
        assert all(self.log(name)[-1]["ended"] == last for name in self.members)

    def difference(self, last: int) -> float:
        """The greatest difference of a weight from those of an undisturbed run."""
        *_, wanted = undisturbed(last)
        found = [torch.load(self.folder / f"{name}.pt") for name in self.members]
        return max(
            float((one - two).abs().max())
            for weights in found
            for one, two in zip(weights, wanted, strict=True)
        )

    def rows(self) -> dict[int, list[int]]:
        """The rows of each step, of all ranks together, in the world in which it was whole."""
        made = self.made()
        found: dict[int, list[int]] = {}
        for name in self.processes:
            for line in self.log(name):
                if "step" in line and (line["step"], line["world"]) in made:
                    found.setdefault(line["step"], []).extend(line["rows"])
        return found

    def check_rows(self, last: int) -> None:
        """Each row was trained once in each whole epoch, all of a batch in one step."""
        by_step, steps = self.rows(), ROWS // BATCH
        assert [len(by_step[step]) for step in range(1, last + 1)] == [BATCH] * last
        for epoch in range(last // steps):
            rows = Counter(row for at in range(steps) for row in by_step[epoch * steps + at + 1])
            assert rows == Counter(range(ROWS))

    def made(self) -> set[tuple[int, int]]:
        """The steps that a rank has made, each with its world."""
        lines = (line for name in self.processes for line in self.log(name))
        return {(line["step"], line["world"]) for line in lines if line.get("whole")}
