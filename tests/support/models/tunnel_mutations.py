# SPDX-License-Identifier: Apache-2.0
"""The tunnel with one rule left out at a time; each is found by the scenario beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from agent.tunnel import identity
from launcher_shim.horovod.exec import client
from launcher_shim.horovod.exec.client import RemoteCommand, UnknownEnd
from launcher_shim.horovod.exec.command import WorkerCommand
from launcher_shim.horovod.exec.session import CommandSession, Worker
from launcher_shim.rundir.exec_frames import GONE, Attaching, Frame, Stream
from rdzv.records.job import Member
from rdzv.snapshot import Snapshot

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Mutation:
    """What is left out, and the scenario that finds it."""

    rule: str
    scenario: str
    plant: Callable[[], Patch]


def _any_pin(snapshot: Snapshot, generation: int | None, pin: str) -> Member:
    identity._same_generation(snapshot, generation)
    return next(one for one in snapshot.members.values() if one.role == "launcher")


def _any_member_calls(snapshot: Snapshot, generation: int | None, pin: str) -> Member:
    launchers = {name: replace(one, role="launcher") for name, one in snapshot.members.items()}
    return _calling(replace(snapshot, members=launchers), generation, pin)


def _present_by(*parts: str) -> Callable[[Snapshot, int | None, Member], bool]:
    """Presence that looks at these parts of a peer alone."""

    def is_present(snapshot: Snapshot, generation: int | None, peer: Member) -> bool:
        job, there = snapshot.job, snapshot.members.get(peer.name)
        if "generation" in parts and (job is None or job.generation != generation):
            return False
        if there is None:
            return "member" not in parts
        fields = [part for part in parts if part in ("pod_uid", "pin")]
        return all(getattr(there, part) == getattr(peer, part) for part in fields)

    return is_present


def _by_name(snapshot: Snapshot, generation: int | None, host: str) -> Member:
    identity._same_generation(snapshot, generation)
    for one in snapshot.members.values():
        if one.name == host.partition(".")[0]:
            return one
    raise identity.NoPeer("no such name")


def _hear_twice(stream: Stream, frame: Frame) -> Frame | None:
    counting = _receive(stream, frame)
    return frame if counting is None and frame.number else counting


def _skip(stream: Stream, frame: Frame) -> Frame | None:
    """A frame that is missing is not missed."""
    stream.received = max(stream.received, frame.number - 1)
    return _receive(stream, frame)


def _ended_well(remote: RemoteCommand, frame: Frame) -> int | None:
    return 0 if frame.kind == GONE else _hear(remote, frame)


def _gave_up(remote: RemoteCommand) -> int:
    try:
        return _run(remote)
    except UnknownEnd:
        return 0


def _status_of(worker: Worker) -> int:
    """A worker that got SIGTERM has the status that it ended with, 0 too."""
    worker.terminating = False
    return _finish(worker)


def _attach_again(session: CommandSession, writer: Any, attaching: Attaching) -> None:
    _attach(session, writer, attaching._replace(attempt=session._attempt + 1))


_calling, _receive, _finish = identity.calling_peers, Stream.receive, Worker.finish
_hear, _run, _attach = RemoteCommand._hear, RemoteCommand.run, CommandSession.attach
_slots = itertools.count()

MUTATIONS = (
    Mutation(
        "the caller's pin",
        "who_is_admitted",
        lambda: patch.object(identity, "calling_peers", _any_pin),
    ),
    Mutation(
        "only a launcher calls",
        "who_is_admitted",
        lambda: patch.object(identity, "calling_peers", _any_member_calls),
    ),
    Mutation(
        "the generation of a handshake",
        "who_is_admitted",
        lambda: patch.object(identity, "_same_generation", lambda snapshot, generation: None),
    ),
    Mutation(
        "the incarnation in a host's name",
        "who_is_admitted",
        lambda: patch.object(identity, "called_peer", _by_name),
    ),
    *(
        Mutation(
            f"{left_out} of a peer that is connected",
            "who_is_admitted",
            partial(patch.object, identity, "is_present", _present_by(*kept)),
        )
        for left_out, kept in (
            ("the generation", ("member", "pod_uid", "pin")),
            ("the presence", ("generation", "pod_uid", "pin")),
            ("the pod", ("generation", "member", "pin")),
            ("the pin", ("generation", "member", "pod_uid")),
        )
    ),
    Mutation(
        "what comes twice is passed over",
        "frames_come_once_and_in_order",
        lambda: patch.object(Stream, "receive", _hear_twice),
    ),
    Mutation(
        "what was lost is sent again",
        "frames_come_once_and_in_order",
        lambda: patch.object(Stream, "resume", lambda stream, number: []),
    ),
    Mutation(
        "what is missing is missed",
        "what_is_unknown_is_255",
        lambda: patch.object(Stream, "receive", _skip),
    ),
    Mutation(
        "one command for each slot",
        "one_command_for_each_slot",
        lambda: patch.object(WorkerCommand, "local_rank", property(lambda _: next(_slots))),
    ),
    Mutation(
        "no false 0 of a worker that was told to end",
        "one_command_for_each_slot",
        lambda: patch.object(Worker, "finish", _status_of),
    ),
    Mutation(
        "a later connection alone takes the place",
        "a_late_connection_takes_no_place",
        lambda: patch.object(CommandSession, "attach", _attach_again),
    ),
    Mutation(
        "a host that is gone is no success",
        "what_is_unknown_is_255",
        lambda: patch.object(RemoteCommand, "_hear", _ended_well),
    ),
    Mutation(
        "a way that is gone is no success",
        "what_is_unknown_is_255",
        lambda: patch.object(RemoteCommand, "run", _gave_up),
    ),
    Mutation(
        "a status is a number from 0 to 255",
        "what_is_unknown_is_255",
        lambda: patch.object(client, "read_status", lambda body: int(body) & 255),
    ),
)
