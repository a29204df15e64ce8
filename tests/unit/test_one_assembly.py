# SPDX-License-Identifier: Apache-2.0
"""A sidecar is put together in one place, and only there: tests prove no copy of the wiring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.sources import PACKAGES, ROOT, imports, relative, sources, tree

ASSEMBLY = "agent/parts.py"
CLIENT = "rdzv/job.py"

MADE_IN = {
    ("rdzv.mirror", "Mirror"): {
        CLIENT,
        "controller/jobs.py",  # all jobs of a store at once
        "rdzv/membership.py",  # one read, shown as a membership: nothing follows the store
        "tests/contract/test_watching.py",
        "tests/unit/test_listing.py",
    },
    ("rdzv.job", "Watching"): {
        "controller/jobs.py",
        "tests/contract/test_watching.py",
    },
    ("rdzv.members.registrar", "Registrar"): {ASSEMBLY},
    ("rdzv.reconcile", "Kernel"): {
        ASSEMBLY,
        "tests/contract/test_host_delivery.py",
        "tests/contract/test_late_drain.py",
        "tests/contract/test_quarantining.py",
        "tests/contract/test_sweeper.py",
        "tests/contract/test_told_too_early.py",
        "tests/contract/test_walks.py",
        "tests/support/sidecars/runs.py",
        "tests/unit/test_reconcile.py",
    },
    ("rdzv.members.gone", "Losses"): {ASSEMBLY},
    ("agent.upkeep", "Sweeper"): {ASSEMBLY, "tests/contract/test_sweeper.py"},
    ("agent.upkeep", "StoreVersion"): {ASSEMBLY, "tests/contract/test_lookout.py"},
    ("agent.upkeep", "StateReporter"): {ASSEMBLY, "tests/contract/test_told_states.py"},
    ("agent.hosts", "HostDelivery"): {
        ASSEMBLY,
        "tests/contract/test_host_delivery.py",
        "tests/contract/test_walks.py",
    },
    ("agent.launcher_watch", "LauncherWatcher"): {ASSEMBLY, "tests/contract/test_lookout.py"},
    ("launcher_shim.c10d.endpoint", "Endpoint"): {ASSEMBLY},
    ("agent.drain.decisions", "DrainView"): {
        ASSEMBLY,
        "tests/contract/test_foreign_keys.py",
        "tests/contract/test_known_runs.py",
        "tests/unit/test_round_ending.py",
    },
    ("agent.drain.own", "OwnDrain"): {ASSEMBLY, "tests/contract/test_late_drain.py"},
    ("agent.drain.gate_writer", "GateWriter"): {ASSEMBLY},
    ("agent.drain.decisions", "Coordinator"): {ASSEMBLY},
    ("agent.drain.notice", "NoticeSocket"): {ASSEMBLY, "tests/contract/test_notice_socket.py"},
    ("agent.running", "RunningParts"): {"agent/process.py", "tests/simulation/nodes.py"},
}
"""By class of a part, where it is made: where it is put together with others, and in its own tests.

A test of several parts takes them from ``agent.parts``.
"""

CLOCKS = {
    ("time", "monotonic"),
    ("time", "time"),
    ("time", "clock_gettime"),
    ("agent.process", "boot_s"),
}


def imported(read: ast.AST) -> dict[str, tuple[str, str]]:
    """By the name that a file calls it, what it imports from which module."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(read)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def made(read: ast.AST) -> Iterator[tuple[str, str]]:
    """Each thing from another module that a file calls, by that module and its name there."""
    names = imported(read)
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(read)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(read):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in names:
            yield names[called.id]
        elif isinstance(called, ast.Attribute):
            whose = ast.unparse(called.value)
            module = modules.get(whose) or ".".join(names.get(whose, ("", "")))
            yield (module, called.attr)


@pytest.fixture(scope="module")
def makers() -> dict[tuple[str, str], set[str]]:
    """Where each part is made."""
    found: dict[tuple[str, str], set[str]] = {part: set() for part in MADE_IN}
    for path in sources(*PACKAGES, "benchmarks", "tests"):
        for called in made(tree(path)):
            if called in found:
                found[called].add(relative(path))
    return found


@pytest.mark.parametrize("part", MADE_IN, ids=lambda part: part[1])
def test_a_part_is_made_where_the_sidecar_is_put_together(
    part: tuple[str, str], makers: dict[tuple[str, str], set[str]]
) -> None:
    assert makers[part] == MADE_IN[part]


@pytest.mark.parametrize("path", [ASSEMBLY, CLIENT, "agent/running.py"])
def test_the_assembly_is_given_its_clocks(path: str) -> None:
    assert not CLOCKS & {*imported(tree(ROOT / path)).values()}
    assert "time" not in imports(ROOT / path)


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("from rdzv.mirror import Mirror\nMirror('/')", ("rdzv.mirror", "Mirror")),
        ("from rdzv.mirror import Mirror as M\nM('/')", ("rdzv.mirror", "Mirror")),
        ("from rdzv import mirror\nmirror.Mirror('/')", ("rdzv.mirror", "Mirror")),
        ("import rdzv.mirror\nrdzv.mirror.Mirror('/')", ("rdzv.mirror", "Mirror")),
    ],
)
def test_no_way_of_importing_hides_a_part(text: str, called: tuple[str, str]) -> None:
    assert called in list(made(ast.parse(text)))
