# SPDX-License-Identifier: Apache-2.0
"""The library alone: on the oldest Python, and where the system has less than Linux has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import older_pythons
from tests.support.sources import ROOT, relative, sources

PYTHONS = [sys.executable, *older_pythons()]

LESS = """
import ctypes, importlib.abc, importlib.machinery, json, logging, mmap, multiprocessing, os, random
import signal, socket, subprocess, sys, tempfile, threading, time, types

for name in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
sys.modules["numpy"] = None  # this system's looks for what only this system has
WINDOWS_HAS_NOT = {
    mmap: "MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_EXEC PROT_READ PROT_WRITE",
    os: "EX_OK O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC WNOHANG fchmod fchown"
    " fork getegid geteuid getgid getloadavg getpgid getuid killpg mkfifo nice pread pwrite"
    " register_at_fork sched_getaffinity setpgid setsid statvfs sync uname wait waitid",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 alarm pause pthread_kill"
    " pthread_sigmask set_wakeup_fd setitimer sigwait",
    socket: "AF_UNIX SCM_RIGHTS socketpair",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC CLOCK_REALTIME clock_gettime",
}
for module, names in WINDOWS_HAS_NOT.items():
    for name in names.split():
        vars(module).pop(name, None)


class AnyLibrary(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    '''Stands for the libraries that callbacks are for: each name of them is an empty class.'''

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("accelerate", "lightning", "torch", "transformers"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = lambda name: type(name, (), {})


sys.meta_path.insert(0, AnyLibrary())
"""

TRAINS = """
import muster
from muster.data import ElasticSampler

sampler = ElasticSampler(10, global_batch=4, micro_batch=2, seed=1)
begun = muster.last_commit()
assert begun is None, begun
sampler.go_to(None)
step, trained = 0, []
with muster.drain() as drain:
    while sampler.epoch < 1:
        for batch, part in sampler.follow(sampler):
            trained += batch[: part.samples]
            if part.ends_step:
                step += 1
                if drain.commit_due(step) or step % 2 == 0:
                    drain.committed(step, cursor=sampler.cursor)
assert sorted(trained) == list(range(10)), trained
assert drain.seconds_left is None and not drain.leaving
shards = muster.data.shards(7, shard_size=2)
assert [record for shard in shards for record in shard] == list(range(7))
print(step, muster.save_tag(), muster.data.scale_lr(1.0, base_world_size=1))
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with the library, and nothing else of the project."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "muster", tmp_path / "muster", ignore=ignored)
    return tmp_path


def output(python: str, library: Path, script: str) -> str:
    done = subprocess.run(
        [python, "-c", script],
        cwd=library,
        env={"PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("python", PYTHONS)
def test_every_module_is_imported_without_what_windows_lacks(python: str, library: Path) -> None:
    found = (relative(path).removesuffix(".py") for path in sources("muster"))
    names = [name.removesuffix("/__init__").replace("/", ".") for name in found]
    script = "\n".join([LESS, *(f"import {name}" for name in names), "print('imported')"])
    assert output(python, library, script) == "imported\n"


@pytest.mark.parametrize("python", PYTHONS)
def test_a_script_trains_without_what_windows_lacks(python: str, library: Path) -> None:
    assert output(python, library, LESS + TRAINS).split()[0] == "3"
