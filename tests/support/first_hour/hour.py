# SPDX-License-Identifier: Apache-2.0
"""The first hour of a newcomer as a list of commands, run in a clean folder.

The folder has two trainings, and modules named as Muster's own packages, which are on
``PYTHONPATH``. What is printed becomes a transcript, in which times, ports and places are replaced.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from tests.support.ports import free_ports
from tests.support.sources import ROOT

OWN = Path(__file__).parent / "own"
TRANSCRIPT = ROOT / "tests" / "e2e" / "first_hour.txt"
HEAD = """\
The first hour with Muster, typed into a clean folder that has two trainings, plain.py and
drains.py, a crash.py, and modules named as Muster's own packages. Made by
scripts/first-hour --write; tests/e2e/test_first_hour.py compares what comes in any run.
T is a time, N a number.
"""
PATIENCE_S = 600.0
"""Ends a command that hangs."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command, after ``muster``, and the patterns of what it prints in any run, in this order.

    ``until``: what it prints before it gets a Ctrl-C; ``stays``: it is then left running beside the
    commands that follow, and ends with the hour, or before the step of the name ``ends``.
    """

    command: str
    stable: tuple[str, ...]
    until: str = ""
    stays: str = ""
    ends: str = ""


TRACEBACK = ("Traceback .*", "import torhc", "^ModuleNotFoundError: .*")
STEPS = (
    Step("--version", ("^muster",)),
    Step("drian w0", ("there is no command .*", "see .*")),
    Step("local --noeds 2 -- torchrun plain.py", ("No such option.*", "see .*")),
    Step("local --nodes 2 -- torchrun nothere.py", ("nothere.py: .*", "see .*")),
    Step(
        "local --nodes 1 -- torchrun crash.py", ("error .*", "end .*the same error.*", *TRACEBACK)
    ),
    Step(
        "local --nodes 2 --min 2 -- torchrun plain.py",
        ("round  .*", "closed .*", "end .*", "trained .*", "No step was found .*"),
    ),
    Step(
        "local --nodes 2 --min 1 --event drain:rank0@world2 -- torchrun drains.py",
        (
            *("drain  .*", "draining .*", "committed at step .*", "no step is lost"),
            *("end .*", "trained .*", "no step lost"),
        ),
    ),
    Step(
        "local --nodes 1 -- torchrun plain.py",
        ("end .*ended by SIGINT; exit status 130",),
        until="launched",
    ),
    Step("store --listen 127.0.0.1:{store}", ("The store listens .*",), "restart", stays="store"),
    Step("store --listen 127.0.0.1:{store}", ("cannot listen .*",)),
    Step(
        "agent --job digits --member w0 --min 1 --max 2 --run-dir n0 --c10d-port 0"
        " --http-port {http} --log-format plain",
        ("registered .*",),
        until="registered",
        stays="agent",
    ),
    Step("list", ("NAMESPACE .*", "default .*")),
    Step("status digit", ("the store has no job .*",)),
    Step("status digits --wide", ("default/digits.*", "MEMBER .*", "w0 .*")),
    Step("history digits", ("join .*",)),
    Step("drain nobody --job digits", ("job digits has no member .*",)),
    Step("doctor digits", ("note .*", "ok .*")),
    Step("status digits", ("cannot reach the store .*",), ends="store"),
)


def kept_steps() -> list[str]:
    """What each step printed when the transcript was made."""
    _, *steps = TRANSCRIPT.read_text(encoding="utf-8").split("\n$ ")
    return [f"$ {step}" for step in steps]


def run_hour(folder: Path) -> list[str]:
    """Run every step; return what each printed, as the transcript has it."""
    furnish(folder)
    store, http = free_ports(2)
    environ = _environ(folder, store)
    told = []
    with ExitStack() as running:
        beside: dict[str, ExitStack] = {}
        for step in STEPS:
            if step.ends:
                beside[step.ends].close()
            words = shlex.split(step.command.format(store=store, http=http))
            stack = beside.setdefault(step.stays, running.enter_context(ExitStack()))
            printed, status = stack.enter_context(_command(words, step, folder, environ))
            text = f"$ muster {shlex.join(words)}\n{printed}"
            text += "" if status is None else f"[exit status {status}]\n"
            told.append(_normal(text, {str(folder): "~", str(store): "PORT", str(http): "PORT"}))
            if not step.stays:
                stack.close()
    return told


def stable_lines(step: Step, text: str) -> list[str]:
    """What of a step's output is the same in each run; of lines that repeat the first."""
    found = []
    for line in text.splitlines():
        match = next((m for pattern in step.stable if (m := re.search(pattern, line))), None)
        if match or line.startswith(("$", "[exit")):
            found.append(_unordered(match[0] if match else line))
    return list(dict.fromkeys(found))


def _unordered(line: str) -> str:
    """Leave out who it is, how often it was, and how wide: what comes first is chance."""
    line = re.sub(r" +", " ", re.sub(r"(local )?rank \d|node-\d", "SOMEBODY", line))
    return re.sub(r" \(.*restart.*\)|(?<=: )SOMEBODY, SOMEBODY|\d+(?= of \d)", "", line)


def _normal(text: str, places: dict[str, str]) -> str:
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, name in (
        (r"^ *\d+\.\d s  ", "    T s  "),
        (r"(\d+ min )?\d+(\.\d+)? (s|ms)\b", r"T \3"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r"muster-logs-\w+", "muster-logs-…"),
        (r"(torchrun is|process|pid) \d+", r"\1 PID"),
        (r"(at step|first step:) \d+", r"\1 N"),
        (r"(?<=^muster )\S+ (\(.*?\), )?.*", "VERSION, …"),
        (r"(?<![\d.])0\.\d+\.\d+(\.\w+)*(?![\d.:])", "VERSION"),
        (r"\d+ rounds?;", "N rounds;"),
    ):
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text


def furnish(folder: Path) -> None:
    """Put a newcomer's own scripts and modules into ``folder``."""
    for script in OWN.glob("*.py"):
        shutil.copy(script, folder)
    (folder / "crash.py").write_text("import torhc\n")
    (folder / "agent").mkdir()
    (folder / "agent" / "__init__.py").write_text('"""The newcomer\'s own."""\n')
    (folder / "console.py").write_text("raise SystemExit('a console of the user')\n")


def _environ(folder: Path, store: int) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MUSTER_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), kept["PYTHONPATH"]]),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        "MUSTER_ETCD_ENDPOINTS": f"127.0.0.1:{store}",
        # Nobody who stalls is lost, or comes too late to save.
        **{"MUSTER_LEASE_TTL": "60", "MUSTER_GRACE_S": "90"},
    }


@contextmanager
def _command(
    words: list[str], step: Step, folder: Path, environ: dict[str, str]
) -> Iterator[tuple[str, int | None]]:
    """Run one command; gives what it printed, and its status unless it runs on until the end."""
    local = words[0] == "local"
    environ = {**environ, **({"MUSTER_ETCD_ENDPOINTS": ""} if local else {})}
    if step.until:
        environ["STEPS"] = "1000000"  # a training is not to end by itself
    program = "muster"
    if words[0] == "doctor":
        # What it thinks of the store's latency is about the machine.
        program = "tests.support.sidecars.patient"
        environ["PYTHONPATH"] = environ["PYTHONPATH"].removeprefix(f"{folder}{os.pathsep}")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", program, *words],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        timer = Timer(PATIENCE_S, process.kill)
        timer.start()
        assert process.stdout is not None
        printed = ""
        try:
            for line in process.stdout:
                printed += line
                if step.until and step.until in line:
                    if step.stays:
                        break
                    process.send_signal(signal.SIGINT)
            timer.cancel()
            yield printed, None if step.stays else process.wait()
        finally:
            timer.cancel()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
