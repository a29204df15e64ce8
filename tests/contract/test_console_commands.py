# SPDX-License-Identifier: Apache-2.0
"""``muster status``, ``hosts``, ``history``, ``set``, ``pause``, ``store`` as real processes."""

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
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from console.job import status
from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.errors import StoreError, StoreUnavailable
from rdzv.keys import JobKeys
from rdzv.records.codec import dump_record
from rdzv.records.drain import NO_CURSOR, Commit, Drain, LastCommit
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves
from rdzv.records.quarantine import Quarantine
from rdzv.records.shards import OpenShards, Plan, PodShards, ShardWorld, Share, TrainedShards
from rdzv.records.troubles import Bypass, Failure
from rdzv.store import Put
from rdzv.store.access import Access
from rdzv.store.etcd.client import EtcdStore
from rdzv.store.memory.client import MemoryStore
from rdzv.store.memory.server import EmbeddedServer
from tests.support.records import member
from tests.support.sidecars.processes import (
    CONSOLE,
    PATIENCE_S,
    PATIENT,
    ROOT,
    Ended,
    impatient_muster,
    muster,
    started,
    until,
)
from tests.support.store.tcp_proxy import TcpProxy

KEYS = JobKeys("default", "digits")
LIVE = KEYS.in_generation(3)
RUN = LIVE.run("digits")
LAST = LastCommit(1200, 7, 0, periodic=True)
of_two = partial(member, most=2, slots=2, node="machine")
newer = partial(member, version="0.2.0", min_workers=2, most=6)
SAVES = PodSaves("a", "uid-a", "digits", 7, (1220, 1200), 1220, 1234)


class Stored:
    """A job in a store that commands can reach."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.engine = server.engine
        self.store = MemoryStore(server.engine)
        self.at = {"MUSTER_ETCD_ENDPOINTS": server.endpoint}
        self.environ = {**self.at, "MUSTER_JOB": "digits"}

    async def put(self, *puts: Put) -> None:
        await self.store.txn([], puts)

    async def muster(self, *arguments: str) -> Ended:
        return await muster(*arguments, **self.environ)

    async def told(self, *arguments: str) -> Any:
        """The one JSON object that a command prints."""
        (line,) = (await self.muster(*arguments, "--json")).out.splitlines()
        return json.loads(line)

    async def job(self) -> Job:
        return Job.from_kv((await self.store.range(KEYS.job)).kvs[0])

    async def history(self) -> list[HistoryEntry]:
        kvs = (await self.store.range(KEYS.history, prefix=True)).kvs
        return [HistoryEntry.from_kv(kv) for kv in kvs]


def training(number: int, members: str) -> Put:
    world = Round(number, True, frozen=tuple(Seat(name, "n", 1) for name in members))
    return Put(RUN.round, world.to_json())


@pytest.fixture
async def empty() -> AsyncIterator[Stored]:
    async with EmbeddedServer() as server:
        yield Stored(server)


@pytest.fixture
async def stored(empty: Stored) -> Stored:
    """A job of which two pods train, one is on standby, and one drains; a record is broken."""
    first = HistoryEntry("join", "a", "first \x1b]0;title", 1.5)
    await empty.put(
        Put(KEYS.job, Job(JobPolicy(1, 2), generation=3).to_json()),
        *(Put(LIVE.member(name), of_two(name, n).to_json()) for n, name in enumerate("abcd", 1)),
        Put(LIVE.pod_saves("a"), SAVES.to_json()),
        Put(KEYS.last_commit, LAST.to_json()),
        Put(KEYS.incarnation("a"), Incarnation("a", 1, "uid-a").to_json()),
        Put(LIVE.drain("uid-d"), Drain("uid-d", "d", "spot", "hand").to_json()),
        training(7, "ab"),
        Put(RUN.node("c"), Node("c", "asking", "n", 1, "10.0.0.3", 1, 0).to_json()),
        Put(LIVE.member("bad"), b"\x1b[2Jno json"),
        Put(KEYS.history_entry(1, "a", "join"), first.to_json()),
    )
    return empty


@pytest.fixture
async def six(empty: Stored) -> Stored:
    """A job of six members, four of which train."""
    await empty.put(
        Put(KEYS.job, Job(JobPolicy(2, 4), generation=3, template="min=2 max=4").to_json()),
        *(Put(LIVE.member(name), newer(name, n).to_json()) for n, name in enumerate("abcdef", 1)),
        training(7, "abcd"),
    )
    return empty


async def test_status_shows_members_and_rounds(stored: Stored) -> None:
    ended = await stored.muster("status")
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
    wide = await stored.muster("status", "-o", "wide")
    assert "digits  7      training  a b            c" in wide.out
    assert (
        "last save: step 1,200 by all ranks (periodic save); 34 steps at risk (at step 1,234)"
    ) in ended.out
    assert "cannot be read" in ended.out
    assert "\x1b" not in ended.out


async def test_status_as_json(stored: Stored) -> None:
    state = await stored.told("status")
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


async def test_wide_status_shows_the_version_of_each_sidecar(stored: Stored) -> None:
    assert "TOPOLOGY" not in (await stored.muster("status", "--wide")).out
    other = of_two("b", 2, address="10.0.0.2", version="0.2.0", topology="b1/r2")
    await stored.put(Put(LIVE.member("b"), other.to_json()))
    wide = (await stored.muster("status", "--wide")).out.splitlines()[2:]
    place = wide[1].index("VERSION")
    assert "10.0.0.2" in wide[3]
    assert wide[3][wide[1].index("TOPOLOGY") :].split()[0] == "b1/r2"
    assert [row[place:].split()[0] for row in wide[2:6]] == ["-", "0.2.0", "-", "-"]
    assert "VERSION" not in (await stored.muster("status")).out
    state = await stored.told("status")
    assert [one["version"] for one in state["members"]] == ["", "0.2.0", "", ""]
    assert [one["topology"] for one in state["members"]] == ["", "b1/r2", "", ""]


async def test_status_names_who_has_the_place_of_an_older_member(stored: Stored) -> None:
    await stored.put(training(8, "bc"))
    state = await stored.told("status")
    places = {one["name"]: (one["state"], one["why"]) for one in state["members"]}
    assert places["a"][0] == "standby"
    assert "c has its place, as no torchrun asks for one here" in places["a"][1]
    assert places["b"][0] == places["c"][0] == "listed"


FORGED = dump_record({"kind": "elsewhere", "sentence": "it was given \x1b[2J:1"})


async def test_what_is_said_of_a_launcher_stands_beside_its_member(empty: Stored) -> None:
    await empty.put(
        Put(KEYS.job, Job(JobPolicy(1, 4), generation=3).to_json()),
        *(Put(LIVE.member(n), member(n, i).to_json()) for i, n in enumerate("abc", 1)),
        Put(LIVE.drain("uid-c"), Drain("uid-c", "c", "spot", "hand").to_json()),
        Put(LIVE.bypass("b"), FORGED),
        Put(LIVE.bypass("c"), Bypass("nnodes", "its torchrun has 1:2", 8).to_json()),
        Put(LIVE.bypass("a"), b"no record"),
        Put(LIVE.bypass("gone"), FORGED),
    )
    plain, state = await empty.muster("status"), await empty.told("status")
    rows = {row.split()[0]: row for row in plain.out.splitlines() if row.strip()}
    assert rows["b"].split()[1] == "ready"
    assert rows["b"].rstrip().endswith("it was given ?[2J:1")
    assert "spot" in rows["c"]
    assert rows["c"].rstrip().endswith("; its torchrun has 1:2")
    assert "torchrun" not in rows["a"]
    assert "\x1b" not in plain.out
    assert [m["launcher"] for m in state["members"]] == ["", "elsewhere", "nnodes"]
    assert [m["slots"] for m in state["members"]] == [1, 1, 8]
    assert state["store_authenticated"] is False
    assert "authentication" not in plain.out


async def test_a_dead_first_endpoint_hides_no_warning(stored: Stored) -> None:
    endpoint = stored.at["MUSTER_ETCD_ENDPOINTS"]
    async with TcpProxy(endpoint) as dead:
        dead.hold()
        both = {"MUSTER_ETCD_ENDPOINTS": f"{dead.endpoint},{endpoint}", "MUSTER_JOB": "digits"}
        ended = await muster("status", "--json", **both)
    assert json.loads(ended.out)["store_authenticated"] is False


async def test_what_is_not_known_of_the_store_is_said(
    empty: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(access: Access, *, timeout_s: float) -> bool:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(status, "auth_enabled", silent)
    state = status.StoreState()
    await state.ask(Access((empty.at["MUSTER_ETCD_ENDPOINTS"],)))
    assert state.enabled is None
    (warning,) = state.warnings()
    assert "is unknown: no answer" in warning.title


async def test_data_sets_in_shards_are_a_table_with_what_is_wrong_below(empty: Stored) -> None:
    images, texts, lost = (KEYS.shards_of(name) for name in ("images", "texts", "lost"))
    world = ShardWorld("w1", Plan(10, 2, None), ranks=2, start=0).to_json()
    share = Share(held=((2, 4),), used=((4, 5),))
    await empty.put(
        Put(KEYS.job, Job(JobPolicy(1, 4)).to_json()),
        *(Put(one.world, world) for one in (images, texts)),
        Put(images.open, OpenShards(frontier=6).to_json()),
        Put(images.pod("a"), PodShards("a", "uid-a", {0: share}).to_json()),
        Put(texts.trained, TrainedShards(unknown=40).to_json()),
        Put(lost.world, b"no record"),
    )
    plain, state = await empty.muster("status"), await empty.told("status")
    rows = [row.split() for row in plain.out.splitlines()]
    assert ["SHARDS", "OF", "EPOCH", "OPEN", "LEASED", "TRAINED", "DONE"] in rows
    assert ["images", "0", "2.0", "1.0", "0.5", "1.5"] in rows
    assert ["texts", "0", "5.0", "0.0", "0.0", "0.0"] in rows
    assert "shards of texts: nothing was on record" in plain.out
    assert lost.world in plain.out
    assert state["shards"]["images"] == {
        "progress": {"epoch": 0, "open": 2.0, "leased": 1.0, "trained": 0.5, "done": 1.5},
        "warning": "",
    }
    assert state["shards"]["lost"]["progress"] is None


def the_one_thing(doctor: Ended) -> str:
    last = doctor.out.splitlines()[-1]
    assert last.startswith("do first: ")
    return last


async def test_a_store_that_is_away_says_what_it_means_and_what_to_check() -> None:
    words = ("--job", "digits", "--etcd-endpoints", "127.0.0.1:1")
    status, doctor = [await impatient_muster(verb, *words) for verb in ("status", "doctor")]
    assert (status.status, doctor.status) == (69, 69)
    assert "worlds that train go on; no pod joins or leaves until it answers" in status.err
    assert doctor.out.startswith("fault    endpoint    127.0.0.1:1 does not answer")
    assert "see that this member of the store runs and can be reached" in the_one_thing(doctor)


async def test_a_store_that_is_full_says_how_to_make_room(stored: Stored) -> None:
    stored.engine.full = True
    status, doctor = [await stored.muster(verb) for verb in ("status", "doctor")]
    assert status.status == 0
    assert status.out.startswith("digits is training: a world of 2 nodes at step")
    assert "the store takes no writes (NOSPACE): worlds that have formed train on" in status.out
    for command in ("etcdctl compact", "etcdctl defrag", "etcdctl alarm disarm"):
        assert command in status.out
    assert doctor.status == 1
    assert "NOSPACE" in doctor.out.splitlines()[0]
    assert "etcdctl alarm disarm" in the_one_thing(doctor)


async def test_a_quarantined_member_is_shown_and_let_in_by_hand(stored: Stored) -> None:
    record = Quarantine("b", "uid-b", 4, "n", out=True)
    await stored.put(Put(LIVE.quarantine("b"), record.to_json()))
    state = await stored.told("status")
    (shown,) = (one for one in state["members"] if one["name"] == "b")
    assert shown["state"] == "quarantined"
    assert "its torchrun has died 4 times" in shown["why"]
    ended = await stored.muster("admit", "b")
    assert (ended.status, ended.out) == (0, "b may take part again\n")
    assert (await stored.store.range(LIVE.quarantine("b"))).kvs == ()
    assert "let in by hand by" in (await stored.muster("history")).out
    again = await stored.muster("admit", "b")
    assert again.status == 2
    assert "b is not quarantined" in again.err
    nobody = await stored.muster("admit", "nobody")
    assert nobody.status == 2
    assert "its members are a, b, c, d" in nobody.err


async def test_hosts(stored: Stored) -> None:
    other = of_two("b", 2, address="10.0.0.2")
    await stored.put(Put(LIVE.member("b"), other.to_json()))
    plain = await stored.muster("hosts")
    assert [row.split()[1:3] for row in plain.out.splitlines()[2:]] == [["2", "a"], ["2", "b"]]
    hosts = (await stored.told("hosts"))["hosts"]
    assert [(host["member"], host["slots"], host["address"]) for host in hosts] == [
        ("a", 2, "10.0.0.1"),
        ("b", 2, "10.0.0.2"),
    ]


async def test_history_shows_hostile_text_spelled_out(stored: Stored) -> None:
    plain = await stored.muster("history")
    assert plain.out == "1970-01-01T00:00:01Z  join       a: first \\x1b]0;title\n"
    first = await stored.told("history")
    assert (first["what"], first["member"]) == ("join", "a")


async def test_status_and_history_say_which_clock_is_wrong(stored: Stored) -> None:
    for revision, name, ahead_s in ((2, "b", 3600), (3, "c", 0)):
        joined = HistoryEntry("join", name, "first", time.time() + ahead_s)
        await stored.put(Put(KEYS.history_entry(revision, name, "join"), joined.to_json()))
    for command in ("status", "history"):
        ended = await stored.muster(command)
        assert (
            "the clock of b on machine is 3,600 s or more ahead of most others"
            in ended.out + ended.err
        )


@pytest.mark.parametrize("command", ["status", "hosts", "history"])
async def test_watch_prints_a_line_for_each_change(stored: Stored, command: str) -> None:
    await stored.put(Put(LIVE.run("digits\n\x1b[31mforged").round, Round(6).to_json()))
    process = await started((command, "--watch"), stored.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        first = await process.stdout.readline()
        assert b"join" in first if command == "history" else b"a" in first
        assert first.decode().rstrip("\n").isprintable()
        if command == "status":
            assert first.startswith(f"{KEYS.job_name} is ".encode())
            assert b"digits\\n\\x1b[31mforged: round 6" in first
        left = HistoryEntry("leave", "b", "it was stopped", 3.0)
        await stored.put(Put(KEYS.history_entry(9, "b", "join"), left.to_json()))
        await stored.put(Put(KEYS.job, Job(JobPolicy(1, 3), generation=4).to_json()))
        second = await process.stdout.readline()
        assert second not in (b"", first)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert process.stderr is not None
        assert tells_of_the_corrupt_record_once((await process.stderr.read()).decode())


def tells_of_the_corrupt_record_once(text: str) -> bool:
    return text.count(LIVE.member("bad")) == 1 and "\x1b" not in text


@pytest.mark.parametrize(("columns", "below"), [(160, False), (80, True)])
async def test_a_table_fits_its_terminal(stored: Stored, columns: int, below: bool) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(*PATIENT, "status", "--wide"),
        cwd=ROOT,
        env={**os.environ, **stored.environ, "TERM": "xterm", "COLUMNS": str(columns)},
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


@pytest.mark.parametrize(
    "command",
    ["status", "hosts", "history", "drain a", "pause", "resume", "forget", "set --max 2"],
)
async def test_of_an_unknown_job_the_meant_one_is_named(stored: Stored, command: str) -> None:
    ended = await stored.muster(*command.split(), "--job", "digit")
    assert ended.status == 66
    assert "no job digit in namespace default: did you mean digits?" in ended.err


async def test_the_jobs_of_a_store_are_listed_by_two_commands(stored: Stored) -> None:
    other = JobKeys("team", "digits0")
    await stored.put(Put(other.job, Job(JobPolicy(3, 4)).to_json()))
    shown = await muster("list", **stored.at)
    assert [row.split()[:4] for row in shown.out.splitlines()] == [
        ["NAMESPACE", "NAME", "PHASE", "NODES"],
        ["default", "digits", "training", "2"],
        ["team", "digits0", "below", "min"],
    ]
    assert (await muster("status", **stored.at)).out == shown.out
    rows = (await muster("status", "-n", "team", "-o", "json", **stored.at)).out.splitlines()
    (row,) = map(json.loads, rows)
    assert (row["namespace"], row["job"], row["state"], row["min"]) == (
        *("team", "digits0", "below min"),
        3,
    )


async def test_one_job_is_shown_with_its_pods(stored: Stored) -> None:
    shown = (await stored.muster("get", "digits", "-o", "wide")).out
    assert shown.startswith("NAME    PHASE     NODES")
    assert [row.split()[:2] for row in shown.split("POD ")[1].splitlines()[1:5]] == [
        ["a", "training"],
        ["b", "training"],
        ["c", "standby"],
        ["d", "draining"],
    ]
    told = await stored.told("get", "digits")
    assert (told["job"], told["step"], told["last_save"]["step_of_all_ranks"]) == (
        *("digits", 1234),
        1200,
    )
    assert [one["name"] for one in told["pods"]] == ["a", "b", "c", "d"]
    assert (await stored.muster("get", "x")).status == 66


async def test_a_member_that_was_meant_is_named(stored: Stored) -> None:
    await stored.put(Put(LIVE.member("pod-3"), of_two("pod-3", 9).to_json()))
    for command in ("drain", "admit"):
        ended = await stored.muster(command, "pod3")
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


async def test_set_says_what_was_what_is_and_what_follows(six: Stored) -> None:
    grown = await six.muster("set", "--max", "6", "--gather", "30s")
    assert grown.out.splitlines() == [
        "job digits: max is 6 (before: 4), gather is 30s (before: 0s)",
        "2 of 6 members no longer stand by, and may join",
    ]
    told = await six.told("set", "digits", "--sizes", "2,4")
    assert (told["before"]["sizes"], told["now"]["sizes"], told["changed"]) == ([], [2, 4], True)
    assert told["follows"] == (
        "2 of 6 members will stand by: they save with all others and leave the world"
    )
    job = await six.job()
    assert (job.policy.max_nodes, job.policy.sizes, job.template) == (6, (2, 4), "min=2 max=4")
    who, again = await six.history()
    assert who.what == again.what == "set"
    assert "@" in who.member
    assert who.why == "max is 6 (before: 4), gather is 30s (before: 0s)"


async def test_set_to_what_is_changes_nothing(six: Stored) -> None:
    ended = await six.muster("set", "--max", "4")
    assert (ended.status, ended.out) == (
        0,
        "job digits: it has these values already, nothing changes\n",
    )
    assert await six.history() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--min", "5"], "the job stays as it is: min is 5, more than max, which is 4"),
        (["--unit", "5"], "no multiple of 5 lies between min 2 and max 4"),
        (["--sizes", "5,6"], "none of the sizes 5, 6 lies between min 2 and max 4"),
        (["--sizes", "2", "--unit", "2"], "--sizes and --unit are both given"),
        (["--desired", "9"], "desired is 9, not between min 2 and max 4"),
        (["--max", "none"], "--max: 'none' is wrong: expected a whole number"),
        ([], "nothing to set: give --min"),
    ],
)
async def test_limits_that_cannot_be_are_refused(six: Stored, given: list[str], said: str) -> None:
    before = await six.job()
    ended = await six.muster("set", *given)
    assert ended.status == 2
    assert said in ended.err
    assert await six.job() == before


async def test_a_sidecar_that_would_not_understand_keeps_the_job_as_it_is(six: Stored) -> None:
    await six.put(Put(LIVE.member("a"), member("a").to_json()))
    for command in (["set", "--max", "6"], ["pause"]):
        ended = await six.muster(*command)
        assert ended.status == 2
        assert "the sidecar of a is of 0.1.0" in ended.err
    assert (await six.job()).policy.max_nodes == 4
    assert not (await six.job()).paused


async def test_a_pause_that_waits_for_an_older_sidecar_to_go_says_so(six: Stored) -> None:
    await six.muster("pause", "--reason", "night")
    await six.put(Put(LIVE.member("a"), member("a").to_json()))
    status = (await six.muster("status")).out
    assert ": paused, once no sidecar of 0.1.0 is there, since " in status


async def test_a_pause_of_a_horovodrun_has_its_ranks_save(six: Stored) -> None:
    launcher = newer("launcher", 9, role="launcher")
    await six.put(Put(LIVE.member("launcher"), launcher.to_json()))
    process = await started(("pause", "--wait", "--reason", "night"), six.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert (await process.stdout.readline()).startswith(b"pausing")
        assert (await six.job()).paused
        (kv,) = (await six.store.range(LIVE.drain(launcher.pod_uid))).kvs
        drain = Drain.from_kv(kv)
        assert (drain.source, drain.seconds_left) == ("pause", None)
        assert drain.reason == "the job pauses: night"
        for changed, line in (
            (replace(drain, saver="a"), b"saving     a rank of a saves"),
            (replace(drain, saver="a", step=40, outcome="committed"), b"paused     step 40 is"),
        ):
            await six.put(Put(LIVE.drain(launcher.pod_uid), changed.to_json()))
            assert (await process.stdout.readline()).startswith(line)
        assert await process.wait() == 0
    assert (await six.muster("resume")).out.startswith("job digits is resumed")
    assert not (await six.job()).paused
    assert not (await six.store.range(LIVE.drain(launcher.pod_uid))).kvs


def commit(**changes: object) -> Put:
    record = Commit(epoch=1, run="digits", round=7, phase="hold", joins=True)
    return Put(LIVE.commit, replace(record, **changes).to_json())  # type: ignore[arg-type]


@pytest.mark.parametrize(("saved", "status"), [(True, 0), (False, 6)])
async def test_pause_waits_for_saves_and_leaves(six: Stored, *, saved: bool, status: int) -> None:
    process = await started(("pause", "--wait", "--reason", "night"), six.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert (await process.stdout.readline()).startswith(b"pausing    4 members train")
        assert (await six.job()).paused
        await six.put(commit())
        assert (await process.stdout.readline()).startswith(b"agreeing")
        if saved:
            await six.put(commit(phase="commit", step=40))
            assert b"at step 40" in await process.stdout.readline()
            await six.put(commit(phase="done", step=40))
            assert b"saved step 40" in await process.stdout.readline()
        await six.put(Put(RUN.round, Round(8).to_json()))
        last = await process.stdout.readline()
        assert last.startswith(b"paused     no world" if saved else b"unsaved    the world ended")
        assert await process.wait() == status
    shown = await six.muster("status")
    assert "paused since " in shown.out
    assert ": night; " in shown.out
    resumed = await six.muster("resume")
    assert resumed.out == "job digits is resumed: 6 members are there\n"
    assert not (await six.job()).paused
    assert [entry.what for entry in await six.history()] == ["pause", "resume"]
    again = await six.muster("resume")
    assert again.out == "job digits is not paused: nothing changes\n"


async def test_resume_lets_a_job_try_at_once_that_waits_after_failed_starts(six: Stored) -> None:
    waits = Round(8, former=tuple("abcd"), failed_starts=5, waits=2)
    asking = [Node(name, "asking", "n", 9, "10.0.0.1", 1, 0) for name in "abcd"]
    failed = [Failure(name, "digits", 7, kind="ImportError") for name in "abcd"]
    puts = [
        *(Put(RUN.node(one.member), one.to_json()) for one in asking),
        *(Put(LIVE.failure(one.member), one.to_json()) for one in failed),
    ]
    await six.put(Put(RUN.round, waits.to_json()), *puts)
    before = await six.job()
    assert "waits 80 s before round 8" in (await six.muster("status")).out
    tried = await six.muster("resume")
    assert tried.out == "job digits tries again at once: 6 members are there\n"
    after = await six.job()
    assert after == replace(before, mod_revision=after.mod_revision)
    assert after.mod_revision > before.mod_revision
    assert "waits 80 s" not in (await six.muster("status")).out
    assert (await six.muster("resume")).out.endswith("is not paused: nothing changes\n")


async def test_a_wait_ends_when_somebody_resumes_the_job(six: Stored) -> None:
    process = await started(("pause", "--wait", "--json"), six.environ)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        await process.stdout.readline()
        await six.muster("resume")
        assert json.loads(await process.stdout.readline())["outcome"] == "resumed"
        assert await process.wait() == 4
