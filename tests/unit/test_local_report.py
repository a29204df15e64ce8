# SPDX-License-Identifier: Apache-2.0
"""What ``muster local`` ends with where its report cannot be written any more."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from console.local import screen as ending
from console.local import session
from console.local.launch_line import LaunchLine
from console.local.settings import LocalSettings


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("as_json", [False, True])
async def test_the_status_is_the_jobs_where_the_report_has_lost_its_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    as_json: bool,
) -> None:
    report = tmp_path / "removed meanwhile"

    class Run(SimpleNamespace):
        async def until_over(self) -> tuple[int, str]:
            return status, "it is over"

    @asynccontextmanager
    async def swept(run: str) -> AsyncIterator[Path]:
        yield tmp_path

    def run(*_: Any, **__: Any) -> Run:
        return Run(given_up_for=None, endings=[], last_leader=None, nodes={}, rounds=rounds)

    rounds = SimpleNamespace(last_rank_0=None)
    monkeypatch.setattr(session, "LocalRun", run)
    monkeypatch.setattr(session, "_swept", swept)
    settings = LocalSettings(
        run="r",
        namespace="local",
        job="job",
        line=LaunchLine(("torchrun", "train.py"), 1),
        nodes=1,
        min_nodes=1,
        max_nodes=1,
        restarts=0,
        lease_ttl_s=5,
        checkpoints=tmp_path,
        access=None,
        native=True,
    )
    screen = io.StringIO()
    places = session.Directories(tmp_path, report)
    ended = await session.run_session(
        settings, [], places, Console(file=screen, width=200), as_json=as_json
    )
    assert ended == status
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"muster: --report {report}: cannot be written (No such file or directory)"
    ]
    assert "report:" not in screen.getvalue()
    assert not as_json or all(map(json.loads, screen.getvalue().splitlines()))


@pytest.mark.parametrize("spoilt", ["timeline.json", "world.svg"])
def test_a_file_that_cannot_be_renamed_into_place_leaves_no_half_of_it(
    tmp_path: Path, spoilt: str
) -> None:
    (tmp_path / spoilt).mkdir()
    with pytest.raises(OSError, match="directory"):
        ending._replace(tmp_path / spoilt, "all of it")
    ending._replace(tmp_path / "other", "all of it")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([spoilt, "other"])
    assert (tmp_path / "other").read_text() == "all of it"
