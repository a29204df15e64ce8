# SPDX-License-Identifier: Apache-2.0
"""A rank obeys the orders for its world, in every order of their coming; what its pod reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.world import conduct
from muster.world.conduct import (
    BREAK,
    END,
    GO,
    JOIN,
    PARK,
    PUBLISH,
    TODAY,
    WAIT,
    Order,
    OrderFile,
    WorldRank,
    comes_later,
    decide,
    parse,
)
from muster.world.reentry import fault_in_place
from tests.support.models.explorer import explore, first_broken
from tests.support.models.world_mutations import MUTATIONS, mutated
from tests.support.models.worlds import Worlds

IN_2 = WorldRank(number=2, step=7, epoch=5, formed=2, grouped=True, tried=2)
"""A rank that trains in world 2."""

OUT_OF_2 = IN_2._replace(grouped=False, broken=2)


@pytest.mark.parametrize(
    ("rank", "order", "verdict"),
    [
        (IN_2, Order(5, "train", 2), GO),
        (IN_2, Order(6, "train", 3), PUBLISH),  # not of that world
        (IN_2, Order(6, "hold", 2), PUBLISH),
        (IN_2._replace(held=6, epoch=6), Order(6, "hold", 2), WAIT),
        (IN_2, Order(7, "hold", 2, step=8), GO),
        (IN_2._replace(held=6, epoch=6), Order(7, "hold", 2, step=8), PUBLISH),
        (IN_2, Order(7, "hold", 2, step=7), PUBLISH),
        (IN_2._replace(held=7, epoch=7), Order(7, "hold", 2, step=7), WAIT),
        (IN_2, Order(6, "form", 3), JOIN),
        (IN_2, Order(6, "form", 2), WAIT),  # until all have formed
        (OUT_OF_2, Order(6, "form", 2), WAIT),  # never the same number twice
        (OUT_OF_2, Order(6, "train", 2), PUBLISH),
        (OUT_OF_2._replace(epoch=6), Order(6, "train", 2), WAIT),
        (IN_2, Order(6, "broken", 2), BREAK),
        (OUT_OF_2, Order(6, "broken", 2), PUBLISH),
        (OUT_OF_2._replace(epoch=6), Order(6, "broken", 2), WAIT),
        (IN_2, Order(6, "broken", 1), PUBLISH),  # of a world before
        (IN_2, Order(6, "leave", 3), PARK),
        (IN_2, Order(6, "over", 2), END),
        (IN_2, Order(6, "fall-back", 2), TODAY),
        (OUT_OF_2, Order(6, "fall-back", 2), PARK),
        (WorldRank(ready=True), Order(0, "idle"), WAIT),
        (WorldRank(ready=True), Order(9, "leave", 3), WAIT),  # of the process before it
        (WorldRank(ready=True), Order(1, "form", 1), JOIN),
        (WorldRank(ready=True), Order(1, "fall-back"), TODAY),
        (WorldRank(ready=True), Order(1, "fall-back", 4), PARK),  # a newcomer has no other world
    ],
)
def test_what_a_rank_does(rank: WorldRank, order: Order, verdict: str) -> None:
    assert decide(rank, order)[0] == verdict


def test_i13_a_rank_steps_once_all_have_formed() -> None:
    rank = IN_2._replace(formed=3, tried=3)
    assert decide(rank, Order(6, "form", 3))[0] == WAIT
    verdict, after = decide(rank, Order(7, "train", 3))
    assert (verdict, after.number) == (GO, 3)
    # It may have looked too late to see that they trained.
    assert decide(rank, Order(8, "hold", 3))[1].number == 3


@pytest.mark.parametrize("order", [Order(6, "broken", 3), Order(7, "idle", 4)])
def test_a_newcomer_whose_world_did_not_come_to_be_is_to_be_taken_in_again(order: Order) -> None:
    formed = WorldRank(step=7, epoch=5, formed=3, grouped=True, tried=3)
    verdict, after = decide(formed, order)
    assert (verdict, after.ready, after.epoch) == (BREAK, True, order.epoch)
    assert not decide(IN_2, Order(6, "broken", 2))[1].ready


def test_a_rank_that_is_behind_holds_no_whole_state_until_it_has_formed() -> None:
    order = Order(6, "form", 3, step=8, size=2, source=1)
    behind = conduct.begin_form(IN_2, order, 0)
    assert (behind.step, behind.tried, behind.grouped) == (-1, 3, False)
    assert conduct.begin_form(IN_2, order, 1).step == 7  # the source
    assert conduct.begin_form(IN_2._replace(step=8), order, 0).step == 8
    assert conduct.begin_form(WorldRank(step=8), order, 0).step == -1  # of a checkpoint
    formed = conduct.has_formed(behind, order, 8)
    assert (formed.step, formed.formed, formed.grouped, formed.number) == (8, 3, True, 2)
    assert conduct.break_off(IN_2, -1)[:2] == (2, -1)


def test_a_rank_withdraws_that_it_stands_before_it_moves() -> None:
    held = decide(IN_2, Order(6, "hold", 2))[1]
    assert held.held == 6
    verdict, after = decide(held, Order(7, "train", 2))
    assert (verdict, after.held) == (PUBLISH, 0)
    assert decide(after, Order(7, "train", 2))[0] == GO


@pytest.mark.parametrize(
    ("order", "lost", "given_up"),
    [
        (Order(6, "train", 2), False, False),
        (Order(6, "hold", 2), False, False),
        (Order(6, "broken", 1), False, False),
        (Order(6, "broken", 2), True, True),
        (Order(6, "form", 2), False, False),
        (Order(6, "form", 3), True, True),
        (Order(6, "fall-back", 2), False, True),
        (Order(6, "leave", 2), False, True),
        (Order(6, "idle", 1), False, True),
        (None, False, False),
    ],
)
def test_when_a_group_is_cut(order: Order | None, lost: bool, given_up: bool) -> None:
    assert conduct.is_lost(order, 2) is lost
    assert conduct.is_given_up(order, 2) is given_up
    assert conduct.confirms_loss(order, OUT_OF_2) is given_up


def test_what_a_rank_says_is_json() -> None:
    failed = OUT_OF_2._replace(failed=(3, 'Error: "no"\n'), held=4, ready=True, over=True)
    assert json.loads(failed.told("2.15.0")) == {
        "number": 2,
        "step": 7,
        "epoch": 5,
        "held": 4,
        "broken": 2,
        "formed": 2,
        "failed": [3, "Error: 'no' "],
        "ready": True,
        "over": True,
        "torch": "2.15.0",
    }
    assert json.loads(WorldRank().told("x")) == {"number": -1, "step": 0, "epoch": 0, "torch": "x"}


def test_an_order_is_read_when_it_changes(tmp_path: Path) -> None:
    orders = OrderFile(str(tmp_path))
    assert orders.read() is None
    path = tmp_path / "world"
    path.write_text('{"epoch":1,"phase":"hold","number":2,"step":null}')
    assert orders.read() == Order(1, "hold", 2)
    aside = tmp_path / "part"
    aside.write_text('{"epoch":2,"phase":"form","number":3,"step":9,"size":4,"first_rank":1}')
    aside.replace(path)
    assert orders.read() == Order(2, "form", 3, 9, 4, 1)


def test_an_order_that_is_none_leaves_the_last_in_force(tmp_path: Path) -> None:
    path = tmp_path / "world"
    path.write_text('{"epoch":1,"phase":"train","number":2}')
    orders = OrderFile(str(tmp_path))
    before = orders.read()
    path.write_text("half of it")
    assert orders.read() == before
    path.unlink()
    assert orders.read() == before


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"epoch":1,"phase":"dance"}', b"\xff"])
def test_what_is_no_order(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|phase|decode"):
        parse(content)


STATES = 60_000

CASES: dict[str, Worlds] = {
    "first-world": Worlds(begins=True, steps=1),
    "join": Worlds(("join",), steps=1),
    "drain": Worlds(("drain a",)),
    "drain-cancelled": Worlds(("drain a", "cancel a"), steps=1),
    "two-drains": Worlds(("drain a", "drain b"), steps=1),
    "crash": Worlds(("crash",)),
    "two-crashes": Worlds(("crash", "crash"), pods=3),
    "crash-and-drain": Worlds(("crash", "drain a")),
    "worker-dies": Worlds(("worker",)),
    "cut": Worlds(("cut",)),
    "collective-fails": Worlds(("glitch",)),
    "collective-fails-and-pause": Worlds(("glitch", "pause")),
    "collective-fails-and-last-drain": Worlds(("glitch", "drain a"), pods=1),
    "half-a-step": Worlds(("half",)),
    "sidecar-restarts-in-a-drain": Worlds(("restart", "drain a"), steps=1),
    "sidecar-restarts-in-a-loss": Worlds(("restart", "crash")),
    "store-away-in-a-drain": Worlds(("away", "drain a")),
    "store-away-in-a-loss": Worlds(("away", "crash")),
    "timeout": Worlds(("late", "drain a"), steps=1),
    "drain-at-min": Worlds(("drain a",), least=2),
}

LARGE: dict[str, Worlds] = {
    "join-and-steps": Worlds(("join",), steps=4),
    "join-and-drain": Worlds(("join", "drain a")),
    "join-at-min-and-drain": Worlds(("join", "drain a"), least=2),
    "join-and-crash": Worlds(("join", "crash")),
    "join-and-cut": Worlds(("join", "cut"), pods=1),
    "newcomer-leaves-and-stays": Worlds(("join", "drain c", "cancel c")),
    "two-drains-of-three": Worlds(("drain a", "drain b", "restart"), pods=3),
    "everything": Worlds(("join", "drain a", "crash", "restart", "away", "late")),
    "everything-of-three": Worlds(("drain a", "worker", "cut", "half", "restart", "late"), pods=3),
}


@pytest.mark.parametrize("case", CASES)
def test_i13_each_order_of_a_change(case: str) -> None:
    explored = explore(CASES[case], STATES)
    assert explored.exhausted
    assert explored.ends > 0


@pytest.mark.parametrize("case", LARGE)
def test_i13_many_orders_of_several_changes(case: str) -> None:
    assert first_broken(LARGE[case], range(100)) == ""


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_planted_mistakes_are_found(name: str) -> None:
    mutation = MUTATIONS[name]
    # A fresh one: it keeps what the product's functions have said.
    model = replace({**CASES, **LARGE}[mutation.case])
    with mutated(name):
        broken = first_broken(model, range(2000))
    assert mutation.found in broken, broken


def trainer(args: dict[str, Any], **given: Any) -> Any:
    usual = {
        "optim": "adamw_torch",
        "n_gpu": 1,
        "torch_compile": False,
        "auto_find_batch_size": False,
        "use_liger_kernel": False,
        "debug": [],
    }
    own = {"model_init": None, "neftune_noise_alpha": None}
    accelerator = SimpleNamespace(scaler=given.pop("scaler", None))
    return SimpleNamespace(
        args=SimpleNamespace(**{**usual, **args}), accelerator=accelerator, **{**own, **given}
    )


def test_plain_ddp_is_not_refused() -> None:
    assert fault_in_place(trainer({})) == ""


@pytest.mark.parametrize(
    ("args", "given", "named"),
    [
        ({}, {"is_deepspeed_enabled": True}, "a whole model on each rank"),
        ({}, {"is_fsdp_enabled": True}, "a whole model on each rank"),
        ({}, {"is_distributed_loading_by_transformers": True}, "a whole model on each rank"),
        ({"n_gpu": 2}, {}, "a whole model on each rank"),
        ({}, {"scaler": object()}, "fp16=True"),
        ({}, {"model_init": list}, "model_init"),
        ({}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, {}, "torch_compile"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel"),
        ({"debug": ["underflow_overflow"]}, {}, "debug"),
        ({"optim": "galore_adamw_layerwise"}, {}, "optim='galore_adamw_layerwise'"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    args: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    assert named in fault_in_place(trainer(args, **given))


@pytest.mark.parametrize(
    ("order", "alone"),
    [
        (None, False),
        ({"phase": "idle", "number": -1}, False),  # the first world: its launcher's ranks are there
        ({"phase": "idle", "number": 1}, True),
        ({"phase": "broken", "number": 3}, True),  # a rank that its launcher has started again
        ({"phase": "fall-back", "number": 3}, False),
    ],
)
def test_a_rank_that_comes_into_a_world_that_trains_waits_for_no_others(
    tmp_path: Path, order: dict[str, Any] | None, alone: bool
) -> None:
    if order is not None:
        (tmp_path / "world").write_text(json.dumps({"epoch": 4, **order}))
    environ = {"MUSTER_RUN_DIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "job"}
    assert comes_later(environ) is alone
    assert not comes_later({"MUSTER_RUN_DIR": str(tmp_path)})
