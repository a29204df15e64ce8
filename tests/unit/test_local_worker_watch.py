# SPDX-License-Identifier: Apache-2.0
"""Which part of the launchers' logs is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from console.local.job_in_store import RoundFollower
from console.local.timeline import Moment, Timeline
from console.local.worker_watch import WorkerWatch
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent

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
        world=SimpleNamespace(number=2), ranks_of=lambda _, **__: [4], began_s=None
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


def recorded(tmp_path: Path, log_text: str) -> tuple[list[Moment], str | None]:
    """What is recorded of a worker that failed in the first world, and why the run ends."""
    log, moments = tmp_path / "torchrun.log", list[Moment]()
    rounds = SimpleNamespace(
        world=SimpleNamespace(number=0), ranks_of=lambda _, **__: [0], began_s=1.0
    )
    watch = WorkerWatch(Timeline(lambda: 9.0, moments.append), cast(Any, rounds), 1)
    node = cast(Any, SimpleNamespace(name="node-0", launcher_log=log, launcher=None))
    watch.begin(log)
    log.write_text(log_text)
    ((_, failure),) = watch.look([node])
    return moments, watch.record(node, failure)


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 2, in <module>
    import nosuchmodule
  File "/usr/lib/python3.11/site-packages/torch/x.py", line 9, in call
  File "<frozen importlib._bootstrap>", line 1, in _find
{}
E1122 23:20:16.6 1 torch/x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7)
"""


def test_an_error_is_told_with_its_place(tmp_path: Path) -> None:
    error = "ModuleNotFoundError: No module named 'nosuchmodule'"
    (moment,), ends = recorded(tmp_path, TRACEBACK.format(error))
    assert (moment.what, ends) == ("error", None)
    assert moment.detail.startswith(f"rank 0: {error} (train.py:2)")


def test_a_worker_that_torchrun_ends_has_no_error(tmp_path: Path) -> None:
    signal = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    )
    (moment,), ends = recorded(tmp_path, TRACEBACK.format(signal))
    assert (moment.what, ends, moment.disturbs) == ("ended", None, False)


def test_a_script_that_muster_refuses_is_not_tried_again(tmp_path: Path) -> None:
    error = "ValueError: muster.train: global_batch is 0: give a whole number from 1 on"
    _, ends = recorded(tmp_path, TRACEBACK.format(error))
    assert ends == f"muster refuses the script before any step: {error}"


def test_errors_that_are_read_once_the_next_round_is_open_end_a_job_that_never_trains(
    tmp_path: Path,
) -> None:
    log, keys = tmp_path / "torchrun.log", JobKeys("local", "digits")
    timeline = Timeline(lambda: 9.0, lambda _: None)
    rounds = RoundFollower(keys, "digits", 1, timeline)
    watch = WorkerWatch(timeline, rounds, 9)
    node = cast(Any, SimpleNamespace(name="node-0", launcher_log=log, launcher=None))
    watch.begin(log)
    key, ended = keys.in_generation(1).run("digits").round, list[str | None]()
    for number in range(3):
        formed = Round(number, True, frozen=(Seat("node-0", "nonce", number),))
        for one in (formed, Round(number + 1)):
            rounds.take_in([WatchEvent("put", KeyValue(key, one.to_json(), 1, 1, 1, 0))])
        with log.open("a") as file:
            file.write(FAILED.format("no data"))
        ((_, failure),) = watch.look([node])
        ended.append(watch.record(node, failure))
    assert ended[:2] == [None, None]
    assert ended[2] is not None
    assert "the same error 3 times before any step" in ended[2]
