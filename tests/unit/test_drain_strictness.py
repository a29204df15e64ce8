# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of ``muster.drain()`` raise beside a sidecar and on a laptop alike."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import muster
import muster.draining
from muster.draining import Drain
from muster.gate import GateFile
from muster.progress import ProgressFile
from rdzv.drain.gate import Gate
from tests.support.sidecars.pod_gate import PodGate

MASTER = "10.0.0.7:40123"
OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "40123"}
Make = Callable[[], Drain]
ROOT = str(Path(muster.__file__).parents[1])


@pytest.fixture(params=["sidecar", "laptop"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """What ``muster.drain()`` returns with a sidecar, or without one."""
    if request.param == "laptop":
        return lambda: Drain(None, None)
    pod = PodGate(tmp_path, MASTER)
    pod.show(Gate(run="job", round=3, master=MASTER))
    file = ProgressFile(str(pod.run_dir / "progress"), OF_TORCHRUN)
    return lambda: Drain(file, GateFile(str(pod.run_dir)))


@pytest.mark.parametrize("step", ["3", 3.0, 3.5, None])
def test_a_step_is_an_integer(make: Make, step: Any) -> None:
    with make() as drain:
        for call in (drain.commit_due, drain.committed):
            with pytest.raises(TypeError):
                call(step)


class Number:
    """An integer of another library, as of numpy or torch."""

    def __index__(self) -> int:
        return 7


def test_another_librarys_integer_is_one(make: Make) -> None:
    number: Any = Number()
    with make() as drain:
        assert not drain.commit_due(number)
        drain.committed(number)
        assert not drain.commit_due(8)


@pytest.mark.parametrize("step", [3, 2, -1])
def test_steps_grow(make: Make, step: int) -> None:
    with make() as drain:
        drain.commit_due(3)
        with pytest.raises(ValueError, match="comes after step 3: steps must grow"):
            drain.commit_due(step)
        drain.commit_due(4)
    with make() as drain:
        drain.commit_due(1)  # the next loop may count anew


def test_a_process_is_in_one_block_at_a_time(make: Make) -> None:
    with make() as drain:
        with pytest.raises(RuntimeError, match="entered already"):
            make().__enter__()
        with pytest.raises(RuntimeError, match="entered already"):
            drain.__enter__()
    with pytest.raises(ArithmeticError), make():
        raise ArithmeticError
    with make():
        pass


def test_calls_belong_into_the_block(make: Make) -> None:
    drain = make()
    for call in (drain.commit_due, drain.committed):
        with pytest.raises(RuntimeError, match=r"belongs into `with muster.drain\(\)"):
            call(1)
    with drain:
        drain.commit_due(1)
    for call in (drain.commit_due, drain.committed):
        with pytest.raises(RuntimeError, match=r"belongs into `with muster.drain\(\)"):
            call(2)


def test_a_background_save_that_ends_after_its_loop_is_said(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as drain:
        drain.commit_due(1)
    with caplog.at_level(logging.WARNING):
        late = threading.Thread(target=drain.committed, args=(1,))
        late.start()
        late.join()
    assert "drain.committed(1) of a background save came after its loop had ended" in caplog.text


def test_a_save_before_its_boundary_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with make() as drain, caplog.at_level(logging.WARNING):
        drain.commit_due(1)
        drain.committed(2)
    assert "drain.committed(2) was called before drain.commit_due(2)" in caplog.text


@pytest.mark.parametrize("step", ["3", 3.5])
def test_a_reported_step_is_an_integer(step: Any) -> None:
    with pytest.raises(TypeError):
        muster.report_step(step)


FORKS = """
import os
import muster
with muster.drain() as drain:
    drain.commit_due(1)
    child = os.fork()
    if not child:
        for call in (lambda: drain.commit_due(2), muster.drain().__enter__):
            try:
                call()
            except RuntimeError as error:
                print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    drain.commit_due(2)
print("went on")
"""


def test_a_forked_child_is_not_the_rank_on_a_laptop_either() -> None:
    environ = {name: text for name, text in os.environ.items() if name != "MUSTER_RUN_DIR"}
    said = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout.splitlines()
    assert [line.rpartition(" in a process that was forked")[0] for line in said[:2]] == [
        "drain.commit_due(2)",
        "muster.drain()",
    ]
    assert said[2:] == ["went on"]
