# SPDX-License-Identifier: Apache-2.0
"""What the launchers' logs say of workers: which part is read, failures, last words, outcomes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from console.local.job_in_store import RoundFollower
from console.local.node import LocalNode
from console.local.payload import (
    MAX_BYTES,
    Closing,
    Ending,
    Next,
    after_exit,
    job_status,
    last_words,
    read_last_words,
    shell_status,
)
from console.local.timeline import Moment, Timeline
from console.local.worker_watch import (
    EARLY_S,
    TIMES,
    SameFailure,
    WorkerErrors,
    WorkerFailure,
    WorkerWatch,
)
from launcher_shim.c10d.rounds.records import Round, Seat
from rdzv.keys import JobKeys
from rdzv.store import KeyValue, WatchEvent

FAILED = """\
RuntimeError: {}
E1122 23:20:16.6 1 torch/x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "torchrun.log"


def a_node(log: Path) -> LocalNode:
    return cast(LocalNode, SimpleNamespace(name="node-0", launcher_log=log, launcher=None))


def watching(
    log: Path, restarts: int, *, number: int, rank: int, began_s: float | None
) -> tuple[WorkerWatch, list[Moment]]:
    """A watch on a node with one rank in the world of that number, and what it records."""
    moments: list[Moment] = []
    rounds = SimpleNamespace(
        world=SimpleNamespace(number=number), ranks_of=lambda _, **__: [rank], began_s=began_s
    )
    watch = WorkerWatch(Timeline(lambda: 9.0, moments.append), cast(Any, rounds), restarts)
    watch.begin(log)
    return watch, moments


def test_what_an_earlier_run_left_in_the_log_directory_is_not_told(log: Path) -> None:
    log.write_text(FAILED.format("of the run before"))
    watch, _ = watching(log, 1, number=0, rank=0, began_s=None)
    assert watch.look([a_node(log)]) == []
    log.write_text(log.read_text() + FAILED.format("of this one"))
    watch.begin(log)
    ((_, failure),) = watch.look([a_node(log)])
    assert "of this one" in failure.sentence


def test_an_error_of_a_rank_that_the_node_does_not_have_is_told_all_the_same(log: Path) -> None:
    """As of a torchrun that the script has started itself, with more processes."""
    watch, moments = watching(log, 1, number=2, rank=4, began_s=None)
    log.write_text(FAILED.format("first") + FAILED.format("second").replace("rank: 0", "rank: 1"))
    for one, failure in watch.look([a_node(log)]):
        assert watch.record(one, failure) is None
    first, second = [moment.detail for moment in moments]
    assert first.startswith("rank 4: it ended with 1; the last line: RuntimeError: first")
    assert second.startswith("local rank 1: it ended with 1; the last line: RuntimeError: second")


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 2, in <module>
    import nosuchmodule
  File "/usr/lib/python3.11/site-packages/torch/x.py", line 9, in call
  File "<frozen importlib._bootstrap>", line 1, in _find
{}
E1122 23:20:16.6 1 torch/x.py:1] failed (exitcode: 1) local_rank: 0 (pid: 7)
"""


def recorded(log: Path, error: str) -> tuple[Moment, str | None]:
    """What is recorded of a worker that failed in the first world, and why the run ends."""
    watch, moments = watching(log, 1, number=0, rank=0, began_s=1.0)
    log.write_text(TRACEBACK.format(error))
    ((node, failure),) = watch.look([a_node(log)])
    ends = watch.record(node, failure)
    (moment,) = moments
    return moment, ends


def test_an_error_is_told_with_its_place(log: Path) -> None:
    error = "ModuleNotFoundError: No module named 'nosuchmodule'"
    moment, ends = recorded(log, error)
    assert (moment.what, ends) == ("error", None)
    assert moment.detail.startswith(f"rank 0: {error} (train.py:2)")


def test_a_worker_that_torchrun_ends_has_no_error(log: Path) -> None:
    moment, ends = recorded(log, "torch.distributed.api.SignalException: Process 7 got signal: 15")
    assert (moment.what, ends, moment.disturbs) == ("ended", None, False)


def test_a_script_that_muster_refuses_is_not_tried_again(log: Path) -> None:
    error = "ValueError: muster.train: global_batch is 0: give a whole number from 1 on"
    _, ends = recorded(log, error)
    assert ends == f"muster refuses the script before any step: {error}"


def test_errors_read_late_still_end_a_job_that_never_trains(log: Path) -> None:
    keys = JobKeys("local", "digits")
    timeline = Timeline(lambda: 9.0, lambda _: None)
    rounds = RoundFollower(keys, "digits", 1, timeline)
    watch = WorkerWatch(timeline, rounds, 9)
    watch.begin(log)
    key, ended = keys.in_generation(1).run("digits").round, list[str | None]()
    for number in range(3):
        formed = Round(number, True, frozen=(Seat("node-0", "nonce", number),))
        for one in (formed, Round(number + 1)):
            rounds.take_in([WatchEvent("put", KeyValue(key, one.to_json(), 1, 1, 1, 0))])
        with log.open("a") as file:
            file.write(FAILED.format("no data"))
        ((node, failure),) = watch.look([a_node(log)])
        ended.append(watch.record(node, failure))
    assert ended[:2] == [None, None]
    assert ended[2] is not None
    assert "the same error 3 times before any step" in ended[2]


ERROR_FAILED = (
    "E1122 23:20:16.655000 14947 torch/distributed/elastic/multiprocessing/api.py:1002]"
    " failed (exitcode: {}) local_rank: {} (pid: 15071) of binary: /usr/bin/python"
)
PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import nothere
ModuleNotFoundError: No module named 'nothere'
"""
RANKED = """\
rank 0
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 5, in <module>
[rank0]:     raise RuntimeError("boom")
[rank0]: RuntimeError: boom
"""
CAUSED = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
ValueError: no such epoch
"""


@pytest.mark.parametrize(
    ("said", "exit_code", "sentence"),
    [
        (PLAIN, 1, "ModuleNotFoundError: No module named 'nothere'"),
        (RANKED, 1, "RuntimeError: boom"),
        (CAUSED, 1, "ValueError: no such epoch"),
        (
            RANKED + RANKED.replace("rank0", "rank1").replace("boom", "peer"),
            1,
            "RuntimeError: boom",
        ),
        ("", 3, "it ended with 3"),
        (
            "no GPU here\nW1122 23:20:16.6 1 torch/x.py:1] bye\n",
            1,
            "it ended with 1; the last line: no GPU here",
        ),
        ("", -9, "it was killed by SIGKILL"),
        ("", -99, "it was killed by signal 99"),
    ],
)
def test_a_failure_is_told_in_the_workers_words(said: str, exit_code: int, sentence: str) -> None:
    log = said + ERROR_FAILED.format(exit_code, 2) + "\n"
    assert WorkerErrors().take_in(log) == [WorkerFailure(2, sentence)]


def test_a_log_may_come_in_any_pieces() -> None:
    log = PLAIN + ERROR_FAILED.format(1, 0) + "\n" + RANKED + ERROR_FAILED.format(1, 1) + "\n"
    errors = WorkerErrors()
    found = [failure for letter in log for failure in errors.take_in(letter)]
    assert found == WorkerErrors().take_in(log)
    assert [failure.local_rank for failure in found] == [0, 1]


def test_what_a_worker_of_a_former_round_said_is_not_told_again() -> None:
    errors = WorkerErrors()
    errors.take_in(PLAIN + ERROR_FAILED.format(1, 0) + "\n")
    (second,) = errors.take_in(ERROR_FAILED.format(-9, 0) + "\n")
    assert second.sentence == "it was killed by SIGKILL"


BOOM = WorkerFailure(0, "RuntimeError: boom")


def gives_up(*seen: tuple[WorkerFailure, int, float, bool]) -> list[bool]:
    same = SameFailure()
    return [
        same.see(failure, number, lived_s, disturbed=disturbed)
        for failure, number, lived_s, disturbed in seen
    ]


def test_the_same_early_failure_in_three_rounds_ends_the_job() -> None:
    assert gives_up(*((BOOM, number, 1.0, False) for number in range(TIMES))) == [
        *[False] * (TIMES - 1),
        True,
    ]


@pytest.mark.parametrize(
    "seen",
    [
        [(BOOM, 1, 1.0, False)] * 5,
        [(BOOM, number, EARLY_S + 1, False) for number in range(5)],
        [(BOOM, number, 1.0, True) for number in range(5)],
        [(WorkerFailure(0, f"error {'abc'[n % 3]}"), n, 1.0, False) for n in range(6)],
    ],
    ids=["in one round", "after a while", "with a node gone", "always another"],
)
def test_what_may_pass_does_not_end_it(seen: list[tuple[WorkerFailure, int, float, bool]]) -> None:
    assert not any(gives_up(*seen))


def test_failures_that_differ_in_numbers_alone_are_the_same() -> None:
    connects = (WorkerFailure(0, f"DistError: 127.0.0.1:{port} refused") for port in (1, 22, 333))
    assert gives_up(*((failure, n, 1.0, False) for n, failure in enumerate(connects)))[-1]


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        ("RuntimeError: bad shape", "RuntimeError: bad shape"),
        (
            "RuntimeError: [pair.cc:545] Read error [127.0.0.1]:1: Connection reset by peer. GLHF!",
            "it lost another worker (reset by peer)",
        ),
        (
            "torch.distributed.api.SignalException: Process 7 got signal: 15",
            "torchrun ended it with signal 15, as its world ends",
        ),
    ],
)
def test_an_error_that_follows_another_is_short(sentence: str, shown: str) -> None:
    assert WorkerFailure(0, sentence).shown == shown


TORCHRUN_FAILS = """\
E1121 14:25:30.433000 6579 torch/distributed/x.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====
  exitcode  : 1 (pid: 7180)
""".splitlines()


def test_of_a_failure_the_scripts_own_traceback() -> None:
    script = [
        "epoch 1",
        "W1121 14:25:30.433000 6579 torch/distributed/x.py:1] Setting OMP_NUM_THREADS",
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "ValueError: no such epoch",
    ]
    assert last_words([*script, *TORCHRUN_FAILS], 1) == ["ValueError: no such epoch"]
    assert last_words([*script, *TORCHRUN_FAILS], 9) == [script[0], *script[2:]]


def test_of_a_script_that_is_not_torchruns_affair_what_there_is() -> None:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 3', "KeyError: 1"]
    assert last_words(lines, 2) == lines[1:]
    assert last_words(["trained", "", "test accuracy 98 %", ""], 1) == ["test accuracy 98 %"]
    assert last_words([], 3) == []


def test_of_a_torchrun_that_fails_by_itself_its_own_words() -> None:
    lines = ["rank 0 starts", "Traceback (most recent call last):", "DistStoreError: timed out"]
    assert last_words(lines, 1) == ["DistStoreError: timed out"]


def test_only_the_end_of_a_log_is_read(log: Path) -> None:
    assert read_last_words(log, 1) == []
    log.write_bytes(b"\xff\n" * MAX_BYTES + b"the end\n")
    assert read_last_words(log, 1) == ["the end"]


SUCCEEDED = Closing(True, frozenset({"node-0"}))
OUTCOME_FAILED = Closing(False, frozenset({"node-0"}))


@pytest.mark.parametrize(
    ("node", "status", "restarts_left", "closing", "expected"),
    [
        ("node-0", 0, 3, None, "done"),
        ("node-0", 0, 0, SUCCEEDED, "done"),
        ("node-0", 1, 3, None, "restart"),
        ("node-0", 137, 1, None, "restart"),
        ("node-0", 1, 0, None, "failed"),
        ("node-0", 1, 3, OUTCOME_FAILED, "failed"),
        ("node-1", 1, 3, OUTCOME_FAILED, "failed"),
        ("node-0", 1, 3, SUCCEEDED, "failed"),
        ("node-1", 1, 3, SUCCEEDED, "spare"),
    ],
)
def test_what_comes_after_a_launcher_has_ended(
    node: str, status: int, restarts_left: int, closing: Closing | None, expected: Next
) -> None:
    decision, reason = after_exit(node, status, restarts_left, closing)
    assert decision == expected
    assert reason


@pytest.mark.parametrize(
    ("endings", "status"),
    [
        ([Ending("node-0", "done", 0), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "failed", 3), Ending("node-1", "failed", 1)], 3),
        ([Ending("node-0", "failed", 1), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "killed", 137), Ending("node-1", "done", 0)], 0),
        ([Ending("node-0", "done", 0), Ending("node-1", "failed", 1)], 1),
        ([Ending("node-0", "done", 0), Ending("node-1", "spare", 1)], 0),
        ([Ending("node-0", "killed", 137), Ending("node-1", "failed", 2)], 2),
        ([Ending("node-0", "killed", 137)], 137),
        ([], 137),
    ],
)
def test_the_status_is_the_jobs_own(endings: list[Ending], status: int) -> None:
    assert job_status(endings)[0] == status


def test_a_signal_reads_as_a_shell_tells_it() -> None:
    assert shell_status(-9) == 137
    assert shell_status(3) == 3
