# SPDX-License-Identifier: Apache-2.0
"""Worlds that come to stand still in turn, in every way, and what ``muster status`` says of it.

python -m tests.support.training.standing_drill --nodes 4 --times 25
python -m tests.support.training.standing_drill --nodes 2 --calm 10000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "stands_still.py"
FAULTS = {"stop": "is stopped", "loop": "outside of any", "loader": "data loader", "order": "waits"}
HARMLESS = ("evaluation", "save")
NAMED_S, MOVED_S, HARMLESS_S = 120.0, 120.0, 25.0


class Drill:
    """One job of ``muster local``, whose state is followed."""

    def __init__(self, nodes: int, after: str, folder: Path) -> None:
        self._folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environ = {
            **os.environ,
            "PATH": path,
            "CONTROL": str(folder),
            "MUSTER_STUCK_AFTER": after,
            "OMP_NUM_THREADS": "1",
        }
        self._number = 0
        command = [sys.executable, "-m", "muster", "local", "--nodes", str(nodes), "--job", "drill"]
        self._log = (folder / "local.log").open("w")
        self._job = subprocess.Popen(
            [*command, "--", "torchrun", str(SCRIPT)],
            env=self._environ,
            stdout=self._log,
            stderr=self._log,
        )

    def state(self) -> dict[str, Any]:
        """What ``muster status`` says now."""
        words = [sys.executable, "-m", "muster", "status", "drill", "--json"]
        run = subprocess.run(words, env=self._environ, capture_output=True, text=True, timeout=120)
        try:
            found: dict[str, Any] = json.loads(run.stdout)
        except ValueError:
            return {"verdict": {"state": "", "why": run.stderr}}
        return found

    def states(self, seconds: float) -> Iterator[dict[str, Any]]:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            yield self.state()
            time.sleep(1.0)

    def begin(self, kind: str, rank: int) -> None:
        self._number += 1
        aside = self._folder / "aside"
        aside.write_text(json.dumps({"kind": kind, "rank": rank, "number": self._number}))
        aside.replace(self._folder / "fault.json")

    def release(self, rank: int) -> None:
        aside = self._folder / "aside"
        aside.write_text(str(self._number))
        aside.replace(self._folder / "released")
        os.kill(int((self._folder / f"pid-{rank}").read_text()), signal.SIGCONT)

    def trains(self, nodes: int, seconds: float) -> bool:
        """Wait until steps are made again."""
        before = None
        for one in self.states(seconds):
            files = [self._folder / f"pid-{rank}" for rank in range(nodes)]
            now = [path.stat().st_mtime_ns for path in files if path.exists()]
            same = before is not None and any(a == b for a, b in zip(before, now, strict=False))
            if one["verdict"]["state"] == "training" and len(now) == nodes and before and not same:
                return True
            before = now
        return False

    def end(self) -> None:
        self._job.send_signal(signal.SIGINT)
        try:
            self._job.wait(60)
        except subprocess.TimeoutExpired:
            self._job.kill()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--times", type=int, default=25, help="of each fault")
    parser.add_argument("--after", default="5s")
    parser.add_argument("--calm", type=int, help="make so many steps without a fault instead")
    parser.add_argument("--first", type=float, default=0.0, help="seconds of the first step")
    arguments = parser.parse_args()
    chance = random.Random(1)
    plan = [*FAULTS, *HARMLESS] * arguments.times
    chance.shuffle(plan)
    found: Counter[tuple[str, str]] = Counter()
    os.environ["FIRST_S"] = str(arguments.first)
    with tempfile.TemporaryDirectory() as folder:
        drill = Drill(arguments.nodes, arguments.after, Path(folder))
        try:
            if not drill.trains(arguments.nodes, 300):
                raise SystemExit("it does not train: " + str(drill.state()["verdict"]))
            time.sleep(20)
            if arguments.calm:
                plan = []
                _calm(drill, arguments.calm, arguments.nodes, chance)
            for number, kind in enumerate(plan, 1):
                rank = chance.randrange(arguments.nodes)
                outcome = _one(drill, kind, rank, arguments.nodes)
                found[kind, outcome.split(":")[0]] += 1
                sys.stdout.write(f"{number} {kind} rank {rank}: {outcome}\n")
                sys.stdout.flush()
        finally:
            drill.end()
    for (kind, outcome), count in sorted(found.items()):
        sys.stdout.write(f"{kind:12} {outcome:12} {count}\n")


def _calm(drill: Drill, steps: int, nodes: int, chance: random.Random) -> None:
    """Save, evaluate and train until so many steps are made; print each alarm."""
    looks = alarms = at = 0
    while at < steps:
        rank, kind = chance.randrange(nodes), chance.choice(HARMLESS)
        drill.begin(kind, rank)
        for part_s in (HARMLESS_S, 2 * HARMLESS_S):
            for one in drill.states(part_s):
                looks += 1
                at = max(at, (one.get("last_save") or {}).get("seen_step") or 0)
                if one["verdict"]["state"] == "stuck":
                    alarms += 1
                    sys.stdout.write(f"step {at}, {kind} of rank {rank}: {one['verdict']['why']}\n")
            drill.release(rank)
        sys.stdout.write(f"step {at}: {kind} of rank {rank}, {alarms} alarms in {looks} looks\n")
        sys.stdout.flush()


def _one(drill: Drill, kind: str, rank: int, nodes: int) -> str:
    began_s = time.monotonic()
    drill.begin(kind, rank)
    outcome = "harmless" if kind in HARMLESS else "not named: nothing was said"
    for one in drill.states(HARMLESS_S if kind in HARMLESS else NAMED_S):
        said = one["verdict"]
        if said["state"] != "stuck":
            continue
        after_s = time.monotonic() - began_s
        right = f": rank {rank} (" in said["why"] and FAULTS.get(kind, "-") in said["why"]
        alone = said["why"].count("rank ") - said["why"].count("no rank ") == 1
        outcome = f"named: {after_s:.0f} s" if right and alone else f"wrong: {said['why']}"
        break
    drill.release(rank)
    if not drill.trains(nodes, MOVED_S):
        raise SystemExit(f"it does not train again after {kind}: {drill.state()['verdict']}")
    return outcome


if __name__ == "__main__":
    main()
