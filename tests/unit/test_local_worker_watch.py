# SPDX-License-Identifier: Apache-2.0
"""Which part of the launchers' logs is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from console.local.nodes.worker_watch import WorkerWatch
from console.local.report.timeline import Moment, Timeline

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


def test_an_error_of_a_rank_that_the_node_does_not_have_is_told_all_the_same(
    tmp_path: Path,
) -> None:
    log = tmp_path / "torchrun.log"
    moments: list[Moment] = []
    # As of a torchrun that the script has started itself, with more processes.
    rounds = SimpleNamespace(
        round=SimpleNamespace(number=2), nodes=["node-0"], ranks_of=lambda _: [4], began_s=None
    )
    watch = WorkerWatch(Timeline(lambda: 0.0, moments.append), cast(Any, rounds), 1)
    node = cast(Any, SimpleNamespace(name="node-0", launcher_log=log, launcher=None))
    watch.begin(log)
    log.write_text(FAILED.format("first") + FAILED.format("second").replace("rank: 0", "rank: 1"))
    for one, failure in watch.look([node]):
        assert watch.record(one, failure) is None
    first, second = [moment.detail for moment in moments]
    assert first.startswith("rank 4: it ended with 1; the last line: RuntimeError: first")
    assert second.startswith("local rank 1: it ended with 1; the last line: RuntimeError: second")
