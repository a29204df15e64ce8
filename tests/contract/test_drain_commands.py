# SPDX-License-Identifier: Apache-2.0
"""``muster drain``, ``notice`` and ``forget`` as real processes, beside sidecars and ranks."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from console.job.changing import write
from launcher_shim.c10d.rounds.records import Round
from rdzv.drain.gate import Gate
from rdzv.errors import StoreFull
from rdzv.records.drain import LastCommit
from rdzv.store import Compare, Delete, Operation, Put
from rdzv.store.memory.client import MemoryEngine
from tests.support.sidecars.drain_commands import Terminal, terminal
from tests.support.sidecars.drains import HERE, RUN
from tests.support.sidecars.jobs import KEYS, LosesOne, NoRoom, client
from tests.support.sidecars.processes import PATIENCE_S, Ended, impatient_muster, muster
from tests.support.sidecars.ranks import Loop

PATIENT_RUNNER = (
    "-c",
    "import console.job.drain; console.job.drain.LOST_S = 60.0; "
    "from tests.support.sidecars.patient import main; main()",
)
"""Gives a member that is gone as long to come back as a busy machine takes."""


HASTY_RUNNER = (
    "-c",
    "import console.job.drain; console.job.drain.RECORDED_S = 0.5; "
    "from tests.support.sidecars.patient import main; main()",
)
"""Waits for moments for a drain to be put back that the store has lost."""

UNHURRIED = ("--deadline", "600s")
"""The drain is over for another reason than that its time is."""


def phases(ended: Ended) -> list[str]:
    return [line.split()[0] for line in ended.out.splitlines()]


async def read_to_the_end(process: asyncio.subprocess.Process, begun: str = "") -> Ended:
    """Wait until a command has ended; ``begun`` is what it has printed so far."""
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, begun + out.decode(), err.decode())


async def read_until(process: asyncio.subprocess.Process, phase: str) -> str:
    """What a command prints, up to and with the line that tells of ``phase``."""
    assert process.stdout is not None
    lines = [""]
    async with asyncio.timeout(PATIENCE_S):
        while not lines[-1].startswith(phase):
            lines.append((await process.stdout.readline()).decode())
            assert lines[-1], f"it ended before {phase}: {lines}"
    return "".join(lines)


async def test_a_drain_prints_each_phase_and_ends_with_0_after_the_save() -> None:
    async with terminal(trains="ab") as at:
        pods = at.one.pods.values()
        for pod in pods:
            # The save begins later than the drain by what every sidecar's clock can tell.
            pod.cable.jam(HERE.votes)
        arguments = ("b", "--wait", "--deadline", "120s", "--reason", "new kernel")
        async with at.begun_drain(*arguments) as process:
            await at.one.until(at.one.phase_is("hold"))
            held_s = at.one.clock()
            await at.one.pods["b"].soon(lambda: at.one.clock() - held_s > 0.2)
            for pod in pods:
                pod.cable.mend()
                # Nobody can say that all have saved before the command has told that they save.
                pod.cable.jam(KEYS.last_commit)
            begun = await read_until(process, "saving")
            for pod in pods:
                pod.cable.mend()
            ended = await read_to_the_end(process, begun)
        assert ended.status == 0
        # Each in its order; one that is over before anybody has looked is not told of.
        order = ["draining", "agreeing", "saving", "saved", "released"]
        assert phases(ended) == [phase for phase in order if phase in phases(ended)]
        assert {"saving", "released"} <= {*phases(ended)}
        ((_, step),) = at.one.done
        assert ended.out.endswith(f"b may go: all ranks saved step {step}\n")
        drain = at.one.pods["b"].drain
        assert drain is not None
        assert (drain.source, drain.reason, drain.seconds_left) == ("operator", "new kernel", 120)
        assert "@" in drain.requested_by
        again = await at.drain("b", "--wait")
        assert (again.status, phases(again)) == (0, ["released"])
        history = (await at.history()).out
        assert "drain      b: new kernel (outcome committed, " in history
        assert f"step {step}, source operator, requested by {drain.requested_by}" in history
        assert "pod_uid" not in history
        assert "saving after " in history


async def test_while_the_job_is_finishing_it_says_that_nothing_is_to_be_saved() -> None:
    async with terminal(trains="ab", b=Loop(save_s=300)) as at:
        key = HERE.run(RUN).round
        current = Round.from_kv(at.one.mirror.kvs[key])
        async with at.begun_drain("b", "--wait", *UNHURRIED) as process:
            await read_until(process, "saving")
            await at.one.put(Put(key, replace(current, finishing=True).to_json()))
            told = await read_until(process, "finishing")
            assert told.splitlines()[-1].endswith("the job is finishing: nothing is to be saved")
            status = (await at.status()).out
            assert "the job is finishing: nothing is to be saved" in status
            assert "at risk" not in status


async def test_without_wait_it_returns_at_once() -> None:
    async with terminal(least=2, trains="ab") as at:
        ended = await at.drain("b", "--json")
        assert ended.status == 0
        (line,) = map(json.loads, ended.out.splitlines())
        assert line.keys() == {"member", "phase", "sentence", "outcome"}
        assert (line["member"], line["outcome"]) == ("b", "")
        assert line["phase"] in ("draining", "agreeing", "saving", "saved")
        shown = json.loads((await at.status("--json")).out)["members"]
        (drained,) = [member for member in shown if member["name"] == "b"]
        assert drained["state"] == "draining"


async def test_out_of_time_it_ends_with_3() -> None:
    async with terminal(trains="ab", b=Loop(save_s=300)) as at:
        ended = await at.drain("b", "--wait", "--deadline", "2s")
        assert (ended.status, phases(ended)[-1]) == (3, "released")
        assert "b has expired before all ranks had saved: the save of step " in ended.out
        assert ended.out.endswith("no report of b\n")
        saving = next(line for line in ended.out.splitlines() if line.startswith("saving"))
        assert saving.endswith(" s to its deadline")
        assert "no report of b" in (await at.history()).out
        assert "no report of b" in (await at.status()).out


async def test_a_drain_below_min_names_its_deadline() -> None:
    async with terminal(least=2, trains="ab") as at:
        ended = await at.drain("b", "--wait", "--deadline", "8s")
        waits = [
            line for line in ended.out.splitlines() if "fewer than min (2) would be left" in line
        ]
        assert waits, ended.out
        assert all(line.endswith(" s to its deadline") for line in waits)


async def test_cancelled_it_ends_with_4() -> None:
    async with terminal(least=2, trains="ab") as at:
        waiting = asyncio.create_task(at.drain("b", "--wait", "--json", *UNHURRIED))
        await at.one.until(at.one.phase_is("done"))
        cancelled = await at.drain("b", "--cancel")
        assert (cancelled.status, phases(cancelled)) == (0, ["cancelled"])
        ended = await waiting
        last = json.loads(ended.out.splitlines()[-1])
        assert (ended.status, last["phase"], last["outcome"]) == (4, "cancelled", "cancelled")
        await at.one.goes_on()
        again = await at.drain("b", "--cancel")
        assert again.status == 2
        assert "the drain of b cannot be cancelled: pod uid-b does not drain" in again.err


async def test_of_a_pod_that_is_being_ended_it_is_refused() -> None:
    async with terminal(least=2, trains="ab") as at:
        assert (await at.drain("b", *UNHURRIED)).status == 0
        await at.one.until(at.one.phase_is("done"))
        # The pod is deleted meanwhile: that cannot be taken back.
        at.one.pods["b"].notice("sigterm", 1200)
        await at.one.until(lambda: at.one.snapshot.drains["uid-b"].ends)
        refused = await at.drain("b", "--cancel")
        assert (refused.status, refused.out) == (2, "")
        assert "cannot be cancelled: the pod of b is being ended" in refused.err
        drain = at.one.snapshot.drains["uid-b"]
        assert (drain.source, drain.outcome, drain.seconds_left) == ("operator", "", 600)


async def test_a_drain_that_the_store_has_lost_is_waited_for_and_not_taken_for_cancelled() -> None:
    async with terminal(least=2, trains="ab") as at:
        waiting = asyncio.create_task(at.drain("b", "--wait", *UNHURRIED))
        await at.one.until(at.one.phase_is("done"))
        # As a store is that was restored to before the drain; the sidecar puts it back.
        lost = at.one.snapshot.drains["uid-b"].mod_revision
        await at.one.put(Delete(HERE.drain("uid-b")))
        await at.one.until(
            lambda: getattr(at.one.snapshot.drains.get("uid-b"), "mod_revision", 0) > lost
        )
        await at.one.pods["b"].kill()
        await at.one.put(Delete(HERE.member("b")))
        ended = await waiting
        assert (ended.status, phases(ended)[-1]) == (5, "lost")
        assert "cancelled" not in phases(ended)


async def test_a_drain_that_the_store_has_lost_and_nobody_puts_back_ends_with_5() -> None:
    async with terminal(least=2, trains="ab") as at:
        async with at.begun_drain("b", "--wait", *UNHURRIED, runner=HASTY_RUNNER) as process:
            await at.one.until(at.one.phase_is("done"))
            begun = await read_until(process, "saved")
            await at.one.pods["b"].kill()
            await at.one.put(Delete(HERE.drain("uid-b")))
            ended = await read_to_the_end(process, begun)
        assert (ended.status, phases(ended)[-1]) == (5, "lost")
        assert "its sidecar has not put it back: drain it again" in ended.out


async def test_a_member_that_comes_back_is_not_lost() -> None:
    async with terminal(trains="ab", loop=Loop(save_s=1)) as at:
        async with at.begun_drain("b", "--wait", *UNHURRIED, runner=PATIENT_RUNNER) as process:
            await at.one.until(at.one.phase_is("commit"))
            await at.one.put(Delete(HERE.member("b")))
            ended = await read_to_the_end(process)
        assert (ended.status, phases(ended)[-1]) == (0, "released")


async def test_without_a_save_it_ends_with_6_and_can_be_cancelled_all_the_same() -> None:
    async with terminal() as at:
        ended = await at.drain("b", "--wait")
        assert (ended.status, phases(ended)[-1]) == (6, "released")
        history = (await at.history()).out
        assert "drain      b: asked for by hand (outcome uncommitted, source operator" in history
        assert "None" not in history
        cancelled = await at.drain("b", "--cancel")
        assert (cancelled.status, phases(cancelled)) == (0, ["cancelled"])
        await at.one.until(lambda: at.one.pods["b"].drain is None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x"], "job digits has no member x: its members are a, b"),
        (["b", "--deadline", "soon"], "--deadline: 'soon' is wrong"),
        (["b", "--deadline", "0.5s"], "--deadline: '0.5s' is wrong"),
    ],
)
async def test_a_mistake_is_said_in_one_sentence(arguments: list[str], says: str) -> None:
    async with terminal() as at:
        ended = await at.drain(*arguments)
        assert ended.status == 2
        assert says in ended.err
        assert at.one.snapshot.drains == {}


async def test_with_the_store_away_it_ends_with_69() -> None:
    words = ("drain", "b", "--job", "digits")
    ended = await impatient_muster(*words, MUSTER_ETCD_ENDPOINTS="127.0.0.1:1")
    assert ended.status == 69
    assert ended.err.startswith("muster: cannot reach the store at 127.0.0.1:1")


async def test_a_notice_returns_when_it_is_taken_and_kept(tmp_path: Path) -> None:
    async with terminal(notice_path=tmp_path / "notice.sock") as at:
        pod = at.one.pods["b"]
        for _ in range(2):
            ended = await muster("notice", "--reason", "preStop", MUSTER_RUN_DIR=str(tmp_path))
            assert (ended.status, ended.err) == (0, "")
            kept = pod.kept()
            assert kept is not None
            assert (kept["sources"], kept["reason"]) == (["prestop"], "preStop")
        await at.one.until(lambda: at.one.snapshot.drains["uid-b"].outcome == "uncommitted")


async def test_a_notice_without_a_sidecar_says_where_it_looked(tmp_path: Path) -> None:
    ended = await muster("notice", "--run-dir", str(tmp_path))
    assert ended.status == 2
    assert f"no sidecar answers at {tmp_path}/notice.sock" in ended.err
    assert "check --run-dir (MUSTER_RUN_DIR)" in ended.err


@pytest.mark.parametrize("applied", [True, False])
async def test_a_write_that_is_refused_for_want_of_room_is_looked_for(applied: bool) -> None:
    key = HERE.drain("uid-b")
    async with client(MemoryEngine(), NoRoom(applied=applied, times=1)) as one:

        def plan(_: object) -> tuple[list[Compare], list[Operation]]:
            return [Compare(key, "create", "=", 0)], [Put(key, b"{}")]

        with nullcontext() if applied else pytest.raises(StoreFull, match="space"):
            await write(one, plan)
        assert len((await one.store.range(key)).kvs) == applied


@pytest.mark.parametrize(("loses", "times"), [("answer", 1), ("request", 2)])
async def test_a_write_without_an_answer_is_made_once(loses: str, times: int) -> None:
    key = HERE.drain("uid-b")
    planned: list[int] = []
    async with client(MemoryEngine(), LosesOne(loses)) as one:

        def plan(_: object) -> tuple[list[Compare], list[Operation]] | None:
            if key in one.mirror.kvs:
                return None
            planned.append(one.mirror.revision)
            return [Compare(key, "create", "=", 0)], [Put(key, b"{}")]

        await write(one, plan)
        assert len((await one.store.range(key)).kvs) == 1
        assert len(planned) == times


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
