# SPDX-License-Identifier: Apache-2.0
"""Which part of the launchers' logs is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from console.local.nodes.worker_watch import WorkerWatch
from console.local.report.timeline import Timeline

FAILED = """\
RuntimeError: {}
E1122 23:20:16.6 1 torch/x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7)
"""


def test_what_an_earlier_run_left_in_the_log_directory_is_not_told(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    log.write_text(FAILED.format("of the run before"))
    watch = WorkerWatch(Timeline(lambda: 0.0, lambda _: None), cast(Any, None), None)
    nodes = cast(Any, [SimpleNamespace(launcher_log=log)])
    watch.begin(log)
    assert watch.look(nodes) == []
    log.write_text(log.read_text() + FAILED.format("of this one"))
    watch.begin(log)
    ((_, failure),) = watch.look(nodes)
    assert "of this one" in failure.sentence
