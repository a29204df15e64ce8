# SPDX-License-Identifier: Apache-2.0
"""A rank's way to the boundary of a step, who listens there, and whose child it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from muster import process, saved_steps
from muster.boundary import (
    CUT,
    GO,
    PUBLISH,
    SAVE,
    WAIT,
    Rank,
    RankGate,
    acknowledge,
    arrive,
    begin,
    decide,
    fail,
    waits_for,
)
from muster.draining import Drain
from muster.gate import GateFile
from muster.process import Lineage
from muster.progress import ProgressFile
from muster.saved_steps import Listener
from rdzv.drain.gate import Gate
from tests.support.sidecars.pod_gate import PodGate, beside

MINE = "10.0.0.1:29500"
AT_10 = arrive(Rank(MINE), 10)
MATCHED = AT_10._replace(matched=True)


def gate(phase: str, step: int | None = None, master: str = MINE) -> RankGate:
    return RankGate(5, master, phase, step)


@pytest.mark.parametrize(
    ("shown", "verdict"),
    [
        (None, GO),
        (gate("idle"), GO),
        (gate("void"), GO),
        (gate("commit", 11), GO),
        (gate("commit", 10), SAVE),
        (gate("commit", 9), SAVE),
        (gate("done", 10), WAIT),
        (gate("hold"), PUBLISH),
    ],
)
def test_what_a_rank_does_at_a_boundary(shown: RankGate | None, verdict: str) -> None:
    assert decide(AT_10, shown)[0] == verdict


def test_a_held_rank_publishes_before_it_moves_and_reads_the_gate_again() -> None:
    verdict, held = decide(AT_10, gate("hold"))
    assert (verdict, held.held) == (PUBLISH, True)
    assert decide(held, gate("hold"))[0] == WAIT
    for shown in (gate("void"), gate("idle"), gate("commit", 11)):
        verdict, free = decide(held, shown)
        assert (verdict, free.held) == (PUBLISH, False)
        assert decide(free, shown)[0] == GO
    assert decide(free, gate("hold"))[0] == PUBLISH


def test_a_rank_begins_no_step_while_those_of_its_round_are_held() -> None:
    entered = Rank(MINE, -1, matched=True)
    assert begin(entered, gate("hold")) == (WAIT, entered)
    for shown in (None, gate("idle"), gate("void"), gate("commit", 3), gate("hold", master="x")):
        assert begin(entered, shown) == (GO, entered)


def test_i3_a_rank_saves_once_an_epoch_and_then_parks_until_training_goes_on() -> None:
    verdict, saving = decide(MATCHED, gate("commit", 10))
    assert verdict == SAVE
    saved = acknowledge(saving)
    assert saved.acked == (5, 10)
    assert decide(saved, gate("commit", 10))[0] == WAIT
    assert decide(saved, gate("done", 10))[0] == WAIT
    assert decide(saved, gate("void"))[0] == GO
    assert decide(saved, RankGate(6, MINE, "commit", 10))[0] == SAVE


CUT_HOLD = gate("hold")._replace(cut=True)
CUT_SAVE = gate("commit", 10)._replace(cut=True)
CUT_DONE = gate("done", 10)._replace(cut=True)


@pytest.mark.parametrize("shown", [CUT_HOLD, CUT_DONE])
def test_a_rank_at_a_cut_gate_publishes_that_the_epoch_failed_and_then_goes_on(
    shown: RankGate,
) -> None:
    verdict, given_up = decide(MATCHED, shown)
    assert (verdict, given_up.failed) == (PUBLISH, (5, CUT))
    assert decide(given_up, shown) == (GO, given_up)
    verdict, held = decide(MATCHED, gate("hold"))
    assert verdict == PUBLISH
    verdict, given_up = decide(held, shown)
    assert (verdict, given_up.failed, given_up.held) == (PUBLISH, (5, CUT), True)
    verdict, free = decide(given_up, shown)
    assert (verdict, free.held) == (PUBLISH, False)
    assert decide(free, shown) == (GO, free)


def test_i3_what_was_agreed_before_the_cut_is_saved_by_all_for_a_save_may_be_collective() -> None:
    verdict, saving = decide(MATCHED, CUT_SAVE)
    assert verdict == SAVE
    saved = acknowledge(saving)
    verdict, given_up = decide(saved, CUT_SAVE)
    assert (verdict, given_up.acked, given_up.failed) == (PUBLISH, (5, 10), (5, CUT))
    assert decide(given_up, CUT_SAVE)[0] == GO
    assert decide(MATCHED._replace(step=9), CUT_SAVE)[0] == GO


def test_a_rank_that_has_given_an_epoch_up_parks_in_it_once_the_store_is_back() -> None:
    given_up = arrive(MATCHED, 13)._replace(acked=(5, 10), failed=(5, CUT))
    for shown in (gate("commit", 10), gate("done", 10)):
        assert decide(given_up, shown)[0] == WAIT
    assert decide(given_up, RankGate(6, MINE, "commit", 13))[0] == SAVE


def test_a_rank_begins_at_a_cut_gate_once_it_has_published_that_the_epoch_failed() -> None:
    entered = Rank(MINE, -1, matched=True)
    verdict, given_up = begin(entered, CUT_HOLD)
    assert (verdict, given_up.failed) == (PUBLISH, (5, CUT))
    assert begin(given_up, CUT_HOLD) == (GO, given_up)


def test_a_save_that_failed_is_told_and_waits_for_the_word_of_the_others() -> None:
    failed = fail(decide(MATCHED, gate("commit", 10))[1], "disk full")
    assert failed.failed == (5, "disk full")
    assert decide(failed, gate("commit", 10))[0] == WAIT
    assert decide(failed, gate("void"))[0] == GO


def test_a_gate_of_an_earlier_round_is_ignored_and_one_of_a_later_round_parks() -> None:
    assert decide(AT_10, gate("hold", master="earlier"))[0] == GO
    for shown in (gate("idle", master="later"), gate("idle", master="")):
        assert decide(MATCHED, shown)[0] == WAIT
    assert decide(AT_10, gate("idle"))[1].matched


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (gate("hold"), "agreeing on a step"),
        (gate("commit", 10), "other ranks have not saved step 10"),
        (gate("done", 10), "all ranks have saved"),
        (gate("hold", master="10.0.0.2:29500"), "its world is over"),
    ],
)
def test_what_a_rank_waits_for(shown: RankGate, said: str) -> None:
    assert said in waits_for(MATCHED, shown)


@pytest.mark.parametrize(
    ("number", "broken"),
    [
        (errno.ENOENT, True),
        (errno.ESRCH, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EACCES, False),
    ],
)
def test_a_process_that_cannot_be_looked_at_is_still_there(
    monkeypatch: pytest.MonkeyPatch, number: int, broken: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    own = Lineage({})
    own._above = [(os.getpid(), os.getppid())]
    assert not own.broken
    monkeypatch.setattr(process, "open", refuse, raising=False)
    assert own.broken == broken


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
