# SPDX-License-Identifier: Apache-2.0
"""``first_hour``: a newcomer's waiting times, on a machine that has torch.

From ``pip install`` to the first picture of the newcomer's own job; and from the crash of a worker
to its error on the screen, beside the line about it in torchrun's own log.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import venv
from asyncio.subprocess import PIPE, Process
from datetime import datetime
from pathlib import Path

from benchmarks.figures import Bar, Figure, of_runs, say, say_load
from tests.support.first_hour.hour import furnish

ROOT = Path(__file__).parents[1]
CRASHES = 3
WITHIN_S = 300.0
"""Time limit for a process that hangs."""

CRASHING = """
import os, time
import torch
time.sleep(1)
with open(os.environ["CRASHES"], "a") as crashes:
    print(time.time(), file=crashes)
raise ValueError("this script cannot train")
"""

_FAILED = re.compile(r"^E(\d{4} \d\d:\d\d:\d\d\.\d+) .*failed \(exitcode", re.MULTILINE)
"""torchrun's own line about a failed worker, with month, day and local time."""


async def measure(crashes: int = CRASHES) -> list[Figure]:
    """Install once and train once; then crash ``crashes`` times."""
    say_load()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory:
        root = Path(directory)
        install_s, picture_s = await _first_picture(root)
        say(f"installed after {install_s:.1f} s")
        told = [await _crash(root / f"crash-{number}") for number in range(crashes)]
    shown, logged = [one for one, _ in told], [one for _, one in told]
    whole = Figure(
        "first_hour/pip install to the first picture",
        picture_s,
        "s",
        Bar("value", "<=", 60),
        (picture_s,),
        install_s,
        "of it the installation",
    )
    error = of_runs(
        "first_hour/crash of a worker to its error on the screen",
        "s",
        Bar("value", "<=", 2),
        shown,
        logged,
        "torchrun's own line in its log",
    )
    beyond = tuple(one - other for one, other in told)
    after = of_runs(
        "first_hour/error on the screen after torchrun's own line",
        "s",
        Bar("value", "<=", 0.5),
        beyond,
    )
    return [whole, error, after]


async def _first_picture(root: Path) -> tuple[float, float]:
    """Measure the seconds from the start to the end of the installation, and to the picture."""
    place, report, source = root / "venv", root / "report", root / "source"
    own = root / "own"
    own.mkdir()
    furnish(own)
    await asyncio.to_thread(_prepare, place, source)
    began_s = time.monotonic()
    await _done(
        *(sys.executable, "-m", "pip", "--python", place / "bin" / "python"),
        *("install", "--quiet", "--ignore-installed", source / "lib", source),
        cwd=root,
    )
    install_s = time.monotonic() - began_s
    await _done(
        *(place / "bin" / "muster", "local", "--nodes", "2", "--report", report),
        *("--", "torchrun", own / "plain.py"),
        cwd=own,
    )
    if not (report / "world.svg").exists():
        raise RuntimeError("the job has finished without a picture")
    return install_s, time.monotonic() - began_s


def _prepare(place: Path, source: Path) -> None:
    """Make an environment with torch, and a copy of the checkout without build artefacts."""
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    packages.joinpath("torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "out", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)


async def _crash(directory: Path) -> tuple[float, float]:
    """Measure the seconds from a crash to its error on the screen, and to torchrun's line."""
    crashes, logs = directory / "crashes", directory / "logs"
    script = await asyncio.to_thread(_write_script, directory)
    process = await _start(
        *(sys.executable, "-P", "-m", "muster", "local", "--nodes", "2", "--min", "2", "--json"),
        *("--log-dir", logs, "--", "torchrun", script),
        cwd=directory,
        CRASHES=str(crashes),
        PYTHONPATH=str(ROOT),
    )
    assert process.stdout is not None
    shown_at_s = 0.0
    async with asyncio.timeout(WITHIN_S):
        async for line in process.stdout:
            if not shown_at_s and json.loads(line)["what"] == "error":
                shown_at_s = time.time()
        await process.wait()
    crashed_at_s, logged_at_s = await asyncio.to_thread(_first_crash, crashes, logs)
    return shown_at_s - crashed_at_s, logged_at_s - crashed_at_s


def _write_script(directory: Path) -> Path:
    directory.mkdir()
    script = directory / "crashes.py"
    script.write_text(CRASHING)
    return script


def _first_crash(crashes: Path, logs: Path) -> tuple[float, float]:
    """Return the times of the first crash and of torchrun's first line about one, wall clock."""
    texts = [log.read_text() for log in logs.glob("*/torchrun.log")]
    logged_at_s = min(_logged_at_s(found) for text in texts for found in _FAILED.findall(text))
    return min(map(float, crashes.read_text().split())), logged_at_s


def _logged_at_s(text: str) -> float:
    year = datetime.now().astimezone().year
    return datetime.strptime(f"{year}{text}", "%Y%m%d %H:%M:%S.%f").timestamp()


async def _start(*command: object, cwd: Path, **environ: str) -> Process:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    words = map(str, command)
    env = {**kept, "PATH": path, **environ}
    return await asyncio.create_subprocess_exec(*words, cwd=cwd, env=env, stdout=PIPE)


async def _done(*command: object, cwd: Path) -> None:
    process = await _start(*command, cwd=cwd)
    async with asyncio.timeout(WITHIN_S):
        said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said.decode()}")
