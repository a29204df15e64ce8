# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""The bytes of every record in the store: sidecars of all versions read them, so they stay."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from launcher_shim.c10d.rounds.records import Node, Round, Seat
from rdzv.peers import Suspicion, Unreached
from rdzv.records.drain import Commit, Drain, LastCommit, Vote
from rdzv.records.job import HistoryEntry, Incarnation, Job, Member
from rdzv.records.policy import JobPolicy
from rdzv.records.progress import PodSaves, StillRank
from rdzv.records.quarantine import Quarantine
from rdzv.records.shards import (
    OpenShards,
    Plan,
    PodShards,
    Saved,
    ShardWorld,
    Share,
    TrainedShards,
)
from rdzv.records.troubles import Bypass, Failure
from rdzv.records.world import WorldChange, WorldReport
from tests.support.records import kv

# fmt: off
RECORDS: list[tuple[Any, bytes]] = [
    (Job(JobPolicy(1, 2)),
     b'{"schema":1,"min":1,"max":2,"generation":1,"uid":"","desired":null,"paused":false,"vacated":false,"former_uids":[],"sizes":[],"unit":1,"gather_s":0.0,"template":"","former_templates":[]}'),
    (Job(JobPolicy(2, 8, (2, 4), 1, 2.5), 3, "u", desired=4, vacated=True, former_uids=("a",), mod_revision=7, paused=True, template="min=2 max=8", former_templates=("min=1 max=8",), unplaced=5, owner="Job"),
     b'{"schema":1,"min":2,"max":8,"generation":3,"uid":"u","desired":4,"paused":true,"vacated":true,"former_uids":["a"],"sizes":[2,4],"unit":1,"gather_s":2.5,"template":"min=2 max=8","former_templates":["min=1 max=8"],"unplaced":5,"owner":"Job"}'),
    (Member("c", "u", 3, "10.0.0.1", "n", "worker", 1, 1, 2),
     b'{"schema":1,"name":"c","pod_uid":"u","incarnation":3,"address":"10.0.0.1","node":"n","role":"worker","slots":1,"min":1,"max":2,"since":0,"index":-1,"version":"","template":"","topology":"","tunnel_port":0,"pin":"","health_port":0}'),
    (Member("c", "u", 3, "10.0.0.1", "n", "launcher", 0, 1, 2, since=8, index=4, version="0.2.0", template="min=1 max=2", topology="b/r", tunnel_port=9401, pin="ab", health_port=9400, lease=5, created_revision=6, mod_revision=7),
     b'{"schema":1,"name":"c","pod_uid":"u","incarnation":3,"address":"10.0.0.1","node":"n","role":"launcher","slots":0,"min":1,"max":2,"since":8,"index":4,"version":"0.2.0","template":"min=1 max=2","topology":"b/r","tunnel_port":9401,"pin":"ab","health_port":9400}'),
    (Incarnation("c", 4, "u"),
     b'{"schema":1,"member":"c","number":4,"pod_uid":"u","since":0}'),
    (Incarnation("c", 4, "u", 2, 7, "why"),
     b'{"schema":1,"member":"c","number":4,"pod_uid":"u","since":2,"dismissed":"why"}'),
    (Unreached(("a", "b")),
     b'{"schema":1,"members":["a","b"]}'),
    (Suspicion("a", "b", 4, "silent", "/key", 5, 6),
     b'{"schema":1,"member":"b","incarnation":4,"sign":"silent"}'),
    (Drain("u", "m", "r", "s"),
     b'{"schema":1,"pod_uid":"u","member":"m","reason":"r","source":"s","seconds_left":null,"reserve_s":0.0,"requested_by":"","ending":false,"outcome":"","step":null}'),
    (Drain("u", "m", "r", "s", 30.0, 2.5, "ada", outcome="committed", step=9, ending=True, saver="b", preempted=True, at_unix_s=5.12345, cause="slow", mod_revision=7),
     b'{"schema":1,"pod_uid":"u","member":"m","reason":"r","source":"s","seconds_left":30.0,"reserve_s":2.5,"requested_by":"ada","ending":true,"outcome":"committed","step":9,"saver":"b","preempted":true,"at_unix_s":5.123,"cause":"slow"}'),
    (Commit(),
     b'{"schema":1,"epoch":0,"run":"","round":0,"phase":"idle","step":null,"leaving":[],"saved":[],"granted":[],"joins":false,"admitted":false,"refused":false,"failures":0,"took_s":0.0,"reason":""}'),
    (Commit(3, "run", 4, "done", 9, ("a",), ("b",), ("c",), joins=True, admitted=True, refused=True, failures=2, took_s=1.23456, reason="r", missed=1, mute=("d",), mod_revision=7),
     b'{"schema":1,"epoch":3,"run":"run","round":4,"phase":"done","step":9,"leaving":["a"],"saved":["b"],"granted":["c"],"joins":true,"admitted":true,"refused":true,"failures":2,"took_s":1.235,"reason":"r","missed":1,"mute":["d"]}'),
    (Vote(3, 4, "u", None),
     b'{"schema":1,"epoch":3,"round":4,"pod_uid":"u","vote":"no","acked":null,"failed":"","away":false,"cursor":"","ranks":[],"tag":"","samples":""}'),
    (Vote(3, 4, "u", 8, 9, "", away=True, cursor="{}", ranks=(0, 1), tag="t", samples="kept", mod_revision=7),
     b'{"schema":1,"epoch":3,"round":4,"pod_uid":"u","vote":8,"acked":9,"failed":"","away":true,"cursor":"{}","ranks":[0,1],"tag":"t","samples":"kept"}'),
    (LastCommit(7, 2, 4),
     b'{"schema":1,"step":7,"round":2,"epoch":4,"job_uid":"","forgotten":false,"periodic":false,"at_unix_s":0.0,"cursor":"","run":"","tag":"","samples":""}'),
    (LastCommit(7, 2, 4, "u", forgotten=True, periodic=True, at_unix_s=5.12345, cursor="{}", run="run", tag="t", samples="kept", mod_revision=7),
     b'{"schema":1,"step":7,"round":2,"epoch":4,"job_uid":"u","forgotten":true,"periodic":true,"at_unix_s":5.123,"cursor":"{}","run":"run","tag":"t","samples":"kept"}'),
    (HistoryEntry("join", "c", "because", 5.12345, {"a": 1}, 7),
     b'{"schema":1,"what":"join","member":"c","why":"because","at_unix_s":5.123,"details":{"a":1}}'),
    (PodSaves("c", "u", "run", 2),
     b'{"schema":1,"pod_uid":"u","run":"run","round":2,"steps":[],"newest":null,"step":-1,"at_unix_s":0.0,"cursors":[],"ranks":[],"tag":"","samples":""}'),
    (PodSaves("c", "u", "run", 2, (40, 20), 40, 41, 5.12345, ("{}", ""), (0, 1), "t", 9.87, 8.0, 2.0, "kept", (0.126, 0.5), (StillRank(0, "collective", "all_reduce", "t.py:3", "t.py:9"), StillRank(1, "script")), 6.12345, 7),
     b'{"schema":1,"pod_uid":"u","run":"run","round":2,"steps":[40,20],"newest":40,"step":41,"at_unix_s":5.123,"cursors":["{}",""],"ranks":[0,1],"tag":"t","save_s":9.9,"grace_s":8.0,"reserve_s":2.0,"samples":"kept","waits":[0.13,0.5],"still":[{"rank":0,"doing":"collective","call":"all_reduce","where":"t.py:3","via":"t.py:9"},{"rank":1,"doing":"script","call":"","where":""}],"still_since_unix_s":6.123}'),
    (Quarantine("c", "u", 2, "n"),
     b'{"schema":1,"pod_uid":"u","deaths":2,"died":"n","out":false}'),
    (Quarantine("c", "u", 2, "n", out=True, proven=True, pauses=3, mod_revision=7),
     b'{"schema":1,"pod_uid":"u","deaths":2,"died":"n","out":true,"proven":true,"pauses":3}'),
    (ShardWorld("w", Plan(100, 10, None), 2, 5),
     b'{"schema":1,"name":"w","size":100,"shard_size":10,"seed":null,"ranks":2,"start":5,"run":"","round":0,"former":[]}'),
    (ShardWorld("w", Plan(100, 10, 3), 2, 5, "run", 4, ("v",), 7),
     b'{"schema":1,"name":"w","size":100,"shard_size":10,"seed":3,"ranks":2,"start":5,"run":"run","round":4,"former":["v"]}'),
    (OpenShards(),
     b'{"schema":1,"frontier":0,"again":[]}'),
    (OpenShards(30, ((1, 4), (6, 9)), 7),
     b'{"schema":1,"frontier":30,"again":[[1,4],[6,9]]}'),
    (TrainedShards(),
     b'{"schema":1,"base":0,"places":[],"saves":[],"unknown":0}'),
    (TrainedShards(4, ((0, 10),), (Saved(5, ((10, 20),)),), 3, 7),
     b'{"schema":1,"base":4,"places":[[0,10]],"saves":[[5,[[10,20]]]],"unknown":3}'),
    (PodShards("c", "u"),
     b'{"schema":1,"pod_uid":"u","shares":{},"over":false}'),
    (PodShards("c", "u", {0: Share(((1, 2),), ((3, 4),), (Saved(5, ((10, 20),)),))}, over=True, mod_revision=7),
     b'{"schema":1,"pod_uid":"u","shares":{"0":[[[1,2]],[[3,4]],[[5,[[10,20]]]]]},"over":true}'),
    (Failure("c", "run", 3),
     b'{"schema":1,"run":"run","round":3,"rank":-1,"kind":"","text":"","where":"","count":1,"at_unix_s":0.0}'),
    (Failure("c", "run", 3, 1, "KeyError", "text", "t.py:3", follows=True, count=2, at_unix_s=5.12345, mod_revision=7),
     b'{"schema":1,"run":"run","round":3,"rank":1,"kind":"KeyError","text":"text","where":"t.py:3","count":2,"at_unix_s":5.123,"follows":true}'),
    (Bypass("absent", "it is not there"),
     b'{"schema":1,"kind":"absent","sentence":"it is not there"}'),
    (Bypass("slots", "two", 2),
     b'{"schema":1,"kind":"slots","sentence":"two","slots":2}'),
    (WorldChange(),
     b'{"schema":1,"epoch":0,"phase":"idle","round":0,"number":0,"step":null,"seats":[],"sizes":[],"source":"","holder":0,"attempts":0,"reason":""}'),
    (WorldChange(3, "form", 2, 5, 9, ("a",), (2,), "a", 1, 4, "r", 7),
     b'{"schema":1,"epoch":3,"phase":"form","round":2,"number":5,"step":9,"seats":["a"],"sizes":[2],"source":"a","holder":1,"attempts":4,"reason":"r"}'),
    (WorldReport("c"),
     b'{"schema":1,"ranks":0,"seat":"","torch":"","number":-1,"epoch":0,"step":-1}'),
    (WorldReport("c", 2, "n/1", "2.5.0", 1, 3, 9, 4, ready=True, vote=8, voted=5, held=6, formed=10, broken=11, failed=12, why="w", over=True, plain=True, mod_revision=7),
     b'{"schema":1,"ranks":2,"seat":"n/1","torch":"2.5.0","number":1,"epoch":3,"step":9,"holder":4,"ready":true,"vote":8,"voted":5,"held":6,"formed":10,"broken":11,"failed":12,"why":"w","over":true,"plain":true}'),
    (Node("c", "asking", "n", 1, "10.0.0.1", 7, 0, flavour="f", mod_revision=7),
     b'{"schema":1,"state":"asking","nonce":"n","ask":1,"addr":"10.0.0.1","pid":7,"local_id":0,"flavour":"f"}'),
    (Node("c", "in", "n", 1, "10.0.0.1", 7, 0, 3, finished=True, silent=True, own=True),
     b'{"schema":1,"state":"in","nonce":"n","ask":1,"addr":"10.0.0.1","pid":7,"local_id":0,"round":3,"finished":true,"silent":true,"own":true}'),
    (Node("c", "left", "n", 1, "10.0.0.1", 7, 0, left_reason="exit"),
     b'{"schema":1,"state":"left","nonce":"n","ask":1,"addr":"10.0.0.1","pid":7,"local_id":0,"left_reason":"exit"}'),
    (Round(),
     b'{"schema":1,"complete":false,"closed":"","finishing":false,"frozen":[],"round":0}'),
    (Round(4, True, "success", True, (Seat("a", "n", 1),), 7, ("b",), True, 8, "ends", "steps", 1.5, 2, 3, 5, (Seat("b", "m", 2),)),
     b'{"schema":1,"complete":true,"closed":"success","finishing":true,"frozen":[["a","n",1]],"former":["b"],"restored":true,"restored_at":8,"ends":"ends","progress":"steps","start_s":1.5,"failed_starts":2,"waits":3,"world":5,"began":[["b","m",2]],"round":4}'),
]
# fmt: on


ROUNDED = [
    ("at_unix_s", 5.12345, 5.123),
    ("still_since_unix_s", 6.12345, 6.123),
    ("took_s", 1.23456, 1.235),
    ("save_s", 9.87, 9.9),
    ("waits", (0.126, 0.5), (0.13, 0.5)),
]
"""What of these records is written with fewer digits, and so read."""
FLAGS = [
    (record, field.name)
    for record, _ in RECORDS
    for field in fields(record)
    if getattr(record, field.name) is True
]


def read(record: Any) -> Any:
    """Read a record from the store: what is found, and what is to be."""
    name = getattr(record, "pod_uid" if isinstance(record, Drain) else "member", "c")
    key = f"/muster/v1/x/{record.by if isinstance(record, Suspicion) else name}"
    of_key = {"mod_revision": 7, "created_revision": 7, "lease": 0, "key": key}
    told = {field: value for field, value in of_key.items() if hasattr(record, field)}
    told |= {field: short for field, value, short in ROUNDED if getattr(record, field, 0) == value}
    return type(record).from_kv(kv(key, 7, record.to_json())), replace(record, **told)


@pytest.mark.parametrize(("record", "stored"), RECORDS)
def test_a_record_has_the_bytes_that_every_version_reads(record: Any, stored: bytes) -> None:
    assert record.to_json() == stored
    found, told = read(record)
    assert found == told
    assert found.to_json() == stored


@pytest.mark.parametrize(("record", "flag"), FLAGS)
def test_a_flag_of_a_record_is_read_as_itself(record: Any, flag: str) -> None:
    found, told = read(replace(record, **{flag: False}))
    assert found == told
