# SPDX-License-Identifier: Apache-2.0
"""Warm workers beside fresh ones: nobody can tell them apart but by their time.

A stand-in for torchrun starts them as torchrun does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.rundir.reports import read_plain_starts
from launcher_shim.pod import launch
from launcher_shim.rundir import layout
from tests.support.sidecars.processes import PATIENCE_S
from tests.support.training.starting import ENDS, FACTS, SAID, Ran, Torchrun
from tests.support.waiting import wait_until


class Both(NamedTuple):
    """A torchrun whose workers start afresh, and one whose workers are warm."""

    fresh: Torchrun
    warm: Torchrun

    def start(self, *words: Path | str, **how: Any) -> list[Ran]:
        """Let each start such a worker."""
        return [torchrun.start(*map(str, words), **how) for torchrun in self]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    root = tmp_path_factory.mktemp("warm")
    with closing(Torchrun(root, warm=False)) as fresh, closing(Torchrun(root, warm=True)) as warm:
        yield Both(fresh, warm)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the script of a worker is."""
    return tmp_path / "script.py"


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_a_fresh_one_does(both: Both, how: str, script: Path) -> None:
    script.write_text(ENDS[how])
    fresh, warm = both.start(script)
    assert warm == fresh
    assert SAID not in warm.err


TORN_DOWN = """
import atexit
class Last:
    def __del__(self):
        print("torn down")
last = Last()
atexit.register(print, "exit handler")
{end}
"""


@pytest.mark.parametrize(
    ("end", "out"),
    [("", "exit handler\ntorn down\n"), ("1 / 0", "exit handler\n")],
    ids=["well", "by an exception"],
)
def test_nothing_is_torn_down_after_an_exception(
    both: Both, script: Path, end: str, out: str
) -> None:
    script.write_text(TORN_DOWN.format(end=end))
    assert both.warm.start(str(script)).out == out


@pytest.mark.parametrize("words", [["script.py", "a", "-b"], ["-m", "package.inner", "x"]])
def test_it_was_given_what_a_fresh_one_is(both: Both, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/inner.py"):
        (tmp_path / name).write_text(FACTS)
    if words[0] == "script.py":
        words = [str(tmp_path / words[0]), *words[1:]]
    fresh, warm = both.start(*words, before=["env", f"--chdir={tmp_path}"])
    assert SAID not in warm.err
    assert fresh.err == warm.err == ""
    wanted, found = json.loads(fresh.out), json.loads(warm.out)
    assert {name: fact for name, fact in found.items() if fact != wanted[name]} == {}


HAS_CHILDREN = """
import multiprocessing as mp, subprocess, sys
def child(q): q.put((__name__, sys.modules['__main__'].__name__))
if __name__ == '__main__':
    for kind in ('fork', 'spawn', 'forkserver'):
        c = mp.get_context(kind); q = c.Queue(); p = c.Process(target=child, args=(q,))
        p.start(); print(kind, q.get(timeout=60)); p.join(); print(p.exitcode)
    asks = [sys.executable, '-c', 'import sys; print(sys.path[0] == "")']
    print(subprocess.run(asks, capture_output=True).stdout)
"""


def test_its_children_find_what_they_need(both: Both, script: Path) -> None:
    script.write_text(HAS_CHILDREN)
    fresh, warm = both.start(script)
    assert warm == fresh
    assert warm.status == 0
    assert SAID not in warm.err


def test_two_of_them_draw_different_numbers(both: Both, script: Path) -> None:
    script.write_text("import numpy, random; print(numpy.random.rand(), random.random())")
    first, second = (both.warm.start(str(script)) for _ in range(2))
    assert not set(first.out.split()) & set(second.out.split())


HANDLES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *a: (print("handled", flush=True), os._exit(9)))
print("ready", flush=True)
while True: time.sleep(0.1)  # pause() misses a signal that comes just before it
"""
WAITS = "import time; print('ready', flush=True)\nwhile True: time.sleep(1)"


def _until_ready(out: Path) -> list[str]:
    """Wait for the word of a worker; return what it has said before."""
    while "ready\n" not in out.read_text():
        os.sched_yield()
    return out.read_text().split()


def _once_ready(number: int) -> Callable[[int, Path], None]:
    def send(pid: int, out: Path) -> None:
        _until_ready(out)
        os.killpg(pid, number)

    return send


@pytest.mark.parametrize("code", [HANDLES, WAITS], ids=["it handles", "it does not handle"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_it(both: Both, code: str, number: int, script: Path) -> None:
    script.write_text(code)
    fresh, warm = both.start(script, meanwhile=_once_ready(number))
    assert warm == fresh


IMPATIENT = f"""
import os, sys
sys.path.insert(0, {str(Path(launch.__file__).parents[2])!r})
from launcher_shim.warm import stub, wire
sys.argv = sys.argv[1:]
line = stub._asked({{k: v for k, v in os.environ.items() if k != wire.OVERRIDE}})
os.killpg(stub._pid(line), {int(signal.SIGTERM)})
os._exit(wire.receive(line)[0]["status"])
"""


def test_a_signal_reaches_it_as_soon_as_its_stub_knows_it(both: Both, script: Path) -> None:
    script.write_text(WAITS)
    impatient = [sys.executable, "-c", IMPATIENT]
    ends = {both.warm.start(str(script), before=impatient).status for _ in range(10)}
    assert ends == {signal.SIGTERM}


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"CUDA_VISIBLE_DEVICES": "3"}, "the zygote's in CUDA_VISIBLE"),
    ({"before": ["prlimit", "--nofile=100"]}, "another limits than"),
    ({"before": ["nice", "-n", "3"]}, "another nice than"),
    ({"before": ["sh", "-c", 'umask 027; unset PWD; exec "$@"', "sh"]}, "another Umask than"),
    ({"before": ["taskset", "1"]}, "another Cpus_allowed_list than"),
]


@pytest.mark.parametrize(("how", "why"), OTHERS, ids=[why for _, why in OTHERS])
def test_one_that_is_given_something_else_starts_plainly_and_says_so(
    both: Both, how: dict[str, Any], why: str, script: Path
) -> None:
    script.write_text(FACTS)
    fresh, warm = both.start(script, **how)
    assert warm.err.startswith(SAID)
    assert why in warm.err
    assert json.loads(warm.out) == json.loads(fresh.out)


def test_the_sidecar_knows_which_workers_start_plainly_and_why(both: Both, script: Path) -> None:
    script.write_text("print('here')")
    warm = both.warm
    for former in (warm.run_dir / layout.PLAIN_STARTS).iterdir():
        former.unlink()
    warm.start(str(script), LOCAL_RANK="3", CUDA_VISIBLE_DEVICES="3")
    warm.start(str(script), LOCAL_RANK="4", before=["nice", "-n", "3"])
    first, second = read_plain_starts(warm.run_dir)
    assert "differs from the zygote's in CUDA_VISIBLE_DEVICES" in first
    assert "another nice" in second
    warm.start(str(script), LOCAL_RANK="3")
    assert read_plain_starts(warm.run_dir) == (second,)
    warm.start(str(script), LOCAL_RANK="4")
    assert read_plain_starts(warm.run_dir) == ()


WATCHES = {
    "threads": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
    "reads": "import os\nrank = os.environ.get('RANK', 'none')",
    "knows": "import os\nfirst = 'RANK' in os.environ",
    "sets": "import os\nos.environ['MADE_BY_IMPORT'] = 'yes'\nos.environ.pop('DROPPED', None)",
    "device": "import torch.cuda\ntorch.cuda.on = True",
    "fails": "raise RuntimeError('not here')",
    "plain": "",
}
REPORTS = """
import sys
print(sorted(set(sys.modules) & {names}))
{imports}
sys.__dict__.get("muster_imported", lambda: None)()
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    packages = tmp_path / "site-packages"
    for name, text in WATCHES.items():
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(text)
    cuda = packages / "torch/cuda"
    cuda.mkdir(parents=True)
    (cuda / "__init__.py").write_text("on = False\ndef is_initialized(): return on")
    return tmp_path


@pytest.mark.parametrize(
    ("package", "learned"),
    [
        ("threads", False),
        ("reads", False),
        ("knows", False),
        ("device", False),
        ("sets", True),
        ("plain", True),
    ],
)
def test_the_zygote_learns_what_workers_import_but_what_bears_no_fork(
    image: Path, script: Path, package: str, learned: bool
) -> None:
    script.write_text(REPORTS.format(names=set(WATCHES), imports=f"import {package}, plain"))
    known = sorted({package, "plain"} if learned else {"plain"})
    with closing(Torchrun(image, warm=True)) as torchrun:
        assert torchrun.start(str(script)) == (0, "[]\n", "")
        assert torchrun.start(str(script)) == (0, f"{known}\n", "")


def test_the_zygote_imports_nothing_of_the_folder_that_it_runs_in(
    image: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (image / "numpy.py").write_text("random = print")
    script = tmp_path_factory.mktemp("elsewhere") / "script.py"
    script.write_text("import numpy, os, sys\nprint(numpy.__file__, sys.path)")
    found = []
    for warm in (False, True):
        with closing(Torchrun(image, warm=warm)) as torchrun:
            found.append(torchrun.start(str(script)))
    assert found[1] == found[0]
    assert str(image / "numpy.py") not in found[0].out


MANY = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
for number in range(3000):
    name = "many.of_a_large_package_with_long_names.%d" % number
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None, origin=__file__)
"""


def test_a_part_of_torch_that_starts_a_thread_ends_neither_the_zygote_nor_its_workers(
    image: Path, script: Path
) -> None:
    part = image / "site-packages/torch/compiles"
    part.mkdir()
    (part / "__init__.py").write_text("")
    (part / "pool.py").write_text(WATCHES["threads"])
    (part / "front.py").write_text("import torch.compiles.pool")
    script.write_text(
        "import sys\nprint(sorted({'plain', 'torch.compiles.pool'} & {*sys.modules}))\n"
        "import torch.compiles.front, plain, time\n"
        'sys.__dict__.get("muster_imported", lambda: None)()\n'
        "time.sleep(1)\n"
    )
    with closing(Torchrun(image, warm=True)) as torchrun:
        assert torchrun.start(str(script)) == (0, "[]\n", "")
        assert torchrun.start(str(script)) == (0, "['plain']\n", "")


SLOW_TORCH = """
import os, time
if b"muster-zygote" in open("/proc/self/cmdline", "rb").read():
    time.sleep(1)
    open(os.environ["IMPORTED"], "w").close()
"""


def test_a_torchrun_asks_for_no_world_before_its_zygote_has_imported_torch(
    image: Path, script: Path
) -> None:
    imported = image / "imported"
    environ = {"IMPORTED": str(imported)}
    script.write_text("")
    look = 'test -e "$IMPORTED" || echo early >&2; exec "$@"'
    with closing(Torchrun(image, warm=True, environ=environ, torch=SLOW_TORCH)) as torchrun:
        started = torchrun.start(str(script), before=["sh", "-c", look, "sh"])
    assert imported.exists()
    assert "early" not in started.err


def test_a_zygote_begins_again_with_more_modules_than_a_word_can_name(
    image: Path, script: Path
) -> None:
    many = image / "site-packages/many"
    many.mkdir()
    (many / "__init__.py").write_text(MANY)
    script.write_text(REPORTS.format(names={"many", "reads"}, imports="import many, reads"))
    with closing(Torchrun(image, warm=True)) as torchrun:
        assert torchrun.start(str(script)) == (0, "[]\n", "")
        assert torchrun.start(str(script)) == (0, "['many']\n", "")


def test_a_worker_has_the_variables_that_its_imports_set(image: Path, script: Path) -> None:
    script.write_text(
        "import os, sets\n"
        "for name in ('MUSTER_WORKER', 'MUSTER_WARM'): os.environ.pop(name, None)\n"
        "print(sorted(os.environ.items()))\n"
        "import sys; sys.__dict__.get('muster_imported', lambda: None)()\n"
    )
    found = []
    for warm in (False, True):
        with closing(Torchrun(image, warm=warm, environ={"DROPPED": "1"})) as torchrun:
            found += [torchrun.start(str(script)) for _ in range(2)]
    assert found[1:] == found[:1] * 3
    assert "MADE_BY_IMPORT" in found[0].out
    assert "DROPPED" not in found[0].out


def _has_ended(pid: int) -> bool:
    """Whether it holds nothing any more: it may not be reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


LARGE = """
import os
held = bytearray(b"x") * (512 << 20)
print(os.getppid(), os.getpid(), flush=True)
"""
NEXT = """
import sys
try:
    print(open("/proc/%s/stat" % sys.argv[1]).read().rpartition(")")[2].split()[0] in "ZX")
except FileNotFoundError:
    print(True)
"""


def test_the_next_worker_starts_after_the_end_of_one_whose_stub_was_killed(image: Path) -> None:
    """The zygote is stopped meanwhile, and the worker has memory that takes a time to free."""
    first, following = image / "first.py", image / "next.py"
    first.write_text(LARGE + WAITS)
    following.write_text(NEXT)
    numbers: list[str] = []

    def kill_the_stub(stub: int, out: Path) -> None:
        numbers.extend(_until_ready(out)[:2])
        os.kill(int(numbers[0]), signal.SIGSTOP)
        os.killpg(stub, signal.SIGKILL)

    def go_on(stub: int, _out: Path) -> None:
        files = f"/proc/{stub}/fd/"
        wait_until(
            lambda: any("socket:" in os.readlink(files + one) for one in os.listdir(files)),
            PATIENCE_S,
            "the next stub asks",
        )
        os.kill(int(numbers[0]), signal.SIGCONT)

    with closing(Torchrun(image, warm=True)) as torchrun:
        assert torchrun.start(str(first), meanwhile=kill_the_stub).status == -signal.SIGKILL
        ended = torchrun.start(str(following), numbers[1], meanwhile=go_on)
    assert ended == (0, "True\n", "")


def test_a_worker_ends_with_its_zygote_and_the_next_one_starts_plainly(
    image: Path, script: Path
) -> None:
    script.write_text(LARGE + WAITS)

    def kill_the_zygote(_stub: int, out: Path) -> None:
        os.kill(int(_until_ready(out)[0]), signal.SIGKILL)

    with closing(Torchrun(image, warm=True)) as torchrun:
        ended = torchrun.start(str(script), meanwhile=kill_the_zygote)
        assert ended.status == 128 + signal.SIGKILL
        assert _has_ended(int(ended.out.split()[1]))
        script.write_text("print('fresh')")
        fresh = torchrun.start(str(script))
    assert (fresh.status, fresh.out) == (0, "fresh\n")
    assert fresh.err.startswith(SAID)
