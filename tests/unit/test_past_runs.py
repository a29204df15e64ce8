# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

from launcher_shim.c10d.clean_up import surplus
from launcher_shim.c10d.rounds.records import Round, Seat
from launcher_shim.c10d.rounds.stages import SHARED_RUN
from launcher_shim.tcpstore import wire
from rdzv.keys import JobKeys
from rdzv.store import KeyValue
from tests.support.records import kv, node

HERE = JobKeys("team", "digits").in_generation(1)
WORLD = Round(0, complete=True, frozen=(Seat("w-0", "n", 1),))
ENDED = replace(WORLD, finishing=True, closed="success")
FAILED = replace(WORLD, closed="failure")

BARRIER = b"/torch.rendezvous.digits.0/torchelastic/agent/terminal_state/num_members"


def run(name: str, current: Round, revision: int, state: str = "left") -> list[KeyValue]:
    """All that a run has in the store, what may go first."""
    keys = HERE.run(name)
    inside = node("w-0", "in") if state == "in" else node("w-0", "left", left="done")
    return [
        kv(keys.value(b"/torch.rendezvous.digits.0/MASTER_ADDR")),
        kv(keys.value(b"/mine")),
        kv(keys.addend(b"/count", "w-0.1")),
        kv(keys.element(b"/queue", "w-0.1.2")),
        kv(keys.operation("w-0.1")),
        kv(keys.value(wire.STAGE), value=b"line"),
        kv(keys.value(wire.STAGE + b"w-0"), value=b"line"),
        kv(keys.addend(BARRIER, "w-0.1")),
        kv(keys.node("w-0"), value=inside.to_json()),
        kv(keys.round, revision, current.to_json()),
    ]


def gone(*runs: list[KeyValue], present: str = "d") -> list[str]:
    return surplus(HERE, [one for kvs in runs for one in kvs], present)


def may_go(kvs: list[KeyValue]) -> list[str]:
    return [one.key for one in kvs[:5]]


def test_what_launchers_stored_in_a_run_two_back_goes_but_for_who_was_done_by_which_line() -> None:
    a, b, c, d = (run(name, ENDED, at) for at, name in enumerate("abcd"))
    assert gone(d, c, b, a) == may_go(a) + may_go(b)
    assert gone(d, c) == []


def test_a_run_goes_on_to_keep_what_somebody_may_still_read() -> None:
    still, others = run("a", ENDED, 1, "in"), [run("c", ENDED, 8), run("d", WORLD, 9)]
    assert gone(still, *others) == []
    assert gone(run("a", WORLD, 1), run("b", FAILED, 2), *others) == []
    unreadable = [*run("a", ENDED, 1)[:-1], kv(HERE.run("a").round, value=b"no record")]
    assert gone(unreadable, *others) == []


def test_a_node_that_cannot_be_read_keeps_nothing() -> None:
    a, others = run("a", ENDED, 1), [run("c", ENDED, 8), run("d", WORLD, 9)]
    a[8] = kv(HERE.run("a").node("w-0"), value=b"no record")
    assert gone(a, *others) == may_go(a)


def test_what_clients_without_a_rendezvous_share_stays_whoever_wrote_a_round_beside_it() -> None:
    others = [run(name, ENDED, at) for at, name in enumerate("bcd", 2)]
    assert gone(run(SHARED_RUN, ENDED, 1), *others) == may_go(others[0])
