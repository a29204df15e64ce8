# SPDX-License-Identifier: Apache-2.0
"""How the command line of ``muster local`` is read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from console.local import command
from console.local.settings import LocalSettings

LINE = ("--", "torchrun", __file__)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[LocalSettings]:
    """The settings of every job that would have been run."""
    seen: list[LocalSettings] = []

    async def run_session(settings: LocalSettings, *_: Any, **__: Any) -> int:
        await asyncio.sleep(0)
        seen.append(settings)
        return 0

    monkeypatch.setattr(command, "run_session", run_session)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return seen


def local(tmp_path: Path, *words: str, environ: Mapping[str, str] | None = None) -> Result:
    given = ("--log-dir", str(tmp_path), *words, *LINE)
    return CliRunner().invoke(command.local, given, env=dict(environ or {}))


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="muster local runs on Linux")


@pytest.mark.parametrize(
    ("lease", "grace", "seconds"),
    [("10", "30", (10, 30)), ("12s", "45s", (12, 45)), ("1m", "1.5m", (60, 90))],
)
def test_times_are_written_as_for_the_sidecar(
    runs: list[LocalSettings], tmp_path: Path, lease: str, grace: str, seconds: tuple[float, float]
) -> None:
    by_flag = local(tmp_path, "--lease-ttl", lease, "--grace", grace)
    by_variable = local(tmp_path, environ={"MUSTER_LEASE_TTL": lease, "MUSTER_GRACE_S": grace})
    assert (by_flag.exit_code, by_variable.exit_code) == (0, 0), by_flag.output + by_variable.output
    assert [(run.lease_ttl_s, run.grace_s) for run in runs] == [seconds, seconds]


def test_sizes_are_those_of_the_sidecars(runs: list[LocalSettings], tmp_path: Path) -> None:
    assert local(tmp_path, "--max", "4", "--unit", "2", "--gather", "5s").exit_code == 0
    assert local(tmp_path, "--max", "4", environ={"MUSTER_SIZES": "1,4"}).exit_code == 0
    assert [(run.sizes, run.unit, run.gather_s) for run in runs] == [((), 2, 5), ((1, 4), 1, 2)]
    refused = local(tmp_path, "--max", "4", "--unit", "5")
    assert refused.exit_code == 2
    assert "no multiple of 5 lies between min 1 and max 4" in " ".join(refused.output.split())


def test_both_times_that_are_wrong_are_told_with_what_was_expected(
    runs: list[LocalSettings], tmp_path: Path
) -> None:
    refused = local(tmp_path, "--lease-ttl", "soon", environ={"MUSTER_GRACE_S": "0.5s"})
    assert refused.exit_code == 2
    assert "--lease-ttl (MUSTER_LEASE_TTL): 'soon' is wrong: expected a time such" in refused.output
    assert "--grace (MUSTER_GRACE_S): '0.5s' is wrong: expected 1s to" in refused.output
    assert runs == []


def test_a_min_above_max_is_refused(runs: list[LocalSettings], tmp_path: Path) -> None:
    refused = local(tmp_path, "--min", "3")
    assert refused.exit_code == 2
    assert "--min 3: only 2 nodes start; lower --min" in " ".join(refused.output.split())
    assert runs == []


def test_the_demo_is_a_drill_with_a_script_of_its_own(
    runs: list[LocalSettings], tmp_path: Path
) -> None:
    def demo(*words: str) -> Result:
        return CliRunner().invoke(command.local, ["--demo", "--log-dir", str(tmp_path), *words])

    assert demo().exit_code == 0
    assert demo("--nodes", "2").exit_code == 0
    assert [(run.nodes, run.max_nodes) for run in runs] == [(3, 4), (2, 2)]
    for run in runs:
        words = run.line.command
        assert words[0] == "torchrun"
        assert Path(words[-1]).is_file()
    refused = demo("--", "torchrun", __file__)
    assert refused.exit_code == 2
    assert "--demo has a script of its own" in " ".join(refused.output.split())
