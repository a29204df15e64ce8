# SPDX-License-Identifier: Apache-2.0
"""What listens to a rank's saves is told before they count, and may say that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster import saved_steps
from muster.draining import Drain
from muster.gate import GateFile
from muster.progress import ProgressFile
from muster.saved_steps import Listener
from rdzv.drain.gate import Gate
from tests.support.sidecars.pod_gate import PodGate, beside

MASTER = "10.0.0.7:40123"
OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "40123",
    "WORLD_SIZE": "1",
}
IDLE = Gate(run="job", round=3, master=MASTER)


class Heard:
    """A listener; ``why`` is its answer to each save."""

    def __init__(self, pod: PodGate) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.why = ""
        self._pod = pod

    def arrive(self, step: int) -> None:
        self.events.append(("arrive", step, self._pod.told().step))

    def save(self, step: int) -> str:
        told = self._pod.told()
        self.events.append(("save", step, max(told.saved, default=0)))
        return self.why


@pytest.fixture
def pod(tmp_path: Path) -> PodGate:
    pod = PodGate(tmp_path, MASTER)
    pod.show(IDLE)
    return pod


@pytest.fixture
def heard(pod: PodGate, monkeypatch: pytest.MonkeyPatch) -> Heard:
    one = Heard(pod)
    monkeypatch.setattr(saved_steps, "listeners", [Listener(one.arrive, one.save)])
    return one


def make(pod: PodGate) -> Drain:
    progress = ProgressFile(str(pod.run_dir / "progress"), OF_TORCHRUN)
    return Drain(progress, GateFile(str(pod.run_dir)))


def test_a_save_is_told_to_the_sidecar_after_it_was_put_on_record(
    pod: PodGate, heard: Heard
) -> None:
    with make(pod) as drain:
        drain.commit_due(5)
        drain.committed(5)
        assert pod.told().saved == (5,)
        heard.why = "the store is away"
        drain.commit_due(6)
        drain.committed(6)
        assert pod.told().saved == (5,), "what is not on record does not count"
    assert heard.events == [("arrive", 5, -1), ("save", 5, 0), ("arrive", 6, 5), ("save", 6, 5)]


def test_a_save_of_another_thread_is_put_on_record_at_the_next_boundary(
    pod: PodGate, heard: Heard
) -> None:
    with make(pod) as drain:
        drain.commit_due(5)
        with beside(lambda: drain.committed(5)):
            pass
        assert [event for event, *_ in heard.events] == ["arrive"]
        drain.commit_due(6)
        assert [event for event, *_ in heard.events] == ["arrive", "arrive", "save"]
        assert pod.told().saved == (5,)


def test_a_save_that_is_due_and_not_put_on_record_has_failed(pod: PodGate, heard: Heard) -> None:
    heard.why = "the store is away"
    due = Gate(run="job", round=3, master=MASTER, epoch=4, phase="commit", step=7)
    pod.show(due)
    with make(pod) as drain:
        assert drain.commit_due(7)
        with beside(lambda: drain.committed(7)):
            pod.until(lambda told: told.failed == (4, "the store is away"))
            assert pod.told().acked is None
            pod.show(Gate(run="job", round=3, master=MASTER, epoch=4, phase="void"))
        assert drain.commit_due(8) is False
