# SPDX-License-Identifier: Apache-2.0
"""Stages: torchruns that one container runs one after the other, and what is kept of their worlds.

In ``sh -c "torchrun a.py && torchrun b.py"`` the second asks for a run that the first has closed by
success. So each stage is a run of its own here, named after torch's run id and its number. The
number is one more than the torchruns of the same container that have ended well before: a container
that is started again begins at the first stage. It may pass over a stage that has ended well in
other pods, too. The container's stage and the masters of worlds are kept in files for the sidecar
that comes after this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol, Self, TypeVar

from launcher_shim.c10d.rounds.records import Round
from launcher_shim.rundir import layout
from launcher_shim.tcpstore.requests import ROUND_KEY
from launcher_shim.tcpstore.wire import CONTAINER_BYTES, SESSION_BYTES
from rdzv.errors import RecordError, WireError
from rdzv.reconcile import Loop, Outlook
from rdzv.records.codec import dump_record, load_record, take

WORKERS_MAX = 1024
"""The most workers of one pod, as of its sidecar's slots; a larger number is no number of these."""

STATE_KEY_PREFIX = b"/torch.rendezvous."
"""The start of the key of a rendezvous state, which torch first sets to its sentinel."""


def state_key(run_id: str) -> bytes:
    """Return the key of the rendezvous state of ``run_id``."""
    return STATE_KEY_PREFIX + run_id.encode()


def served_run_of(key: bytes, prefix: bytes = STATE_KEY_PREFIX) -> str:
    """Read the run id behind ``prefix``; raises ``WireError`` if it names no run of a user's."""
    try:
        run_id = key.removeprefix(prefix).decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the run id in {key[:64]!r} is not UTF-8: give another one") from error
    if not run_id:
        raise WireError("the run id is empty: give --rdzv-id a name")
    if run_id == SHARED_RUN or torch_run_id(run_id) != run_id:
        raise WireError(f"the run id {run_id!r} cannot be served: give --rdzv-id another name")
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


_ASSIGNED = b"torchelastic/assigned_ranks/"

COUNTED_APART = -1
"""The answer to an addition in torch's exit barrier: no size of a world, so that no torchrun takes
itself for the last. They are in different rounds, of different sizes."""


def made_up(
    name: bytes, run_id: str, own: int, real: int, value: Callable[[bytes], bytes | None]
) -> bytes | None:
    """Return the value of ``name`` in the round ``own``; None for one that is stored, or not yet.

    ``real``: the round beside which it is. ``value`` looks up a launcher's key.

    Its ranks join a world that changes in place; no other torchrun is in its round. So the
    values by which the nodes of a round meet are made up, as far as torch reads them.
    ``MASTER_ADDR`` and ``MASTER_PORT`` are those of the real round: by them the ranks of one
    world name it alike, and none connects there, as such a world has a store of its own.
    """
    if name in (b"MASTER_ADDR", b"MASTER_PORT"):
        return value(round_prefix(run_id, real) + name)
    if name.startswith(_ASSIGNED) and name.removeprefix(_ASSIGNED).isdigit():
        place = int(name.removeprefix(_ASSIGNED))
        workers = local_world_size(value(role_info_key(run_id, own, place)))
        if workers:
            # As if every node before it, the last one, started as many workers as itself.
            first, size = place * workers, (place + 1) * workers
            return json.dumps([first, size, first, size]).encode()
    return None


log = logging.getLogger(__name__)

T = TypeVar("T")

WORLDS_MAX = 16
"""The number of newest worlds whose masters are kept. More than one: a restored store may show an
older world first."""


class Kept(Protocol):
    """A store of files that live as long as the pod."""

    def content(self, name: str) -> bytes | None:
        """Read a file, or return None if there is none; may block, and raises ``OSError``."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Write a whole file; may block, and raises ``OSError``."""
        ...


class KeptFile:
    """One such file. ``files``: None if no sidecar will come after this one."""

    def __init__(self, files: Kept | None, name: str) -> None:
        self._files = files
        self._name = name
        self._writing = asyncio.Lock()

    async def read(self, decode: Callable[[bytes], T], otherwise: str) -> T | None:
        """Load what the sidecar before has kept; if it is unreadable, log ``otherwise``."""
        if self._files is None:
            return None
        try:
            content = await asyncio.to_thread(self._files.content, self._name)
            return None if content is None else decode(content)
        except (OSError, RecordError) as error:
            log.warning("%s is unreadable (%s): %s", self._name, error, otherwise)
            return None

    async def write(self, content: Callable[[], bytes], otherwise: str) -> bool:
        """Write the file; return whether that succeeded. If it did not, log ``otherwise``."""
        if self._files is None:
            return True
        try:
            async with self._writing:  # one after another: the newest must be written last
                await asyncio.to_thread(self._files.put, self._name, content())
        except OSError as error:
            why = error.strerror
            log.warning("%s cannot be written (%s): %s", self._name, why, otherwise)
            return False
        return True


class KeptStages:
    """The present ``stages``, and their file."""

    def __init__(self, files: Kept | None) -> None:
        self.stages = Stages()
        self._file = KeptFile(files, layout.STAGES)

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        kept = await self._file.read(Stages.from_json, "counting stages from the first again")
        self.stages = kept or self.stages

    async def pass_over(self, nonce: str, name: str) -> bool:
        """Record that a container is through with ``name``; return whether that is on disk.

        If the next sidecar did not know it, the container's next torchrun would be passed over
        instead. It is taken back if the client goes before it has the answer: its torchrun then
        starts, in ``name``.
        """
        before = self.stages
        after = self.stages = replace(before, finished=dict(before.finished))
        after.finish(container_of(nonce), name)
        after.passed_by = nonce
        try:
            # Shielded: the next write has to wait for this one even if this task is cancelled.
            kept = await asyncio.shield(asyncio.ensure_future(self.keep()))
        except asyncio.CancelledError:
            self._take_back(after, before)
            await self.keep()
            raise
        if not kept:
            self._take_back(after, before)
        return kept

    def _take_back(self, after: Stages, before: Stages) -> None:
        if self.stages is after:
            self.stages = before

    async def keep(self) -> bool:
        """Write the stages to disk; return whether that succeeded."""
        return await self._file.write(
            lambda: self.stages.to_json(),
            "were this sidecar started again, the next torchrun would be taken for one of the first"
            " stage",
        )


class KeptMasters(Loop):
    """The master's address of each of the newest worlds, by which its ranks know it.

    A store that was restored to before a world no longer has that address, and no rank stores it
    again. Without it no rank would be known to be of this world: those that wait at a boundary
    would do so until the world is over, and when a pod goes none would save. A world is a round's
    number and its seats: a restored store may use the number again for others.
    """

    def __init__(self, files: Kept | None) -> None:
        super().__init__()
        self._file = KeptFile(files, layout.MASTERS)
        self._masters: dict[str, str] = {}
        """Masters by world, the one noted last at the end."""
        self._noted = False

    async def read(self) -> None:
        """Load what the sidecar before has kept."""
        otherwise = "in a store that has lost this world, its ranks will not be asked to save"
        self._masters = await self._file.read(_masters, otherwise) or {}

    async def step(self) -> Outlook:
        """Write the masters to disk if one has been noted."""
        if self._noted:
            self._noted = False
            await self.keep()
        return Outlook()

    async def keep(self) -> None:
        """Write the masters to disk."""
        await self._file.write(
            lambda: dump_record({"masters": self._masters}),
            "were the store restored to before this world and this sidecar started again, its ranks"
            " would not be asked to save",
        )

    def note(self, run: str, round: Round, master: str) -> None:
        """Note the ``master`` by which the ranks of a complete round know it."""
        world = _world(run, round)
        if self._masters.get(world) == master:
            return
        self._masters.pop(world, None)
        self._masters[world] = master
        while len(self._masters) > WORLDS_MAX:
            del self._masters[next(iter(self._masters))]
        self._noted = True
        self.wake()

    def of(self, run: str, round: Round) -> str:
        """Return the master of exactly this world; empty if it is not known."""
        return self._masters.get(_world(run, round), "")


def _masters(content: bytes) -> dict[str, str]:
    kept = take(layout.MASTERS, load_record(layout.MASTERS, content), "masters", dict)
    return {world: take(layout.MASTERS, kept, world, str) for world in kept}


def _world(run: str, round: Round) -> str:
    """Name a world in a few bytes, however many seats it has."""
    seats = "".join(f"{tuple(seat)}\n" for seat in round.frozen)
    return hashlib.sha256(f"{run}\n{round.number}\n{seats}".encode()).hexdigest()[:32]
