# SPDX-License-Identifier: Apache-2.0
"""Stages: torchruns that one container runs one after the other, with the same run id.

In ``sh -c "torchrun a.py && torchrun b.py"`` the second asks for a run that the first has closed by
success. So each stage is a run of its own here, named after torch's run id and its number. The
number is one more than the torchruns of the same container that have ended well before: a container
that is started again begins at the first stage. It may pass over a stage that has ended well in
other pods, too.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Self

from launcher_shim.rundir import layout
from launcher_shim.tcpstore.round_keys import ROUND_KEY
from launcher_shim.tcpstore.wire import CONTAINER_BYTES, SESSION_BYTES
from rdzv.errors import WireError
from rdzv.records.codec import dump_record, load_record, take

WORKERS_MAX = 1024
"""The most workers of one pod, as of its sidecar's slots; a larger number is no number of these."""

STATE_KEY_PREFIX = b"/torch.rendezvous."
"""The start of the key of a rendezvous state, which torch first sets to its sentinel."""


def state_key(run_id: str) -> bytes:
    """Return the key of the rendezvous state of ``run_id``."""
    return STATE_KEY_PREFIX + run_id.encode()


def run_id_of(key: bytes, prefix: bytes = STATE_KEY_PREFIX) -> str:
    """Read the run id behind ``prefix``; raises ``WireError`` if it cannot be a name."""
    try:
        run_id = key.removeprefix(prefix).decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the run id in {key[:64]!r} is not UTF-8: give another one") from error
    if not run_id:
        raise WireError("the run id is empty: give --rdzv-id a name")
    return run_id


def round_prefix(run_id: str, number: int) -> bytes:
    """Return the prefix of the keys of one round."""
    return f"/torch.rendezvous.{run_id}.{number}/".encode()


def round_key(key: bytes, run_id: str) -> tuple[int, bytes] | None:
    """Split a key that torch made for one round of ``run_id`` into round and name; else None."""
    match = ROUND_KEY.fullmatch(key)
    if match is None or match["run"] != run_id.encode():
        return None
    return int(match["round"]), match["name"]


def role_info_key(run_id: str, number: int, group_rank: int) -> bytes:
    """Return the key of the number of workers that a node of a round starts."""
    return round_prefix(run_id, number) + f"torchelastic/role_info/{group_rank}".encode()


def local_world_size(role_info: bytes | None) -> int:
    """Read how many workers a node starts; 0 if it does not tell."""
    try:
        size = json.loads(role_info or b"{}")["local_world_size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return size if type(size) is int and 0 < size <= WORKERS_MAX else 0


def round_of_exit_barrier(key: bytes) -> int | None:
    """Return the round at whose end agents ADD to ``key``; None for any other key."""
    match = ROUND_KEY.fullmatch(key) if is_exit_barrier(key) else None
    return None if match is None else int(match["round"])


def is_exit_barrier(key: bytes) -> bool:
    """Return whether an ADD on ``key`` reports that an agent's workers are done."""
    return b"/torchelastic/agent/terminal_state/" in key


SHARED_RUN = "~"
"""Run of clients without a rendezvous, such as workers that share the agents' store."""

_STAGE = re.compile(r"(?P<run>.+) \(stage (?P<stage>[2-9]|[1-9]\d{1,8})\)", re.DOTALL)


def stage_name(run_id: str, stage: int) -> str:
    """Name one stage of torch's run ``run_id``; stages are counted from 1."""
    return run_id if stage == 1 else f"{run_id} (stage {stage})"


def split_stage(name: str) -> tuple[str, int]:
    """Split the name of a run into torch's run id and the number of the stage."""
    match = _STAGE.fullmatch(name)
    return (name, 1) if match is None else (match["run"], int(match["stage"]))


def torch_run_id(name: str) -> str:
    """Return the run id by which torch knows the run ``name``."""
    return split_stage(name)[0]


def container_of(nonce: str | None) -> str:
    """Return a client's container, from its connection's name; empty if no relay gives it."""
    if nonce is None or len(nonce) != 2 * SESSION_BYTES:
        return ""
    return nonce[: 2 * CONTAINER_BYTES]


@dataclass
class Stages:
    """The number of stages that the present container has finished, by torch's run id.

    ``passed_by`` is the connection that passed over one last: it may ask again.
    """

    container: str = ""
    finished: dict[str, int] = field(default_factory=dict)
    passed_by: str = ""

    def next(self, container: str, run_id: str) -> str:
        """Name the run that the next torchrun of ``container`` is meant for."""
        same_container = container and container == self.container
        return stage_name(run_id, 1 + (self.finished.get(run_id, 0) if same_container else 0))

    def finish(self, container: str, name: str) -> bool:
        """Record that a torchrun of ``container`` has ended well; return whether that is new."""
        if not container:
            return False
        if container != self.container:
            self.container, self.finished, self.passed_by = container, {}, ""
        run_id, stage = split_stage(name)
        if self.finished.get(run_id, 0) >= stage:
            return False
        self.finished[run_id] = stage
        return True

    def to_json(self) -> bytes:
        """Encode for the run directory."""
        return dump_record(asdict(self))

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """Decode; raises ``RecordError``."""
        fields = load_record(layout.STAGES, content)
        finished = take(layout.STAGES, fields, "finished", dict)
        return cls(
            take(layout.STAGES, fields, "container", str),
            {run_id: take(layout.STAGES, finished, run_id, int) for run_id in finished},
            take(layout.STAGES, fields, "passed_by", str),
        )
