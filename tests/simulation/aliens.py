# SPDX-License-Identifier: Apache-2.0
"""Events of keys and records below the job's prefix that nobody of Muster has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.keys import GenerationKeys
from rdzv.records.drain import Drain
from rdzv.records.job import Incarnation
from rdzv.store import Delete, Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS
from tests.simulation.torchrun import RUN
from tests.support.records import member

if TYPE_CHECKING:
    from tests.simulation.story import Story

NO_UTF8 = "\udcff"
"""A byte that is no UTF-8, as a store's answer spells it."""

HALF = "\ud800"
"""Half of a surrogate pair: legal in JSON, and in no UTF-8."""

VALUES = (b"", b"x", b"\xff", b"{}", b'{"schema":1}', b"[" * 2_000)


def alien_key(story: Story) -> None:
    """Write a key of which some cannot be a job's, with a value that is no record."""
    here = _present(story)
    key = story.random.choice(
        (
            here.run(RUN).kv + NO_UTF8,
            here.run(RUN).kv,
            here.run(RUN).nodes,
            here.run(RUN).prefix + "what/is/this",
            here.runs + NO_UTF8 + "/round",
            here.runs + "/round",
            here.runs + "/nodes/a",
            here.runs + "%/kv/%",
            here.members,
            here.members + NO_UTF8,
            here.drains,
            here.drains + NO_UTF8,
            here.votes + "1",
            here.votes + "1/a/b",
            here.bypasses,
            KEYS.generations + "x/members/a",
            KEYS.generations + "/",
            KEYS.incarnations,
            KEYS.incarnations + NO_UTF8,
            KEYS.history + "x",
            KEYS.prefix,
            KEYS.prefix + NO_UTF8,
        )
    )
    _write(story, key, story.random.choice(VALUES))


def untrue_record(story: Story) -> None:
    """Write a record that has every field, and a name in it that is not its key's, or is none."""
    here = _present(story)
    records = {
        here.member("alien-0"): member("alien-0", uid=HALF).to_json(),
        here.member("alien-1"): member("n0").to_json(),
        here.drain("alien-2"): Drain("alien-2", "", "", "operator", 0.0).to_json(),
        here.drain("alien-3"): Drain("uid-n0", "n0", "", "operator", 0.0).to_json(),
        KEYS.incarnation("alien-4"): Incarnation(HALF, 1, HALF).to_json(),
    }
    _write(story, *story.random.choice([*records.items()]))


def _present(story: Story) -> GenerationKeys:
    job = story.invariants.snapshot.job
    return KEYS.in_generation(job.generation if job is not None else 1)


def _write(story: Story, key: str, value: bytes) -> None:
    """Write it, and take it away again at times."""
    story.say(None, f"somebody writes {key!a}")
    transact(story.job.engine, [], [Put(key, value)])
    story.invariants.wrote(key)
    if story.random.random() < 0.5:
        seconds = story.random.uniform(0.1, 10.0)
        story.later(seconds, lambda: _take_away(story, key))


def _take_away(story: Story, key: str) -> None:
    story.say(None, f"somebody deletes {key!a}")
    transact(story.job.engine, [], [Delete(key)])
