# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from rdzv.members.losses import lost_members
from rdzv.records.job import Job
from rdzv.snapshot import Snapshot
from tests.support.records import member

A, B = member("a"), member("b", 2)
BOTH = Snapshot(5, Job(1, 4), {"a": A, "b": B})


def test_who_is_gone_without_a_goodbye_is_lost() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset()) == (B,)


def test_who_said_goodbye_is_not() -> None:
    assert lost_members(BOTH, replace(BOTH, members={"a": A}), frozenset({"b"})) == ()


def test_a_new_generation_loses_nobody() -> None:
    assert lost_members(BOTH, Snapshot(6, Job(1, 4, generation=2)), frozenset()) == ()
