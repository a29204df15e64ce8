# SPDX-License-Identifier: Apache-2.0
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.keys import ROOT, JobKeys, job_of, last_name
from rdzv.mirror import spelled, spelled_of_any_job

NAMES = st.text(min_size=1, max_size=20)


@given(NAMES, NAMES, NAMES, NAMES)
def test_no_name_reaches_out_of_its_place(ns: str, job: str, member: str, run: str) -> None:
    keys = JobKeys(ns, job)
    generation = keys.in_generation(3)
    node = generation.run(run).node(member)
    assert node.startswith(generation.prefix)
    assert node.count("/") == JobKeys("a", "b").in_generation(3).run("c").node("d").count("/")
    assert last_name(node) == member
    assert generation.run_id_of(node) == run


@given(st.binary(max_size=40), NAMES)
def test_a_launchers_key_comes_back_as_it_was(key: bytes, adder: str) -> None:
    run = JobKeys("ns", "job").in_generation(1).run("r")
    assert run.split(run.value(key)) == ("kv", key, "")
    assert run.split(run.addend(key, adder)) == ("sum", key, adder)
    assert run.split(run.element(key, adder)) == ("queue", key, adder)


def test_the_layout_is_the_documented_one() -> None:
    keys = JobKeys("team", "digits")
    generation = keys.in_generation(2)
    assert keys.job == "/muster/v1/team/digits/job"
    assert keys.incarnation("w-0") == "/muster/v1/team/digits/incarnations/w-0"
    assert keys.last_commit == "/muster/v1/team/digits/last_commit"
    assert generation.commit == "/muster/v1/team/digits/g/2/commit"
    assert generation.vote(7, "w-0") == "/muster/v1/team/digits/g/2/commit/7/w-0"
    assert not generation.commit.startswith(generation.votes)
    assert generation.member("w-0") == "/muster/v1/team/digits/g/2/members/w-0"
    assert generation.run("r").round == "/muster/v1/team/digits/g/2/c10d/r/round"
    assert generation.run("r").node("w-0") == "/muster/v1/team/digits/g/2/c10d/r/nodes/w-0"


@given(NAMES, st.binary(max_size=8))
def test_a_round_is_told_from_whatever_launchers_call_one(run_id: str, key: bytes) -> None:
    life = JobKeys("ns", "job").in_generation(2)
    run = life.run(run_id)
    assert life.run_of_round(run.round) == run_id
    others = [run.value(name) for name in (b"round", b"a/round", key)]
    others += [run.node("round"), run.addend(b"round", "round"), run.prefix, f"{life.runs}round"]
    others += [f"{life.runs}/round", f"{life.runs}%72un/round", f"{life.runs}%FF/round"]
    others += [life.job.in_generation(1).run(run_id).round, life.member("round")]
    assert [life.run_of_round(other) for other in others] == [None] * len(others)


@given(st.binary(max_size=40), NAMES)
def test_every_key_of_the_layout_is_taken_for_one(key: bytes, name: str) -> None:
    keys = JobKeys(name, name)
    life = keys.in_generation(3)
    run = life.run(name)
    for spelling in (
        keys.job,
        keys.last_commit,
        keys.incarnation(name),
        keys.history_entry(7, name, name),
        keys.probe(name),
        life.member(name),
        life.drain(name),
        life.commit,
        life.vote(7, name),
        life.pod_saves(name),
        life.bypass(name),
        life.failure(name),
        run.round,
        run.node(name),
        run.value(key),
        run.addend(key, name),
        run.element(key, name),
        run.operation(name),
    ):
        assert spelled(spelling[len(keys.prefix) :]), spelling


@given(st.text(st.sampled_from("%0123456789ABCDEFacefgpz~-_.+"), min_size=1, max_size=12))
def test_a_name_has_one_spelling(name: str) -> None:
    assert spelled(f"incarnations/{name}") == (quote(unquote_to_bytes(name), safe="") == name)


@pytest.mark.parametrize("key", [b"/a b%\xff", b"", b"/" * 2000, b"/n\xc3\xa4" * 60])
def test_a_launchers_key_is_found_in_its_spelling_however_long(key: bytes) -> None:
    run = JobKeys("team", "digits").in_generation(1).run("r")
    for _ in range(2):
        assert run.split(run.value(key)) == ("kv", key, "")
        assert run.split(run.addend(key, "a:1")) == ("sum", key, "a:1")


@pytest.mark.parametrize("key", ["/muster/v1/\udc80/x/job", "/muster/v1/a/\udc80/job"])
def test_a_key_of_a_name_that_is_no_utf_8_is_no_jobs(key: str) -> None:
    assert job_of(key) is None
    assert not spelled_of_any_job(key.removeprefix(ROOT))
