# SPDX-License-Identifier: Apache-2.0
"""Installed, nothing of Muster shadows a user's module, and no user's module breaks a command.

The program and the library are two packages, and both have the library's files: pip installs,
upgrades and takes back either of them in any order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import muster
from tests.support.programs import older_pythons
from tests.support.releases.frozen import VERSION, unpack

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("agent", "console", "controller", "injection", "launcher_shim", "lib", "muster", "rdzv"),
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
            ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target)
    return target


def environment(place: Path) -> tuple[Path, Path]:
    """An environment with the packages of the tests; its Python and the folder of its own."""
    venv.create(place, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place)}))
    packages.joinpath("tested.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return place / "bin" / "python", packages


def install(python: Path, *arguments: str | Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--disable-pip-version-check", "--no-index", "--no-compile", "--no-build-isolation"),
        *arguments,
        env=environ,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=FORMS)
def command(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str | Path, ...]:
    """How ``muster`` is started, in an environment of its own that also has a foreign ``agent``."""
    place = tmp_path_factory.mktemp(request.param)
    python, packages = environment(place)
    packages.joinpath("agent").mkdir()
    packages.joinpath("agent", "__init__.py").write_text("OWNER = 'another distribution'\n")
    if request.param == "checkout":
        packages.joinpath("checkout.pth").write_text(f"{source}\n")
        return (python, "-m", "muster")
    how = ("--editable",) if request.param == "editable" else ()
    install(python, "--force-reinstall", "--no-deps", *how, source / "lib", *how, source)
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


PROGRAM, LIBRARY = "muster-elastic", "muster-elastic-lib"
BEFORE = f"{PROGRAM}=={VERSION}"
ORDERS = {
    "the last release, then the program": (BEFORE, PROGRAM),
    "the last release, then each by its name": (BEFORE, LIBRARY, PROGRAM),
}
MORE_ORDERS = {
    "the library, then the program": (LIBRARY, PROGRAM),
    "back to the last release, and up again": (PROGRAM, BEFORE, PROGRAM),
}


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of both packages, and with the last release's one."""
    folder = tmp_path_factory.mktemp("wheels")
    release = unpack(folder / "release")
    (release / "README.md").touch()
    for tree in (source / "lib", source, release):
        done = run(
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--wheel-dir", folder, tree),
        )
        assert done.returncode == 0, done.stderr
    return folder


def contents(folder: Path, name: str) -> dict[str, bytes]:
    """The modules in the newest wheel of a package."""
    path = max(folder.glob(f"{name.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(path) as archive:
        names = (name for name in archive.namelist() if name.startswith("muster/"))
        return {name: archive.read(name) for name in names}


@pytest.mark.parametrize(
    "order",
    [
        *(pytest.param(order, id=name) for name, order in ORDERS.items()),
        *(pytest.param(order, id=n, marks=pytest.mark.long) for n, order in MORE_ORDERS.items()),
    ],
)
def test_either_package_is_installed_over_the_other(
    wheels: Path, order: tuple[str, ...], tmp_path: Path
) -> None:
    python, packages = environment(tmp_path)
    alone = {"PATH": os.environ["PATH"]}
    for asked in order:
        install(python, "--upgrade", "--pre", "--find-links", wheels, asked)
        done = run(python, "-c", "import muster; print(muster.__version__)", cwd="/", env=alone)
        wanted = VERSION if asked == BEFORE else muster.__version__
        assert done.stdout.strip() == wanted, (asked, done.stderr)
        if (command := tmp_path / "bin" / "muster").exists():
            done = run(command, "--version", cwd="/", env=alone)
            assert done.stdout.startswith(f"muster {wanted}, "), (asked, done.stderr)
    for name, content in {**contents(wheels, LIBRARY), **contents(wheels, PROGRAM)}.items():
        assert packages.joinpath(name).read_bytes() == content, name
    told = run(sys.executable, "-m", "pip", "--python", python, "check", env=alone)
    assert "muster" not in told.stdout, told.stdout


def test_both_packages_have_the_same_library(wheels: Path) -> None:
    library, program = contents(wheels, LIBRARY), contents(wheels, PROGRAM)
    own = {name for name in program if name.startswith("muster/_program/")}
    assert own
    assert library == {name: program[name] for name in program.keys() - own}


@pytest.mark.parametrize("python", [sys.executable, *older_pythons()])
def test_the_library_alone_says_where_the_command_is(
    wheels: Path, python: str, tmp_path: Path
) -> None:
    (wheel,) = wheels.glob("muster_elastic_lib-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert "Requires-Dist" not in metadata.read_text()
    done = run(python, "-m", "muster", "status", cwd=tmp_path, env={})
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install muster-elastic" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_editable_installation_keeps_its_types(source: Path, tmp_path: Path) -> None:
    python, _ = environment(tmp_path / "venv")
    install(python, "--no-deps", "-e", source / "lib", "-e", source)
    script = tmp_path / "train.py"
    script.write_text("import muster\n\nwith muster.drain() as drain:\n    reveal_type(drain)\n")
    told = run(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", python),
        *("--config-file", os.devnull, "--cache-dir", tmp_path / "cache", script),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
    )
    assert 'Revealed type is "muster.draining.Drain"' in told.stdout, told.stdout + told.stderr
    assert told.returncode == 0, told.stdout
