# SPDX-License-Identifier: Apache-2.0
"""Installed, nothing of Muster shadows a user's module, and no user's module breaks a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("agent", "console", "controller", "injection", "launcher_shim", "muster", "rdzv"),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
)
NAMES = ("agent", "console", "controller", "injection", "launcher_shim", "rdzv")
FORMS = ("wheel", pytest.param("editable", marks=pytest.mark.long), "checkout")
TRAINS = (*FORMS[:2], pytest.param("checkout", marks=pytest.mark.long))
"""Daily a checkout trains in ``test_first_hour.py``, beside modules of these names."""


def run(*command: str | Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **settings)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what builds leave in it."""
    target = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module", params=FORMS)
def command(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str | Path, ...]:
    """How ``muster`` is started, in an environment of its own that also has a foreign ``agent``."""
    place = tmp_path_factory.mktemp(request.param)
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    packages.joinpath("tested.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    packages.joinpath("agent").mkdir()
    packages.joinpath("agent", "__init__.py").write_text("OWNER = 'another distribution'\n")
    if request.param == "checkout":
        packages.joinpath("checkout.pth").write_text(f"{source}\n")
        return (python, "-m", "muster")
    how = ("--editable",) if request.param == "editable" else ()
    done = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall", *how, source),
    )
    assert done.returncode == 0, done.stderr
    return (place / "bin" / "muster",)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of a user with modules and packages of the names that the program's have."""
    tmp_path.joinpath("console.py").write_text("raise SystemExit('a user console')\n")
    tmp_path.joinpath("rdzv.py").write_text("raise SystemExit('a user rdzv')\n")
    for name in ("agent", "launcher_shim"):
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "__init__.py").write_text("OWNER = 'the user'\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--help",), 0, "Keep elastic training jobs running"),
        (("agent", "--help"), 0, "MUSTER_RUN_DIR"),
        (("agent",), 2, "MUSTER_JOB"),
        (("inject", "no-such-file.yaml"), 2, "no-such-file.yaml"),
    ],
)
def test_no_module_of_a_user_breaks_a_command(
    command: tuple[str | Path, ...],
    hostile: Path,
    arguments: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    done = run(*(*command, *arguments), cwd=hostile, env={**os.environ, "PYTHONPATH": str(hostile)})
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr


def test_nothing_shadows_a_module_of_a_user(command: tuple[str | Path, ...]) -> None:
    python = Path(command[0]).parent / "python"
    looked = "import agent, muster; print(agent.OWNER, muster.drain.__module__)"
    done = run(python, "-c", looked, cwd="/", env={"PATH": os.environ["PATH"]})
    assert done.stdout.split() == ["another", "distribution", "muster.draining"], done.stderr


@pytest.mark.torch
@pytest.mark.parametrize("command", TRAINS, indirect=True)
def test_a_job_trains_with_modules_of_these_names(
    command: tuple[str | Path, ...], hostile: Path
) -> None:
    script = hostile / "train.py"
    script.write_text("import agent, muster\nassert agent.OWNER == 'the user'\nprint('trained')\n")
    scripts = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    done = run(
        *(*command, "local", "--nodes", "1", "--min", "1", "--max", "1"),
        *("--log-dir", hostile / "logs", "--", "torchrun", script),
        cwd=hostile,
        env={**os.environ, "PYTHONPATH": str(hostile), "PATH": scripts},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(path.read_text() for path in hostile.glob("logs/**/*.log"))
    assert "trained" in logs
