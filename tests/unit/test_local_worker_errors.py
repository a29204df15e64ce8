# SPDX-License-Identifier: Apache-2.0
"""What a worker's failure is told as, and when a job is given up for it."""

from __future__ import annotations

import pytest

from console.local.worker_watch import EARLY_S, TIMES, SameFailure, WorkerErrors, WorkerFailure

FAILED = (
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
    log = said + FAILED.format(exit_code, 2) + "\n"
    assert WorkerErrors().take_in(log) == [WorkerFailure(2, sentence)]


def test_a_log_may_come_in_any_pieces() -> None:
    log = PLAIN + FAILED.format(1, 0) + "\n" + RANKED + FAILED.format(1, 1) + "\n"
    errors = WorkerErrors()
    found = [failure for letter in log for failure in errors.take_in(letter)]
    assert found == WorkerErrors().take_in(log)
    assert [failure.local_rank for failure in found] == [0, 1]


def test_what_a_worker_of_a_former_round_said_is_not_told_again() -> None:
    errors = WorkerErrors()
    errors.take_in(PLAIN + FAILED.format(1, 0) + "\n")
    (second,) = errors.take_in(FAILED.format(-9, 0) + "\n")
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
