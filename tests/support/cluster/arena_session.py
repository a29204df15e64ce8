# SPDX-License-Identifier: Apache-2.0
"""Arena's session, verb by verb, in the real cluster: how long each takes from enter to its effect.

    scripts/arena-session [--horovod]

A cluster that is not there is made, and ended afterwards; so is the chart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sidecar_image.image import sidecar_archive
from tests.support.cluster.chart_release import NAMESPACE, ChartRelease
from tests.support.cluster.claim import claimed
from tests.support.cluster.horovod_job import prepare
from tests.support.cluster.lab import NODES, Kubelab
from tests.support.cluster.team import TIMEOUT_S, Team, ended, torchrun
from tests.support.horovod.cluster import horovod_folder
from tests.support.waiting import wait_until

JOB = "elastic-training"
GPU = "nvidia.com/gpu"
PUBLISHED_S = {"scaleout": 30, "scalein": 11}
"""What the guide of et-operator shows."""
SIZES = ("--workers=1", "--min-workers=1", "--max-workers=3", "--gpus=1")


@dataclass(frozen=True, slots=True)
class Verb:
    """A command that was typed: when it had ended, and when its effect was seen, since enter."""

    words: str
    ended_s: float
    effect: str = ""
    effect_s: float | None = None

    @property
    def published(self) -> str:
        """What et-operator takes for the like."""
        verb = self.words.split()[0]
        return f"{PUBLISHED_S[verb]} s" if verb in PUBLISHED_S else ""


@dataclass
class Lines:
    """The lines of ``muster logs -f``, with the time at which each came."""

    came: list[tuple[float, str]] = field(default_factory=list)

    def read(self, process: subprocess.Popen[str]) -> None:
        """Take in all lines until the command ends."""
        assert process.stdout is not None
        for line in process.stdout:
            self.came.append((time.monotonic(), line.rstrip()))

    def find(self, pattern: str, since_s: float) -> tuple[float, str] | None:
        """The first line after ``since_s`` that fits, and when it came."""
        shown = re.compile(pattern)
        return next((one for one in self.came if one[0] >= since_s and shown.search(one[1])), None)


class ArenaSession:
    """One session about one job. ``horovod``: it is a horovodrun's."""

    def __init__(self, team: Team, *, horovod: bool = False) -> None:
        self.verbs: list[Verb] = []
        self.lines = Lines()
        self._team = team
        self._horovod = horovod

    def run(self) -> None:
        """Type all of it; raises ``AssertionError`` where a verb does not do what it says."""
        self._submit()
        with self._following():
            self._effect("first line of rank 0", self._first("rank 0 of 1"))
            self._typed("get", JOB)
            self._effect("it shows that the job trains", self._until(self._trains, "it trains"))
            shown = self._typed("logs", JOB, "--tail", "10")
            assert re.search(r"^\[0\] ", shown, re.MULTILINE), shown
            self._typed("scaleout", JOB, "--count=1", "--timeout=10m")
            self._effect("the new worker's first line", self._first(r"^\[1\] .*rank 1 of 2"))
            self._typed("scalein", JOB, "--count=1", "--timeout=10m")
            self._effect("one trains on", self._first(r"^\[0\] .*rank 0 of 1"))
            self._until(lambda: not self._highest(), "the pod with the highest index is gone")
            shown = self._typed("top", JOB)
            assert JOB in shown, shown
            self._typed("delete", JOB)
            self._effect("no pod is left", self._until(lambda: not self._pods(), "all are gone"))

    def table(self) -> str:
        """The verbs as a Markdown table."""
        rows = [
            "| verb | command ends after | effect | after | et-operator |",
            "|---|---|---|---|---|",
        ]
        for one in self.verbs:
            effect_s = "" if one.effect_s is None else f"{one.effect_s:.1f} s"
            cells = (f"`muster {one.words}`", f"{one.ended_s:.1f} s", one.effect, effect_s)
            rows.append("| " + " | ".join((*cells, one.published)) + " |")
        return "\n".join(rows)

    # -- what is typed

    def _submit(self) -> None:
        began_s = time.monotonic()
        if self._horovod:
            folder = horovod_folder()
            counts = ("-np $((${workers}*${gpus}))", "--min-np $((${minWorkers}*${gpus}))")
            line = " ".join(
                (
                    *("horovodrun", *counts, "--max-np $((${maxWorkers}*${gpus}))"),
                    *("--gloo-timeout-seconds 120", "python examples/horovod_saving.py"),
                    "--steps 100000",
                )
            )
            path = f"-ePATH={folder}:/usr/local/bin:/usr/bin:/bin"
            process = self._team.submit(f"--name={JOB}", *SIZES, path, "-d", line=line)
        else:
            line = torchrun("examples/torch_steps.py", "--steps=1000000")
            process = self._team.submit(f"--name={JOB}", *SIZES, "-d", line=line)
        status, said = ended(process)
        assert status == 0, said
        print(said)  # noqa: T201
        self._note(f"submit --name={JOB} {' '.join(SIZES)} -d …", began_s)

    def _typed(self, *words: str) -> str:
        began_s = time.monotonic()
        status, said = ended(self._team.muster(*words))
        print(f"$ muster {' '.join(words)}\n{said}-> {status}")  # noqa: T201
        assert status == 0, said
        self._note(" ".join(words), began_s)
        return said

    def _note(self, words: str, began_s: float) -> None:
        self._began_s = began_s
        self.verbs.append(Verb(words, time.monotonic() - began_s))

    def _effect(self, what: str, at_s: float) -> None:
        last = self.verbs.pop()
        self.verbs.append(Verb(last.words, last.ended_s, what, at_s - self._began_s))

    # -- what is seen

    @contextmanager
    def _following(self) -> Iterator[None]:
        process = self._team.muster("logs", JOB, "-f")
        reading = threading.Thread(target=self.lines.read, args=(process,), daemon=True)
        reading.start()
        try:
            yield
        finally:
            process.kill()
            process.wait()
            reading.join()
            print("\n".join(line for _, line in self.lines.came))  # noqa: T201

    def _first(self, pattern: str) -> float:
        found: list[tuple[float, str]] = []

        def there() -> bool:
            one = self.lines.find(pattern, self._began_s)
            found.extend([one] if one else [])
            return bool(found)

        self._until(there, pattern)
        return found[0][0]

    def _highest(self) -> list[str]:
        names = [one["metadata"]["name"] for one in self._pods()]
        return [one for one in names if re.search(r"-1(-\w+)?$", one)]

    def _trains(self) -> bool:
        return f"{JOB}  training " in ended(self._team.muster("get", JOB))[1]

    @staticmethod
    def _until(condition: Callable[[], object], what: str) -> float:
        wait_until(condition, TIMEOUT_S, what)
        return time.monotonic()

    def _pods(self) -> Sequence[dict[str, dict[str, str]]]:
        found = self._team.lab.pods(self._team.namespace, f"muster.dev/job={JOB}")
        return [one for one in found if one["status"].get("phase") in ("Pending", "Running")]


@contextmanager
def gpus(lab: Kubelab) -> Iterator[None]:
    """Give each node some accelerators that are none: Arena's session asks for one a worker."""

    def give(count: str | None) -> None:
        status = json.dumps({"status": {"capacity": {GPU: count}, "allocatable": {GPU: count}}})
        for node in NODES:
            lab.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", status)

    give("4")
    try:
        yield
    finally:
        give(None)


def session(lab: Kubelab, directory: Path, *, horovod: bool) -> str:
    """Run one session in the lab that has the chart; return its table."""
    folders = [Path(horovod_folder()).parent] if horovod else []
    with gpus(lab), Team(lab, directory, *folders) as team:
        run = ArenaSession(team, horovod=horovod)
        run.run()
        return run.table()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--horovod", action="store_true", help="the job is a horovodrun's")
    parser.add_argument("--operator", action="store_true", help="with Kubeflow's training-operator")
    arguments = parser.parse_args()
    lab = Kubelab()
    with ExitStack() as until_the_end:
        directory = Path(tempfile.mkdtemp(prefix="arena-session-"))
        until_the_end.enter_context(claimed(lab))
        lab.command("up", timeout_s=600.0)
        if arguments.operator:
            lab.command("operator", timeout_s=1500.0)
        if arguments.horovod and "mpijobs.kubeflow.org" in lab.kubectl("get", "crd", "-o", "name"):
            prepare(lab)
        if f"namespace/{NAMESPACE}" not in lab.kubectl("get", "namespaces", "-o", "name"):
            lab.command("load", str(sidecar_archive()), timeout_s=300)
            until_the_end.enter_context(ChartRelease(lab))
        table = session(lab, directory, horovod=arguments.horovod)
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"\n{table}\n\nload averages: {load}")  # noqa: T201


if __name__ == "__main__":
    main()
