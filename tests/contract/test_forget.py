# SPDX-License-Identifier: Apache-2.0
"""``muster forget``, and a job created again, as the ranks beside real sidecars see them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdzv.drain.gate import Gate
from rdzv.records.drain import LastCommit
from rdzv.store import Put
from tests.support.sidecars.drain_commands import Terminal, terminal
from tests.support.sidecars.jobs import KEYS
from tests.support.sidecars.processes import impatient_muster, muster

LAST = LastCommit(60, 0, 7, job_uid="uid-digits")


async def shown(at: Terminal, name: str, expected: LastCommit | None, *, former: bool) -> None:
    """Wait until a pod's gate tells its ranks this."""

    def tells() -> bool:
        content = at.one.pods[name].files.get("gate.json")
        if content is None:
            return False
        gate = Gate.from_json("gate.json", content)
        return (gate.last_commit, gate.of_former_life) == (expected, former)

    await at.one.pods[name].soon(tells)


async def test_a_commit_of_a_former_life_is_told_as_one() -> None:
    async with terminal(trains="ab") as at:
        for uid, former in (("uid-before", True), ("uid-digits", False)):
            await at.one.put(Put(KEYS.last_commit, replace(LAST, job_uid=uid).to_json()))
            for name in "ab":
                await shown(at, name, replace(LAST, job_uid=""), former=former)
        at.one.done.clear()  # none of these ranks has saved it


async def test_what_is_forgotten_is_not_told_any_more_and_later_epochs_are_above_it() -> None:
    async with terminal(trains="ab") as at:
        await at.one.put(Put(KEYS.last_commit, LAST.to_json()))
        await shown(at, "a", replace(LAST, job_uid=""), former=False)
        ended = await at.command("forget")
        assert (ended.status, ended.err) == (0, "")
        assert ended.out.startswith("forgotten: step 60; the next start of job digits goes on from")
        await shown(at, "a", None, former=False)
        again = await at.command("forget")
        assert again.status == 0
        assert again.out == "job digits has no last commit: there is nothing to forget\n"
        assert "the last commit, step 60, is forgotten" in (await at.history()).out
        at.one.done.clear()  # none of these ranks has saved it
        assert (await at.drain("b")).status == 0
        await at.one.until(lambda: at.one.commit.epoch > LAST.epoch)


async def test_a_record_that_cannot_be_read_is_forgotten_too() -> None:
    async with terminal() as at:
        await at.one.put(Put(KEYS.last_commit, b"[]"))
        ended = await at.command("forget")
        assert ended.out.startswith("forgotten: a last commit that could not be read")
        assert KEYS.last_commit not in at.one.snapshot.corrupt


@pytest.mark.parametrize(
    ("environ", "status", "says"),
    [
        (
            {"MUSTER_JOB": "other"},
            66,
            "the store has no job other in namespace team: it has team/digits",
        ),
        ({"MUSTER_ETCD_ENDPOINTS": "127.0.0.1:1"}, 69, "cannot reach the store at 127.0.0.1:1"),
    ],
)
async def test_a_mistake_is_said_in_one_sentence(
    environ: dict[str, str], status: int, says: str
) -> None:
    run = impatient_muster if "MUSTER_ETCD_ENDPOINTS" in environ else muster
    async with terminal() as at:
        ended = await run("forget", **{**at.environ, **environ})
        assert ended.status == status
        assert says in ended.err
