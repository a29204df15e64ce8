# SPDX-License-Identifier: Apache-2.0
"""Which worlds form, of whom, and when: newcomers, losses, sizes, pauses, spares, the end."""

from __future__ import annotations

from itertools import permutations

import pytest

from launcher_shim.c10d.rounds.decision import FIRST_S, FREE_STARTS, LONGEST_S
from launcher_shim.hosts import CONFIRM_S
from rdzv.store import Put
from tests.simulation.nodes import KEYS, LEASE_TTL_S
from tests.simulation.torchrun import JOIN_S, RUN
from tests.world.world import HERE, World

HOUR_S = 3600.0
SOON_S = 20.0
"""A world that waits for nothing forms in less."""


@pytest.mark.parametrize("world", [0], indirect=True)
@pytest.mark.parametrize(
    ("gather_s", "sizes"), [(60.0, [2, 6, 10]), (0.0, [*range(2, 11)])], ids=["gathered", "each"]
)
async def test_eight_that_come_within_two_minutes_make_two_worlds_or_one_each(
    world: World, gather_s: float, sizes: list[int]
) -> None:
    job = await world.job("ab", most=10)
    job.set(gather_s=gather_s)
    await job.trains()
    for name in "cdefghij":
        job.add(name)
        await job.passes(120 / 7)
    await job.settles()
    assert [len(names) for names in job.formed] == sizes
    assert job.lost == 0


async def test_a_loss_forms_the_world_again_at_once_and_takes_in_who_waits(world: World) -> None:
    job = await world.job("abc")
    job.set(gather_s=HOUR_S)
    await job.trains()
    job.add("d")
    await job.passes(SOON_S)
    job["b"].die()
    await job.until(lambda: job.world == "acd", 2 * LEASE_TTL_S + SOON_S)
    assert job.formed == ["abc", "acd"]


async def test_a_third_stands_by_until_a_fourth_makes_an_allowed_size(world: World) -> None:
    job = await world.job("ab", most=4)
    job.set(sizes=(2, 4))
    await job.trains()
    job.add("c")
    await job.passes(600)
    assert job.formed == ["ab"]
    job.add("d")
    await job.settles()
    assert job.formed == ["ab", "abcd"]


@pytest.mark.parametrize(
    ("change", "stay"),
    [({"max_nodes": 2}, "ab"), ({"sizes": (1, 3)}, "abc")],
    ids=["max", "sizes"],
)
async def test_a_world_that_has_become_too_large_gives_the_youngest_up(
    world: World, change: dict[str, object], stay: str
) -> None:
    job = await world.job("", most=4)
    for name in "abcd":
        job.add(name)
        await job.passes(1)
    await job.until(lambda: job.world == "abcd")
    await job.trains()
    job.set(**change)
    await job.settles()
    assert (job.world, job.lost) == (stay, 0)
    job.set(max_nodes=4, sizes=())
    await job.settles()
    assert (job.world, job.lost) == ("abcd", 0)


async def test_a_pause_ends_the_world_and_no_torchrun(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job.set(paused=True)
    await job.until(lambda: not job.world)
    await job.passes(JOIN_S + 60)
    assert job.formed == ["abc"]
    job.set(paused=False)
    await job.settles()
    assert (job.formed, job.lost) == (["abc", "abc"], 0)


async def test_too_few_outlive_their_join_time_out_and_train_once_they_are_enough(
    world: World,
) -> None:
    job = await world.job("ab", least=3)
    await job.passes(JOIN_S + 60)
    assert job.formed == []
    job.add("c")
    await job.settles()
    for name in "bc":
        job[name].die()
    await job.passes(JOIN_S + 60)
    for name in "bc":
        job.add(name)
    await job.settles()
    assert job.world == "abc"


async def test_a_spare_has_the_place_of_a_torchrun_that_never_comes(world: World) -> None:
    job = await world.job("abcd", least=3, most=3, launchers={"b": "absent"})
    await job.trains()
    assert job.world == "acd"
    job.launchers["b"] = "steady"
    job["b"].start_container()
    await job.passes(60)
    assert job.formed == ["acd"]


@pytest.mark.parametrize("least", [2, 3])
async def test_a_spare_has_the_place_of_a_torchrun_that_was_killed(
    world: World, least: int
) -> None:
    job = await world.job("abc", least=least, most=3)
    await job.trains()
    job.add("d")
    await job.passes(SOON_S)
    job["b"].end_container()
    await job.until(lambda: job.world == "acd", SOON_S)


@pytest.mark.parametrize("asks", [False, True])
async def test_an_older_member_that_comes_back_takes_no_place_from_one_that_trains(
    world: World, asks: bool
) -> None:
    job = await world.job("ab", least=2, most=2)
    await job.trains()
    job.add("c")
    await job.passes(SOON_S)
    job["a"].cut()
    await job.until(lambda: job.world == "bc")
    if not asks:
        job["a"].end_container()
    job["a"].mend()
    await job.passes(SOON_S)
    job["b"].order("rejoin")
    await job.until(lambda: len(job.formed) == 3)
    await job.passes(SOON_S)
    assert job.formed == ["ab", "bc", "bc"]


async def test_i11_one_whose_writes_alone_are_refused_holds_nobody_up(world: World) -> None:
    """It reads, and its lease is renewed, so that its node stays; it cannot write that it left."""
    job = await world.job("abc", least=2, patience_s=HOUR_S)
    await job.trains()
    job["a"].refuse_writes()
    job["b"].end_torchrun()
    await job.until(lambda: job.world == "bc")
    job["a"].take_writes()
    await job.settles()
    assert job.world == "abc"


@pytest.mark.parametrize("what", ["lease", "torchrun", "newcomer"])
async def test_i11_a_world_ends_once_that_is_written_and_not_before(
    world: World, what: str
) -> None:
    job = await world.job("abc", most=4)
    await job.trains()
    job.engine.fill(0)
    if what == "lease":
        job["c"].cut()
    elif what == "torchrun":
        job["c"].end_container()
    else:
        job.add("d")
    await job.passes(60)
    assert job.formed == ["abc"]
    job.engine.make_room()
    if what == "newcomer":
        await job.until(lambda: job.world == "abcd")
        assert job.lost == 0
    else:
        await job.until(lambda: job.world == "ab")


@pytest.mark.parametrize("world", [0], indirect=True)
@pytest.mark.parametrize("order", list(permutations(range(4)))[::4])
async def test_i8_in_whatever_order_records_are_damaged_the_world_trains_on(
    world: World, order: tuple[int, ...]
) -> None:
    job = await world.job("abc")
    await job.trains()
    keys = (KEYS.job, HERE.member("b"), HERE.run(RUN).node("b"), HERE.run(RUN).round)
    for number in order:
        job.put(Put(keys[number], b"\xff no record"))
        await job.passes(0.05)
    await job.settles()
    assert job.formed == ["abc"]
    assert all(job.invariants.truth.kvs[key].value != b"\xff no record" for key in keys)


async def test_while_the_job_is_finishing_a_pod_has_its_whole_grace_and_nothing_to_save(
    world: World,
) -> None:
    job = await world.job("ab")
    await job.trains()
    job.last_step, job.invariants.rounds.may_close = job.step + 3, True
    job.uploads_s = {"a": 25.0, "b": 25.0}
    job.invariants.rounds.at_finish = lambda round: job["b"].sigterm(grace_s=30)
    await job.ends("b")
    assert "finishing" in job["b"].phases
    assert (job["b"].outcome, job.done) == ("uncommitted", [])


async def test_one_that_was_cut_off_while_its_world_went_on_asks_again(world: World) -> None:
    job = await world.job("abc")
    await job.trains()
    job["b"].cut()
    job["b"].restart()
    await job.until(lambda: job.world == "ac")
    job["b"].mend()
    await job.settles()
    assert job.world == "abc"


async def test_i5_a_world_that_comes_back_one_by_one_lets_a_newcomer_in_once(
    world: World,
) -> None:
    job = await world.job("abcd", launchers={"d": "absent"})
    await job.trains()
    for name in "abc":
        job[name].cut()
    await job.until(lambda: [*job.snapshot.members] == ["d"])
    job.launchers["d"] = "steady"
    job["d"].start_container()
    for name in "cab":
        await job.passes(CONFIRM_S + 1.0)
        assert job.formed == ["abc"]
        job[name].mend()
    await job.settles()
    assert (job.formed, job.lost) == (["abc", "abcd"], 0)


async def test_a_node_that_the_store_has_lost_is_put_back_before_it_is_missed(
    world: World,
) -> None:
    job = await world.job("abc")
    await job.trains()
    job["b"].crash()
    await job.until(lambda: "b" not in job.snapshot.members)
    job["b"].start()
    await job.settles()
    job.add("d")
    await job.settles()
    assert (job.formed, job.lost) == (["abc", "abcd"], 0)


@pytest.mark.parametrize("world", [0], indirect=True)
async def test_the_next_try_waits_longer_each_time_and_no_torchrun_gives_up(world: World) -> None:
    """Whose workers cannot start: each wait is in the history once, and a fresh pod ends it."""
    job = await world.job(
        "ab", least=2, most=3, patience_s=HOUR_S, launchers=dict.fromkeys("abc", "broken")
    )
    waits = []
    for number in range(1, FREE_STARTS + 6):
        began_s = job.loop.time()
        await job.until(lambda number=number: len(job.formed) == number, 2 * LONGEST_S)  # type: ignore[misc]
        waits.append(job.loop.time() - began_s)
    assert max(waits[:FREE_STARTS]) < SOON_S
    for n, seconds in enumerate(waits[FREE_STARTS:]):
        least_s = min(LONGEST_S, FIRST_S * 2**n)
        assert least_s - 2 <= seconds < least_s + SOON_S
    told = [entry.details["round"] for entry in job.history("wait")]
    assert len(set(told)) == len(told) >= 5
    await job.passes(SOON_S)
    job.launchers.update(dict.fromkeys("abc", "steady"))
    job.add("c")
    await job.until(lambda: job.world == "abc", SOON_S)
    await job.settles()
