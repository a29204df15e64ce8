# SPDX-License-Identifier: Apache-2.0
"""The grammar of ``--event``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.local.settings import ACTIONS, Event, by_world, read_event
from rdzv.errors import ConfigError

nodes = st.integers(0, 9999).map("node-{}".format)
ranks = st.integers(0, 9999).map("rank{}".format)
times_s = st.integers(0, 10**6).map(lambda tenths: tenths / 10)
sizes = st.none() | st.integers(1, 99999)
actions = st.sampled_from(sorted(set(ACTIONS) - {"add"}))
events = st.one_of(
    st.builds(Event, times_s, st.just("add"), st.none() | nodes, sizes),
    st.builds(Event, times_s, actions, nodes | ranks, sizes),
)


@given(events)
def test_what_an_event_says_of_itself_reads_back_as_it(event: Event) -> None:
    target = f":{event.target}" if event.target else ""
    world = f"world{event.world_size}+" if event.world_size else ""
    assert read_event(f"{event.action}{target}@{world}{event.at_s}s") == event


def refusal(text: str) -> str | None:
    try:
        read_event(text)
    except ConfigError as refused:
        return str(refused)
    return None


@given(st.text() | st.from_regex(r"[a-z-]+:?[a-z0-9-]*@[0-9.]*[a-z]?"))
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    sentence = refusal(text)
    if sentence is None:
        assert read_event(text).action in ACTIONS
        assert read_event(text).at_s >= 0
    else:
        assert sentence.startswith("--event ")
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("add@10s", Event(10, "add", None)),
        ("add:node-1@20s", Event(20, "add", "node-1")),
        ("kill:rank0@1.5s", Event(1.5, "kill", "rank0")),
        ("stop:node-12@2m", Event(120, "stop", "node-12")),
        ("add@15", Event(15, "add", None)),
        ("add@1.5h", Event(5400, "add", None)),
        ("add@world2", Event(0, "add", None, 2)),
        ("drain:rank0@world16+1.5m", Event(90, "drain", "rank0", 16)),
    ],
)
def test_events_as_written(text: str, event: Event) -> None:
    assert read_event(text) == event


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("explode:node-0@15s", "no action 'explode'; there are add, drain, kill"),
        ("kill@15s", "say which node, as in kill:node-1@15s"),
        ("kill:15s", "write ACTION:NODE@TIME"),
        ("kill:worker@15s", "no node 'worker'"),
        ("kill:node-01@15s", "no node 'node-01'"),
        ("add:rank0@15s", "a new node has no rank"),
        ("add@15x", "no time '15x'"),
        ("add@-1s", "no time '-1s'"),
        ("add@world0+5s", "no time 'world0"),
        ("add@world2+", "or a time after a world's first step, as world3"),
    ],
)
def test_a_mistake_is_named(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_event(text)


def test_neighbours_of_one_size_wait_for_the_same_world() -> None:
    texts = ("add@world2", "add@world2+9s", "kill:rank0@world3", "stop:node-1@5s", "add@world2")
    groups = by_world(read_event(text) for text in texts)
    assert [[str(event) for event in group] for group in groups] == [
        ["add@world2+0s", "add@world2+9s"],
        ["kill:rank0@world3+0s"],
        ["add@world2+0s"],
    ]


def test_the_rank_that_a_target_names() -> None:
    assert read_event("kill:rank12@1s").target_rank == 12
    assert read_event("kill:node-1@1s").target_rank is None
