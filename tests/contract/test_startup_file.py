# SPDX-License-Identifier: Apache-2.0
"""The start-up file of the delivered folder, in Pythons with a stand-in for torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.rundir.programs import program
from launcher_shim.pod import launch
from launcher_shim.rundir import layout
from tests.support.sidecars.processes import PATIENCE_S

NAME = "torch.distributed.launcher.api"
LAUNCHER = """
import dataclasses, typing
@dataclasses.dataclass
class LaunchConfig:
    min_nodes: int = 2
    max_nodes: int = 2
    run_id: str = "none"
    rdzv_backend: str = "static"
    rdzv_endpoint: str = "head:29500"
    rdzv_configs: dict = dataclasses.field(default_factory=lambda: {"rank": 1})
    max_restarts: int = 0
    local_addr: typing.Optional[str] = None
def launch_agent(config, entrypoint, args, health_check_server=None):
    "The docstring."
    return config.rdzv_backend, config.rdzv_endpoint, config.min_nodes, entrypoint, args
class elastic_launch:
    def __init__(self, config, entrypoint):
        self._config, self._entrypoint = config, entrypoint
    def __call__(self, *args):
        return launch_agent(self._config, self._entrypoint, list(args))
"""
LAUNCH = """
from torch.distributed.launcher import api
config = api.LaunchConfig()
print(*api.elastic_launch(config, "t.py")("x"), config.rdzv_backend)
"""
STATIC = "static head:29500 2 t.py ['x'] static\n"
DELIVERED = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:1",  # where nobody answers
    "PET_RDZV_ID": "digits",
    "PET_NNODES": "1:3",
}


class Ran(NamedTuple):
    out: str
    err: str


class Container:
    """A folder with a run directory, and with packages of the image."""

    def __init__(self, root: Path) -> None:
        self.run_dir, self.image = root / "run", root / "image"
        (self.run_dir / layout.PROGRAMS).mkdir(parents=True)
        self.programs = self.run_dir / layout.PROGRAMS / layout.TORCHRUN
        self.programs.write_bytes(program(layout.TORCHRUN))
        self.modules = self.run_dir / layout.MODULES
        self.modules.mkdir()
        source = Path(launch.__file__).parent / layout.STARTUP
        (self.modules / layout.STARTUP).write_bytes(source.read_bytes())
        launcher = self.image / "torch/distributed/launcher"
        launcher.mkdir(parents=True)
        for folder in (launcher, launcher.parent, launcher.parent.parent):
            (folder / "__init__.py").write_text("")
        (launcher / "api.py").write_text(LAUNCHER)

    def python(
        self, code: str, environ: Mapping[str, str], *folders: Path, ours: bool = True
    ) -> Ran:
        """Run some code in a Python of the container."""
        path = [*([self.modules] if ours else []), *folders, self.image]
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.image,
            env={"PYTHONPATH": os.pathsep.join(map(str, path)), **environ},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        return Ran(ran.stdout, ran.stderr)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_torchs_launcher_gets_the_sidecars_rendezvous(container: Container) -> None:
    ran = container.python(LAUNCH, DELIVERED)
    assert ran.out == "c10d localhost:1 1 t.py ['x'] static\n"
    assert [line.partition(" is ")[0] for line in ran.err.splitlines()] == [
        "muster-run: nnodes: 2:2",
        "muster-run: rdzv_backend: static",
        "muster-run: rdzv_endpoint: head:29500",
    ]
    looked = f"import importlib.util\nimportlib.util.find_spec('{NAME}')\n"
    assert container.python(looked + LAUNCH, DELIVERED) == ran
    described = "import inspect\nfrom torch.distributed.launcher.api import launch_agent as one\n"
    described += "print(one.__doc__, *inspect.signature(one).parameters)"
    assert container.python(described, DELIVERED) == container.python(described, {}, ours=False)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**DELIVERED, "MUSTER_KEEP_FLAGS": "1"},
        {**DELIVERED, "PET_RDZV_ENDPOINT": "head:29400"},
        {**DELIVERED, "TORCHELASTIC_RUN_ID": "digits"},
    ],
    ids=["no sidecar", "kept flags", "elsewhere", "a worker"],
)
def test_any_other_launcher_is_as_it_was(container: Container, environ: dict[str, str]) -> None:
    assert container.python(LAUNCH, environ) == (STATIC, "")


def test_one_that_becomes_a_worker_after_its_start_is_as_it_was(container: Container) -> None:
    spawned = "import os\nos.environ['TORCHELASTIC_RUN_ID'] = 'digits'\n" + LAUNCH
    assert container.python(spawned, DELIVERED) == (STATIC, "")


ACCELERATE = """
def simple_launcher(args):
    return "alone"
def multi_gpu_launcher(args):
    import os
    return "by torch", args.num_processes, os.environ.get("ACCELERATE_USE_CPU")
"""
ALONE = """
import argparse
from accelerate.commands.launch import simple_launcher
given = argparse.Namespace(num_processes={processes}, num_machines={machines}, cpu={cpu})
given.mpirun_hostfile = {hosts}
print(simple_launcher(given))
"""


@pytest.mark.parametrize(
    ("processes", "machines", "cpu", "hosts", "environ", "out"),
    [
        (None, 1, False, None, DELIVERED, "('by torch', 1, None)"),
        (0, 1, False, None, DELIVERED, "('by torch', 1, None)"),
        (4, 2, True, None, DELIVERED, "('by torch', 4, 'true')"),
        (4, 2, True, "hosts", DELIVERED, "alone"),
        (1, 1, False, None, {}, "alone"),
        (1, 1, False, None, {**DELIVERED, "MUSTER_KEEP_FLAGS": "1"}, "alone"),
    ],
)
def test_accelerates_single_process_comes_to_torchs_launcher(
    container: Container,
    processes: int | None,
    machines: int,
    cpu: bool,
    hosts: str | None,
    environ: dict[str, str],
    out: str,
) -> None:
    commands = container.image / "accelerate/commands"
    commands.mkdir(parents=True)
    for folder in (commands, commands.parent):
        (folder / "__init__.py").write_text("")
    (commands / "launch.py").write_text(ACCELERATE)
    code = ALONE.format(processes=processes, machines=machines, cpu=cpu, hosts=repr(hosts))
    assert container.python(code, environ).out == f"{out}\n"
    (commands / "launch.py").write_text("def simple_launcher(args):\n    return 'alone'\n")
    assert container.python(code, environ).out == "alone\n"


def _lose_the_programs(container: Container) -> None:
    container.programs.unlink()


def _damage_them(container: Container) -> None:
    container.programs.write_bytes(b"#!/bin/sh\n")


def _rename_a_field(container: Container) -> None:
    api = container.image / "torch/distributed/launcher/api.py"
    api.write_text(LAUNCHER.replace("run_id", "run_name"))


@pytest.mark.parametrize("break_it", [_lose_the_programs, _damage_them, _rename_a_field])
def test_what_is_unexpected_leaves_the_launcher_as_it_was(
    container: Container, break_it: Callable[[Container], None]
) -> None:
    break_it(container)
    ran = container.python(LAUNCH, DELIVERED)
    assert ran.out == STATIC
    (line,) = ran.err.splitlines()
    assert line.startswith(f"muster-run: {NAME} is left as it is: ")


def test_a_torch_without_the_function_starts_as_it_was(container: Container) -> None:
    (container.image / "torch/distributed/launcher/api.py").write_text("other = 1\n")
    ran = container.python(
        "from torch.distributed.launcher.api import other; print(other)", DELIVERED
    )
    assert ran.out == "1\n"
    assert "is left as it is: it has no 'launch_agent'" in ran.err


NEXT = {
    "plain": "print('next', __name__, __file__ != '')",
    "that fails": "print('next'); raise ValueError('theirs')",
    "that misses a module": "print('next'); import missing_one",
    "that ends Python": "print('next', flush=True); import os; os._exit(0)",
    "that changes the path": "import sys; sys.path.insert(0, '/elsewhere')",
    # As tracers do: each runs the next one, without its own folder in the path.
    "that runs the next": """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path.remove(here)
ours = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    print("none after me")
else:
    print("after me", sitecustomize.__file__)
    ours = sitecustomize
sys.modules["sitecustomize"] = ours
sys.path.insert(0, here)
""",
}


@pytest.mark.parametrize("text", NEXT.values(), ids=NEXT.keys())
@pytest.mark.parametrize("environ", [{}, DELIVERED], ids=["no sidecar", "sidecar"])
def test_the_next_one_runs_as_if_ours_were_absent(
    container: Container, tmp_path: Path, text: str, environ: dict[str, str]
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(text)
    shown = "import sys; ours = {m!r}; print([one for one in sys.path if one != ours])"
    shown = shown.format(m=str(container.modules))
    known = "; print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
    without = container.python(shown + known, environ, theirs, ours=False)
    assert container.python(shown + known, environ, theirs) == without
    # Another run directory's, as of muster local within a pod.
    other = Container(tmp_path / "other")
    assert container.python(shown, environ, theirs, other.modules).err == without.err
    assert "next" in without.out or "path" in text or "after" in without.out


def test_a_python_without_torch_imports_nothing_for_it(container: Container) -> None:
    shown = "import sys; print(sorted(sys.modules))"
    without = container.python(shown, {}, ours=False).out
    for environ in ({}, DELIVERED, {"TORCHELASTIC_RUN_ID": "digits", "GROUP_RANK": "1"}):
        assert eval(container.python(shown, environ).out) == eval(without)


@pytest.mark.parametrize(
    ("environ", "node_rank"),
    [
        ({"TORCHELASTIC_RUN_ID": "digits", "GROUP_RANK": "2"}, "2"),
        ({"TORCHELASTIC_RUN_ID": "digits", "GROUP_RANK": "2", "NODE_RANK": "7"}, "7"),
        ({"TORCHELASTIC_RUN_ID": "digits"}, "None"),
        ({"GROUP_RANK": "2"}, "None"),
        (DELIVERED, "None"),
    ],
)
def test_a_worker_has_the_rank_of_its_node(
    container: Container, environ: dict[str, str], node_rank: str
) -> None:
    shown = "import os; print(os.environ.get('NODE_RANK'))"
    assert container.python(shown, environ).out == f"{node_rank}\n"
