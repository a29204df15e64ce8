# SPDX-License-Identifier: Apache-2.0
"""Events of keys below the job's prefix that nobody of Muster has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdzv.store import Delete, Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS
from tests.simulation.torchrun import RUN

if TYPE_CHECKING:
    from tests.simulation.story import Story

NO_UTF8 = "\udcff"
"""A byte that is no UTF-8, as a store's answer spells it."""

VALUES = (b"", b"x", b"\xff", b"{}", b'{"schema":1}', b"[" * 2_000)


def alien_key(story: Story) -> None:
    """Write one, and take it away again at times."""
    job = story.invariants.snapshot.job
    here = KEYS.in_generation(job.generation if job is not None else 1)
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
    story.say(None, f"somebody writes {key!a}")
    transact(story.job.engine, [], [Put(key, story.random.choice(VALUES))])
    story.invariants.wrote(key)
    if story.random.random() < 0.5:
        seconds = story.random.uniform(0.1, 10.0)
        story.later(seconds, lambda: _take_away(story, key))


def _take_away(story: Story, key: str) -> None:
    story.say(None, f"somebody deletes {key!a}")
    transact(story.job.engine, [], [Delete(key)])
