# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and what runs in the user's containers needs nothing but Python."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import PACKAGES, ROOT, imports, relative, sources, tree

MAY_IMPORT = {
    "muster": {"muster"},
    "muster/__main__.py": {"console"},
    "launcher_shim/pod": {"launcher_shim"},
    "launcher_shim/warm": {"launcher_shim"},
    "launcher_shim/torchrun": {"launcher_shim"},
    "launcher_shim/horovod": {"launcher_shim"},
    "rdzv": {"rdzv"},
    "launcher_shim": {"launcher_shim", "rdzv"},
    "agent": {"agent", "launcher_shim", "rdzv"},
    "injection": {"injection", "agent", "launcher_shim", "rdzv"},
    "controller": {"controller", "injection", "agent", "launcher_shim", "rdzv"},
    "console": {"console", "controller", "injection", "agent", "launcher_shim", "muster", "rdzv"},
}
"""For each part, the longest match of a file's path: the packages of ours that it may import."""

SHARED = ("launcher_shim/exit_status.py", "launcher_shim/rundir/", "launcher_shim/tcpstore/")
"""What the programs of the pod share with the sidecar: torch's protocol, the run directory, exit
statuses."""

EXEC = "launcher_shim/horovod/exec/"
"""What starts horovodrun's workers: copied into both containers by itself."""

WARM = "launcher_shim/warm/"
"""What both torchrun's programs and horovodrun's start warm workers with."""

ENTRY = "muster/__main__.py"
"""The command: the sidecar does not deliver it. The library alone has it, too."""

LAUNCHERS = ("launcher_shim/launcher", "launcher_shim/torchrun/", "launcher_shim/horovod/")
"""The seam, and the parts of its launchers that run in the pod."""

STANDARD_LIBRARY_ONLY = ("muster/", "launcher_shim/pod/", EXEC, WARM, *LAUNCHERS, *SHARED)

CALLBACKS = {
    "muster/lightning.py": {"lightning", "torch"},
    "muster/training.py": {"torch", "accelerate"},
    "muster/transformers.py": {"transformers"},
    "muster/world/__init__.py": {"torch"},
}
"""What is only imported by name, and needs the library that it is for."""

BY_NAME = ("muster/__init__.py",)
"""Where such a name is imported for types alone."""

NEEDS = {
    **CALLBACKS,
    "muster/torch_parts.py": {"torch", "accelerate"},
    "muster/checkpoints.py": {"torch"},
    "muster/lightning_loops.py": {"lightning", "torch"},
    "muster/transformers_data.py": {"torch"},
    "muster/transformers_in_place.py": {"accelerate", "torch", "transformers"},
    **{
        f"muster/world/{name}.py": {"torch"}
        for name in ("feed", "group", "loop", "parts", "reentry")
    },
}
"""What is only imported by a callback, and needs what that one needs."""

USES = {"muster/orders.py": {"numpy"}, "muster/data/loader.py": {"torch"}}
"""What is faster with it, or fits into it, and does without it as well."""


def files(path: Path) -> Iterator[str]:
    """Every file of ours that a file imports something from."""
    for name in imports(path):
        for file in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            if (ROOT / file).is_file():
                yield file


def in_users_containers() -> list[Path]:
    found = (path for path in sources() if relative(path).startswith(STANDARD_LIBRARY_ONLY))
    return [path for path in found if relative(path) != ENTRY]


def part_of(path: Path) -> str:
    return max(
        (part for part in MAY_IMPORT if f"{relative(path)}/".startswith(f"{part}/")), key=len
    )


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_point_one_way(path: Path) -> None:
    allowed = MAY_IMPORT[part_of(path)]
    ours = {name for name in imports(path) if name.partition(".")[0] in PACKAGES}
    assert {name for name in ours if name.partition(".")[0] not in allowed} == set()


@pytest.mark.parametrize("path", in_users_containers(), ids=relative)
def test_the_users_containers_need_only_the_standard_library(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, part_of(path).partition("/")[0]}
    allowed |= {**NEEDS, **USES}.get(relative(path), set())
    assert {name for name in imports(path) if name.partition(".")[0] not in allowed} == set()


@pytest.mark.parametrize("path", [*in_users_containers(), ROOT / ENTRY], ids=relative)
def test_the_users_containers_may_have_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    annotated = any(
        isinstance(n, ast.AnnAssign)
        or getattr(n, "returns", None)
        or getattr(n, "annotation", None)
        for n in ast.walk(tree(path))
    )
    # Without it, an annotation such as list[int] would be run, and fail there.
    assert not annotated or "__future__.annotations" in imports(path)


def test_a_callback_is_imported_by_nothing_else_of_ours() -> None:
    modules = {path.removesuffix(".py").replace("/", ".") for path in CALLBACKS}
    for path in sources():
        assert modules.isdisjoint(imports(path)) or relative(path) in BY_NAME, path


def test_what_a_callback_needs_is_imported_by_callbacks_alone() -> None:
    for path in sources():
        needed = {*files(path)} & (NEEDS.keys() - CALLBACKS.keys())
        assert not needed or relative(path) in NEEDS, path


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=relative)
def test_an_example_needs_no_more_of_ours_than_a_user_has(path: Path) -> None:
    ours = {name.partition(".")[0] for name in imports(path)} & set(PACKAGES)
    assert ours <= {"muster"}


@pytest.mark.parametrize(
    "rooms", [("launcher_shim/pod/", *LAUNCHERS), (EXEC,), (WARM,), *((room,) for room in SHARED)]
)
def test_what_is_delivered_to_pods_imports_nothing_of_ours_but_what_is_shared(
    rooms: tuple[str, ...],
) -> None:
    ways = {f"launcher_shim/{way}__init__.py" for way in ("", "horovod/", "pod/")}
    for path in (path for path in sources() if relative(path).startswith(rooms)):
        others = {name for name in files(path) if not name.startswith((*rooms, WARM, *SHARED))}
        assert others <= ways, path


@pytest.mark.parametrize(
    "package",
    [
        "launcher_shim",
        "launcher_shim/horovod",
        "launcher_shim/pod",
        "launcher_shim/torchrun",
        WARM.rstrip("/"),
        *(room.rstrip("/") for room in SHARED if room.endswith("/")),
    ],
)
def test_packages_on_the_way_to_pod_programs_import_nothing(package: str) -> None:
    assert imports(ROOT / package / "__init__.py") == ()


def test_every_package_is_looked_at() -> None:
    found = {relative(path).partition("/")[0] for path in sources()}
    assert found == set(PACKAGES)
