# SPDX-License-Identifier: Apache-2.0
"""``muster status``, ``hosts``, ``history`` and ``store`` as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import pytest

from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.errors import StoreError
from rdzv.keys import JobKeys
from rdzv.records.drain import NO_CURSOR, Drain, LastCommit
from rdzv.records.history import HistoryEntry
from rdzv.records.job import Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves
from rdzv.records.quarantine import Quarantine
from rdzv.store import Put
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.records import member
from tests.support.sidecars.processes import (
    CONSOLE,
    PATIENCE_S,
    PATIENT,
    ROOT,
    muster,
    started,
    until,
)

KEYS = JobKeys("default", "digits")
LIVE = KEYS.in_generation(3)
LAST = LastCommit(1200, 7, 0, periodic=True)
of_two = partial(member, most=2, slots=2, node="machine")
SAVES = PodSaves("a", "uid-a", "digits", 7, (1220, 1200), 1220, 1234)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        store = MemoryStore(running.engine)
        members = [of_two(name, n) for n, name in enumerate("abcd", 1)]
        run = LIVE.run("digits")
        await store.txn(
            [],
            [
                Put(KEYS.job, Job(JobPolicy(1, 2), generation=3).to_json()),
                *(Put(LIVE.member(m.name), m.to_json()) for m in members),
                Put(LIVE.pod_saves("a"), SAVES.to_json()),
                Put(KEYS.last_commit, LAST.to_json()),
                Put(KEYS.incarnation("a"), Incarnation("a", 1, "uid-a").to_json()),
                Put(LIVE.drain("uid-d"), Drain("uid-d", "d", "spot", "hand").to_json()),
                Put(
                    run.round,
                    Round(7, True, frozen=(Seat("a", "n", 1), Seat("b", "n", 1))).to_json(),
                ),
                Put(run.node("c"), Node("c", "asking", "n", 1, "10.0.0.3", 1, 0).to_json()),
                Put(LIVE.member("bad"), b"\x1b[2Jno json"),
                Put(
                    KEYS.history_entry(1, "a", "join"),
                    HistoryEntry("join", "a", "first \x1b]0;title", 1.5).to_json(),
                ),
            ],
        )
        yield running


def of(server: EmbeddedServer) -> dict[str, str]:
    return {"MUSTER_ETCD_ENDPOINTS": server.endpoint, "MUSTER_JOB": "digits"}


async def test_status_shows_members_and_rounds(server: EmbeddedServer) -> None:
    ended = await muster("status", **of(server))
    assert ended.status == 0
    assert tells_of_the_corrupt_record_once(ended.err)
    first, _, headline, _, *rows = ended.out.splitlines()
    assert first == "digits is training: a world of 2 nodes at step 1,234"
    assert headline == "default/digits, generation 3: 2 listed of min 1 and max 2, 1 on standby"
    assert [row.split()[:2] for row in rows[:4]] == [
        ["a", "training"],
        ["b", "training"],
        ["c", "standby"],
        ["d", "draining"],
    ]
    assert "spot: d is delisted, and no save has begun" in ended.out
    figures = [row.split()[2:6] for row in rows[:3]]
    assert figures == [["0-1", "1,234", "-", "0"], ["2-3", "1,234", "-", "0"], ["-", "-", "-", "0"]]
    wide = await muster("status", "-o", "wide", **of(server))
    assert "digits  7      training  a b            c" in wide.out
    assert (
        "last save: step 1,200 by all ranks (periodic save); 34 steps at risk (at step 1,234)"
    ) in ended.out
    assert "cannot be read" in ended.out
    assert "\x1b" not in ended.out


async def test_status_as_json(server: EmbeddedServer) -> None:
    ended = await muster("status", "--json", **of(server))
    state = json.loads(ended.out)
    assert len(ended.out.splitlines()) == 1
    assert (state["generation"], state["min"], state["max"]) == (3, 1, 2)
    assert [m["state"] for m in state["members"]] == ["listed", "listed", "standby", "draining"]
    assert state["runs"] == [
        {
            "run_id": "digits",
            "round": 7,
            "state": "training",
            "nodes": ["a", "b"],
            "waiting": ["c"],
            "awaited": "",
        }
    ]
    assert list(state["corrupt"]) == [LIVE.member("bad")]
    assert state["last_save"] == {
        "step": 1220,
        "by_all_ranks": False,
        "at_unix_s": None,
        "step_of_all_ranks": 1200,
        "step_of_all_ranks_at_unix_s": None,
        "waits_for": ["b"],
        "periodic": True,
        "tag": None,
        "samples": NO_CURSOR,
        "seen_step": 1234,
        "seen_at_unix_s": None,
        "steps_at_risk": 34,
    }


async def test_wide_status_shows_the_version_of_each_sidecar(server: EmbeddedServer) -> None:
    assert "TOPOLOGY" not in (await muster("status", "--wide", **of(server))).out
    newer = of_two("b", 2, address="10.0.0.2", version="0.2.0", topology="b1/r2")
    await MemoryStore(server.engine).txn([], [Put(LIVE.member("b"), newer.to_json())])
    wide = (await muster("status", "--wide", **of(server))).out.splitlines()[2:]
    place = wide[1].index("VERSION")
    assert "10.0.0.2" in wide[3]
    assert wide[3][wide[1].index("TOPOLOGY") :].split()[0] == "b1/r2"
    assert [row[place:].split()[0] for row in wide[2:6]] == ["-", "0.2.0", "-", "-"]
    assert "VERSION" not in (await muster("status", **of(server))).out
    state = json.loads((await muster("status", "--json", **of(server))).out)
    assert [one["version"] for one in state["members"]] == ["", "0.2.0", "", ""]
    assert [one["topology"] for one in state["members"]] == ["", "b1/r2", "", ""]


async def test_status_names_who_has_the_place_of_an_older_member(server: EmbeddedServer) -> None:
    world = Round(8, True, frozen=(Seat("b", "n", 1), Seat("c", "n", 1)))
    await MemoryStore(server.engine).txn([], [Put(LIVE.run("digits").round, world.to_json())])
    state = json.loads((await muster("status", "--json", **of(server))).out)
    places = {one["name"]: (one["state"], one["why"]) for one in state["members"]}
    assert places["a"][0] == "standby"
    assert "c has its place, as no torchrun asks for one here" in places["a"][1]
    assert places["b"][0] == places["c"][0] == "listed"


async def test_a_quarantined_member_is_shown_and_let_in_by_hand(server: EmbeddedServer) -> None:
    store = MemoryStore(server.engine)
    record = Quarantine("b", "uid-b", 4, "n", out=True)
    await store.txn([], [Put(LIVE.quarantine("b"), record.to_json())])
    state = json.loads((await muster("status", "--json", **of(server))).out)
    (shown,) = (one for one in state["members"] if one["name"] == "b")
    assert shown["state"] == "quarantined"
    assert "its torchrun has died 4 times" in shown["why"]
    ended = await muster("admit", "b", **of(server))
    assert (ended.status, ended.out) == (0, "b may take part again\n")
    assert (await store.range(LIVE.quarantine("b"))).kvs == ()
    assert "let in by hand by" in (await muster("history", **of(server))).out
    again = await muster("admit", "b", **of(server))
    assert again.status == 2
    assert "b is not quarantined" in again.err
    nobody = await muster("admit", "nobody", **of(server))
    assert nobody.status == 2
    assert "its members are a, b, c, d" in nobody.err


async def test_hosts(server: EmbeddedServer) -> None:
    plain = await muster("hosts", **of(server))
    assert [row.split()[1:3] for row in plain.out.splitlines()[2:]] == [["2", "a"], ["2", "b"]]
    hosts = json.loads((await muster("hosts", "--json", **of(server))).out)["hosts"]
    assert [(host["member"], host["slots"], host["address"]) for host in hosts] == [
        ("a", 2, "10.0.0.1"),
        ("b", 2, "10.0.0.1"),
    ]


async def test_history_shows_hostile_text_spelled_out(server: EmbeddedServer) -> None:
    plain = await muster("history", **of(server))
    assert plain.out == "1970-01-01T00:00:01Z  join       a: first \\x1b]0;title\n"
    entry = json.loads((await muster("history", "--json", **of(server))).out)
    assert (entry["what"], entry["member"]) == ("join", "a")


async def test_status_and_history_say_which_clock_is_wrong(server: EmbeddedServer) -> None:
    ahead = HistoryEntry("join", "b", "first", time.time() + 3600).to_json()
    after = HistoryEntry("join", "c", "first", time.time()).to_json()
    keys = KEYS.history_entry(2, "b", "join"), KEYS.history_entry(3, "c", "join")
    store = MemoryStore(server.engine)
    for key, value in zip(keys, (ahead, after), strict=True):
        await store.txn([], [Put(key, value)])
    for command in ("status", "history"):
        ended = await muster(command, **of(server))
        assert (
            "the clock of b on machine is 3,600 s or more ahead of most others"
            in ended.out + ended.err
        )


@pytest.mark.parametrize("command", ["status", "hosts", "history"])
async def test_watch_prints_a_line_for_each_change(server: EmbeddedServer, command: str) -> None:
    store, forged = MemoryStore(server.engine), LIVE.run("digits\n\x1b[31mforged")
    await store.txn([], [Put(forged.round, Round(6).to_json())])
    process = await started((command, "--watch"), of(server))
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        first = await process.stdout.readline()
        assert b"join" in first if command == "history" else b"a" in first
        assert first.decode().rstrip("\n").isprintable()
        if command == "status":
            assert first.startswith(f"{KEYS.job_name} is ".encode())
            assert b"digits\\n\\x1b[31mforged: round 6" in first
        await store.txn([], [Put(KEYS.history_entry(9, "b", "join"), entry("b"))])
        await store.txn([], [Put(KEYS.job, Job(JobPolicy(1, 3), generation=4).to_json())])
        second = await process.stdout.readline()
        assert second not in (b"", first)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert process.stderr is not None
        assert tells_of_the_corrupt_record_once((await process.stderr.read()).decode())


def tells_of_the_corrupt_record_once(text: str) -> bool:
    return text.count(LIVE.member("bad")) == 1 and "\x1b" not in text


def entry(member: str) -> bytes:
    return HistoryEntry("leave", member, "it was stopped", 3.0).to_json()


@pytest.mark.parametrize(("columns", "below"), [(160, False), (80, True)])
async def test_a_terminal_gets_a_table_that_fits_it(
    server: EmbeddedServer, columns: int, below: bool
) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*PATIENT, "status", "--wide"),
        cwd=ROOT,
        env={**os.environ, **of(server), "TERM": "xterm", "COLUMNS": str(columns)},
        stdout=theirs,
    )
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == 0
    os.close(theirs)
    shown = await asyncio.to_thread(read_terminal, ours)
    os.close(ours)
    assert "standby" in shown
    assert ("\nd: spot: d is delisted" in shown.replace("\r", "")) == below
    assert ("WHY" in shown.split("KEY")[0]) != below
    assert max(len(line) for line in unstyled(shown).splitlines()) <= columns
    assert "\x1b[1m" in shown
    assert "\x1b[32mtraining" in shown
    assert ("left out at this width: " in shown) == below
    assert "\x1b[2J" not in shown


def unstyled(shown: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", shown)


def read_terminal(ours: int) -> str:
    """All that was written to a terminal whose other end is closed."""
    shown = b""
    with suppress(OSError):  # how the end is told
        while got := os.read(ours, 65536):
            shown += got
    return shown.decode()


@pytest.mark.parametrize("command", ["status", "hosts", "history", "drain", "pause", "forget"])
@pytest.mark.parametrize(
    ("job", "hint"),
    [
        (["--job", "digit"], "no job digit in namespace default: did you mean digits?"),
        (["--job", "digits", "-n", "team"], "there is one in namespace default: add -n default"),
        (["--job", "xyz"], "no job xyz in namespace default: it has default/digits"),
    ],
)
async def test_an_unknown_job_is_answered_with_the_one_that_was_meant(
    server: EmbeddedServer, command: str, job: list[str], hint: str
) -> None:
    words = [command, "a"] if command == "drain" else [command]
    ended = await muster(*words, *job, "--etcd-endpoints", server.endpoint)
    assert ended.status == 66
    assert hint in ended.err


async def test_the_jobs_of_a_store_are_listed_by_two_commands(server: EmbeddedServer) -> None:
    other = JobKeys("team", "digits0")
    await MemoryStore(server.engine).txn([], [Put(other.job, Job(JobPolicy(3, 4)).to_json())])
    store = {"MUSTER_ETCD_ENDPOINTS": server.endpoint}
    shown = await muster("list", **store)
    assert [row.split()[:4] for row in shown.out.splitlines()] == [
        ["NAMESPACE", "NAME", "PHASE", "NODES"],
        ["default", "digits", "training", "2"],
        ["team", "digits0", "below", "min"],
    ]
    assert (await muster("status", **store)).out == shown.out
    rows = (await muster("status", "-n", "team", "-o", "json", **store)).out.splitlines()
    (row,) = map(json.loads, rows)
    assert (row["namespace"], row["job"], row["state"], row["min"]) == (
        *("team", "digits0", "below min"),
        3,
    )


async def test_one_job_is_shown_with_its_pods(server: EmbeddedServer) -> None:
    store = {"MUSTER_ETCD_ENDPOINTS": server.endpoint}
    shown = (await muster("get", "digits", "-o", "wide", **store)).out
    assert shown.startswith("NAME    PHASE     NODES")
    assert [row.split()[:2] for row in shown.split("POD ")[1].splitlines()[1:5]] == [
        ["a", "training"],
        ["b", "training"],
        ["c", "standby"],
        ["d", "draining"],
    ]
    told = json.loads((await muster("get", "digits", "--json", **store)).out)
    assert (told["job"], told["step"], told["last_save"]["step_of_all_ranks"]) == (
        *("digits", 1234),
        1200,
    )
    assert [one["name"] for one in told["pods"]] == ["a", "b", "c", "d"]
    assert (await muster("get", "x", **store)).status == 66


async def test_a_member_that_was_meant_is_named(server: EmbeddedServer) -> None:
    await MemoryStore(server.engine).txn(
        [], [Put(LIVE.member("pod-3"), of_two("pod-3", 9).to_json())]
    )
    for command in ("drain", "admit"):
        ended = await muster(command, "pod3", **of(server))
        assert ended.status == 2
        assert "has no member pod3: did you mean pod-3? its members are" in ended.err


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("127.0.0.1:{taken}", "port {taken} is taken by another process: choose another"),
        ("192.0.2.1:{taken}", "this machine has no address 192.0.2.1: give one of its own"),
        ("nowhere.invalid:{taken}", "the name nowhere.invalid is not known here"),
    ],
)
async def test_a_store_that_cannot_listen_says_why_and_nothing_else(listen: str, said: str) -> None:
    async with EmbeddedServer() as running:
        taken = running.endpoint.rpartition(":")[2]
        ended = await muster("store", "--listen", listen.format(taken=taken))
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("muster: cannot listen on ")
    assert said.format(taken=taken) in line


async def test_the_doctor_says_that_there_is_no_such_job(server: EmbeddedServer) -> None:
    ended = await muster("doctor", "--job", "nothere", "--etcd-endpoints", server.endpoint)
    assert ended.status == 0
    assert "warning  members     the store has no job nothere in namespace default" in ended.out
    known = await muster("why", "--all", **of(server))
    assert "ok       steps       digits is training: a world of 2 nodes" in known.out
    assert "ok       members     2 pods can train, 1 on standby (min 1, max 2)" in known.out


async def test_the_store_serves_until_it_is_stopped_and_says_what_it_keeps() -> None:
    process = await started(("store", "--listen", "127.0.0.1:0"), {}, CONSOLE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        endpoint = (await process.stdout.readline()).decode().split()[-1].rstrip(".")
        assert b"keeps nothing across a restart" in await process.stdout.readline()
        store = EtcdStore([endpoint])

        async def answers() -> bool:
            try:
                return (await store.status()).version != ""
            except StoreError:
                return False

        await until(answers)
        await store.close()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
