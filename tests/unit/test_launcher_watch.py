# SPDX-License-Identifier: Apache-2.0
"""When a launcher that does not come to its sidecar as it should is named, by a test's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.launcher_check import (
    FINE,
    LauncherObservations,
    LauncherPolicy,
    LauncherView,
    decide,
    observe,
)
from agent.rundir.reports import LaunchReport
from rdzv.records.troubles import REMARKS, Bypass
from rdzv.store import KeyValue

POLICY = LauncherPolicy("digits", 2, 4, 29400)
HERE = LaunchReport("a", "torchrun", 7, "2:4", "localhost:29400", "c10d")
READY = LauncherView(expected=True)


class Watching:
    """A watch that is shown one sight after the other."""

    def __init__(self, policy: LauncherPolicy = POLICY) -> None:
        self.policy = policy
        self.now = 1000.0
        self.seen = LauncherObservations()

    def shows(self, sight: LauncherView, after_s: float = 0.0) -> Bypass:
        """What is found ``after_s`` of seeing this, looked at every two seconds."""
        end = self.now + after_s
        while True:
            self.seen = observe(self.now, self.seen, sight, self.policy)
            found = decide(self.now, self.seen, sight, self.policy)
            if self.now >= end:
                return found
            self.now = min(self.now + 2, end)


def test_one_that_has_been_started_right_has_a_minute_to_connect() -> None:
    watching = Watching()
    sight = replace(READY, launch=HERE)
    assert watching.shows(sight, 59) == FINE
    found = watching.shows(sight, 1)
    assert found.kind == "absent"
    # Whether it still runs is not known: one that is killed takes nothing back.
    assert "was started and has not connected to localhost:29400" in found.sentence
    assert watching.shows(replace(sight, runs={"digits": False})) == FINE
    # The run goes on, ends, or the launcher is started again: it has shown that it comes here.
    assert watching.shows(sight, 600) == FINE


@pytest.mark.parametrize(
    ("launch", "part"),
    [
        (replace(HERE, rdzv_endpoint="localhost:29500"), "the rendezvous endpoint localhost:29500"),
        (replace(HERE, rdzv_endpoint="10.0.0.7:29400"), "the rendezvous endpoint 10.0.0.7:29400"),
        (replace(HERE, rdzv_endpoint=""), "the rendezvous endpoint none"),
        (replace(HERE, rdzv_backend="static"), "the rendezvous backend static"),
        (replace(HERE, rdzv_backend=""), "the rendezvous backend static"),
        (replace(HERE, standalone=True), "--standalone"),
    ],
)
def test_one_that_was_sent_elsewhere_is_named_at_once(launch: LaunchReport, part: str) -> None:
    found = Watching().shows(replace(READY, launch=launch))
    assert found.kind == "elsewhere"
    assert part in found.sentence
    assert "localhost:29400" in found.sentence


def test_workers_that_start_without_the_zygote_are_named_and_no_fault() -> None:
    sight = replace(READY, launch=HERE, runs={"digits": False}, workers=1)
    found = Watching().shows(replace(sight, plain=("its limits differ", "its limits differ")))
    assert found.kind in REMARKS
    assert found.sentence == (
        "2 workers started without the zygote, so later than with it: its limits differ"
    )
    other = Watching().shows(replace(sight, plain=("why",), workers=3))
    assert (other.kind, other.slots) == ("plain", 3)
    gone = Watching().shows(replace(READY, launch=replace(HERE, standalone=True), plain=("why",)))
    assert gone.kind == "elsewhere"


@pytest.mark.parametrize("endpoint", ["localhost:29400", "127.0.0.1:29400", "[::1]:29400"])
def test_every_name_of_the_loopback_is_here(endpoint: str) -> None:
    launch = replace(HERE, rdzv_endpoint=endpoint)
    assert Watching().shows(replace(READY, launch=launch)) == FINE


def test_an_endpoint_without_a_port_has_torchs_own() -> None:
    launch = replace(HERE, rdzv_endpoint="localhost")
    assert Watching().shows(replace(READY, launch=launch)) == FINE
    elsewhere = Watching(replace(POLICY, port=29500)).shows(replace(READY, launch=launch))
    assert elsewhere.kind == "elsewhere"


@pytest.mark.parametrize(
    ("nnodes", "wrong"), [("2:4", False), ("1:4", True), ("2:8", True), ("2", True), ("x", True)]
)
def test_one_with_other_bounds_is_named_with_them(nnodes: str, wrong: bool) -> None:
    sight = replace(READY, launch=replace(HERE, nnodes=nnodes), runs={"digits": False})
    found = Watching().shows(sight)
    assert found.kind == ("nnodes" if wrong else "")
    if wrong:
        assert f"--nnodes={nnodes}, but its sidecar 2:4" in found.sentence


def test_a_fixed_size_is_one_number() -> None:
    sight = replace(READY, launch=replace(HERE, nnodes="3"), runs={"digits": False})
    assert Watching(replace(POLICY, min_nodes=3, max_nodes=3)).shows(sight) == FINE


def test_other_bounds_show_without_muster_run_too() -> None:
    found = Watching().shows(replace(READY, runs={"digits": True}))
    assert found.kind == "nnodes"
    assert "2:4" in found.sentence


def test_another_run_id_is_named_unless_others_have_it() -> None:
    watching = Watching()
    alone = replace(READY, runs={"mine": False})
    assert watching.shows(alone, 58) == FINE
    assert watching.shows(replace(alone, others=frozenset({"mine"})), 2) == FINE
    found = watching.shows(replace(alone, others=frozenset({"digits"})), 2)
    assert found.kind == "run_id"
    assert "--rdzv-id=mine" in found.sentence


def test_a_container_that_may_still_pull_is_not_accused() -> None:
    watching = Watching()
    assert watching.shows(READY, 58) == FINE
    found = watching.shows(READY, 2)
    assert found.kind == "unseen"
    assert "may still be starting" in found.sentence
    # It has come at last: its minute begins then.
    assert watching.shows(replace(READY, launch=HERE), 58) == FINE


def test_where_muster_run_has_to_be_it_is_said_to_be_missing() -> None:
    found = Watching(replace(POLICY, relayed=True)).shows(READY, 60)
    assert "muster-run does not run in it" in found.sentence


def test_one_that_has_ended_is_no_longer_accused() -> None:
    watching = Watching()
    assert watching.shows(replace(READY, launch=HERE), 60).kind == "absent"
    assert watching.shows(READY).kind == "unseen"


def test_one_that_has_come_here_is_not_missed_when_it_has_ended() -> None:
    watching = Watching()
    watching.shows(replace(READY, launch=HERE, runs={"digits": False}))
    assert watching.shows(READY, 600) == FINE


def test_ranks_that_train_past_it_are_named() -> None:
    found = Watching().shows(replace(READY, ranks=True), 60)
    assert found.kind == "absent"
    assert "no torchrun has connected" in found.sentence


def test_a_command_that_starts_no_torchrun_is_named_until_it_does() -> None:
    watching = Watching()
    idle = replace(READY, launch=LaunchReport("a"))
    found = watching.shows(idle, 60)
    assert found.kind == "absent"
    assert "started no torchrun" in found.sentence
    assert watching.shows(replace(READY, launch=HERE)) == FINE


def test_a_container_that_was_started_again_is_looked_at_anew() -> None:
    watching = Watching()
    watching.shows(replace(READY, launch=HERE, runs={"digits": False}))
    again = replace(READY, launch=replace(HERE, started="b"))
    assert watching.shows(again, 58) == FINE
    assert watching.shows(again, 2).kind == "absent"


@pytest.mark.parametrize("wrong", [HERE, replace(HERE, standalone=True), None])
def test_nobody_is_expected_of_a_pod_that_takes_no_part(wrong: LaunchReport | None) -> None:
    # A launcher pod, a worker of Horovod, one that drains, is fenced or not ready yet.
    assert Watching().shows(LauncherView(expected=False, launch=wrong), 600) == FINE


@pytest.mark.parametrize("launch", [HERE, LaunchReport("a"), None])
def test_nobody_is_missed_when_the_run_is_over(launch: LaunchReport | None) -> None:
    assert Watching().shows(replace(READY, over=True, launch=launch), 600) == FINE


def test_another_number_of_workers_counts_and_is_said() -> None:
    watching = Watching()
    runs = {"digits": False}
    assert watching.shows(replace(READY, launch=HERE, runs=runs)) == FINE  # not known yet
    assert watching.shows(replace(READY, launch=HERE, runs=runs, workers=1)) == FINE
    found = watching.shows(replace(READY, launch=HERE, runs=runs, workers=2))
    assert (found.kind, found.slots) == ("slots", 2)
    assert found.sentence.startswith("its torchrun started 2 workers, and that counts")
    kv = KeyValue("bypasses/w-0", found.to_json(), 1, 1, 1, 0)
    assert Bypass.from_kv(kv) == found
    # Between two rounds, and in a drain.
    assert watching.shows(replace(READY, launch=HERE, runs=runs)) == found
    assert watching.shows(replace(READY, launch=HERE, runs=runs, expected=False)) == found
    # Another fault is not hidden by it, nor the number by that.
    other = replace(HERE, nnodes="1:2")
    both = watching.shows(replace(READY, launch=other, runs=runs, workers=2))
    assert (both.kind, both.slots) == ("nnodes", 2)
    # Another container, whose torchrun starts as many as declared.
    again = replace(HERE, started="b")
    assert watching.shows(replace(READY, launch=again, runs=runs, workers=1)) == FINE


def test_fewer_workers_than_slots_are_said_too() -> None:
    watching = Watching(replace(POLICY, slots=8))
    found = watching.shows(replace(READY, runs={"digits": False}, workers=1))
    assert (found.kind, found.slots) == ("slots", 1)
    assert "started 1 worker, and that counts; its sidecar was given --slots=8" in found.sentence


def test_the_sentence_stays_the_same_while_nothing_changes() -> None:
    watching = Watching()
    sight = replace(READY, launch=HERE)
    assert {watching.shows(sight, 60), watching.shows(sight, 600)} == {watching.shows(sight)}


def test_what_a_torchrun_calls_itself_makes_no_long_or_forged_sentence() -> None:
    name = "x" * 8000 + "\n\x1b[2J"
    watching = Watching()
    found = watching.shows(replace(READY, runs={name: False}), 60)
    assert found.kind == "run_id"
    assert len(found.sentence) <= 400
    assert found.sentence.isprintable()
    kv = KeyValue("bypasses/w-0", found.to_json(), 1, 1, 1, 0)
    assert Bypass.from_kv(kv) == found, "else it would be written anew at each look"
