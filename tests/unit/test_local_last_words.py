# SPDX-License-Identifier: Apache-2.0
"""What a script said last."""

from pathlib import Path

from console.local.payload import MAX_BYTES, last_words, read_last_words

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


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    assert read_last_words(log, 1) == []
    log.write_bytes(b"\xff\n" * MAX_BYTES + b"the end\n")
    assert read_last_words(log, 1) == ["the end"]
