# SPDX-License-Identifier: Apache-2.0
"""A real torchrun whose workers leave processes behind: the next world meets none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sources import ROOT
from tests.support.training.job import RunJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1800)]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "leaving_tracker.py"


def test_a_survivor_keeps_no_process_of_the_world_before(
    run_job: RunJob, embedded: list[str], tmp_path: Path
) -> None:
    environ = {"TRACKERS": str(tmp_path)}
    with run_job(
        embedded, least=1, most=2, wrapped=True, script=SCRIPT, script_environ=environ
    ) as job:
        staying, leaving = job.add(2, launch=False)
        beside = f"sleep 8888 & echo $! > {tmp_path}/beside; {{}}"
        job.start_launcher(staying, shell=beside)
        job.start_launcher(leaving)
        both = job.world_of([staying, leaving])
        (tracker,) = tmp_path.glob(f"{staying.name}.*")
        job.stop_node(leaving)
        alone = job.world_of([staying], not_=both)
        job.goes_on(alone)
        assert not (tmp_path / "met").exists()
        assert not Path(f"/proc/{tracker.suffix[1:]}").exists()
        alive = [
            p for p in tmp_path.glob(f"{staying.name}.*") if Path(f"/proc/{p.suffix[1:]}").exists()
        ]
        assert len(alive) == 1
        assert Path(f"/proc/{(tmp_path / 'beside').read_text().strip()}").exists()
        job.stop_training()
        assert job.launchers_end() == [0]
