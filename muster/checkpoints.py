# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a job: the folders of a ``Training``, and rank 0's choice, the same for all ranks.

A folder is named by the save tag of its world and by the step, so that no two worlds write one.
Rank 0 writes ``muster.json`` into it once all ranks have written their parts: a folder that has it
is whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import torch.distributed as dist

from muster.process import RankIdentity
from muster.resuming import TAG, is_left_behind, last_commit
from muster.saved_steps import CommittedStep
from muster.torch_parts import TorchParts

log = logging.getLogger(__name__)

SEAL = "muster.json"

_NAME = re.compile(r"(%s)-(\d{8,})" % TAG.pattern)

WAIT_S = 300.0
"""Timeout of a rank that waits for rank 0's choice, or of rank 0 for one that has not asked."""

SAY_S = 20.0
"""Time after which a rank that waits logs what it waits for."""

POLL_S = 0.02
"""Interval at which rank 0 looks who has asked."""

_FAILED = "\0"
"""Prefix of an error in place of a choice; no path has it."""


class SavedPlace(NamedTuple):
    """The step of a checkpoint, and the cursor of the data where training goes on from it."""

    step: int
    cursor: Any


class Checkpoints:
    """The checkpoints in ``directory``, of which the newest ``keep`` are kept."""

    def __init__(self, directory: str, keep: int, state: TorchParts) -> None:
        self.directory = directory
        self._keep = keep
        self._state = state

    def newest(self, committed: Optional[CommittedStep]) -> Optional[str]:
        """Return the newest whole checkpoint; None without one. It may be later than a commit.

        One of a world that was cut off from the store is passed over.
        """
        names = set(self._names())
        if committed is not None:
            names.add(_name(committed, committed.tag))  # by name: a listing may be out of date
        best, path = -1, None
        for name in sorted(names):
            found = _NAME.fullmatch(name)
            where = os.path.join(self.directory, name)
            if found is None or not os.path.exists(os.path.join(where, SEAL)):
                continue
            step = int(found.group(2))
            if is_left_behind(step, found.group(1), committed):
                log.warning("%s is of a world that was cut off: passed over", where)
            elif step >= best:
                best, path = step, where
        return path

    def place_of(self, path: str) -> SavedPlace:
        """Read the place that the checkpoint at ``path`` is of."""
        with open(os.path.join(path, SEAL), encoding="utf-8") as file:
            sealed = json.load(file)
        if sealed["kind"] != self._state.kind:
            raise ValueError(
                "%s is a checkpoint of %s, and this training is one of %s: give it another"
                " directory" % (path, sealed["kind"], self._state.kind)
            )
        return SavedPlace(sealed["step"], sealed["cursor"])

    def save(self, place: SavedPlace, tag: str) -> None:
        """Save a checkpoint; every rank calls it. Then remove those that are not to be kept."""
        state = self._state
        path = os.path.join(self.directory, _name(place.step, tag))
        seal = os.path.join(path, SEAL)
        if state.is_rank_0:
            if os.path.exists(path):  # of an attempt at this very step that came to nothing
                _remove(path)
            os.makedirs(path)
        state.barrier()
        state.save(path)
        state.barrier()
        if not state.is_rank_0:
            return
        with open(seal + ".part", "w", encoding="utf-8") as file:
            json.dump({**place._asdict(), "kind": state.kind}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(seal + ".part", seal)
        self._remove_older(os.path.basename(path))

    def _remove_older(self, own: str) -> None:
        """Remove older checkpoints: tags sort as worlds form, so those of a later world stay."""
        names = [name for name in self._names() if name <= own]
        whole = [name for name in names if self._is_whole(name)]
        kept = set(whole[-self._keep :])
        committed = last_commit()
        if committed is not None:
            kept.add(_name(committed, committed.tag))
        for name in names:
            if name not in kept:
                try:
                    _remove(os.path.join(self.directory, name))
                except OSError as error:
                    log.warning("cannot remove the old checkpoint %s: %s", name, error)

    def _is_whole(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.directory, name, SEAL))

    def _names(self) -> List[str]:
        if not os.path.isdir(self.directory):
            return []
        return sorted(name for name in os.listdir(self.directory) if _NAME.fullmatch(name))


def _remove(path: str) -> None:
    """Remove a checkpoint, its seal first: one that a kill leaves half removed is not whole."""
    seal = os.path.join(path, SEAL)
    if os.path.exists(seal):
        os.unlink(seal)
    shutil.rmtree(path)


def _name(step: int, tag: str) -> str:
    return "%s-%08d" % (tag, step)


_calls = 0
_kept: List[object] = []
"""Keeps the store open until the process ends: rank 0 serves it, and torch uses it afterwards."""


def of_rank_0(look: Callable[[], Optional[str]]) -> Optional[str]:
    """Return the result of ``look`` at rank 0. Every rank must call this, equally often.

    If there is no rank 0 to ask (one rank alone, or not started by torchrun) this rank looks
    itself. An error of ``look`` is raised at every rank. Raises ``RuntimeError`` if rank 0 has not
    answered within ``WAIT_S``.
    """
    global _calls
    own = RankIdentity(os.environ)
    if not own.of_torchrun or own.world_size == 1 or not dist.is_available():
        return look()
    _calls += 1
    # torchrun sets this if its agent serves the store already.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return choose(look, own, _calls, served=served)


def choose(
    look: Callable[[], Optional[str]], own: RankIdentity, call: int, *, served: bool
) -> Optional[str]:
    """Return rank 0's choice at its ``call``-th call; ``served``: by an agent, to all worlds.

    Rank 0 writes it to the store at ``MASTER_ADDR:MASTER_PORT``, where torch's ranks are about
    to meet or have met: a trainer loads before it has made a process group, and a store needs
    no device. Its count of restarts differs between the nodes of one world: a node whose worker
    failed has one more than the others, and a new pod has none. Under Muster, rank 0 serves the
    store: it is as new as the world, and so is all that is in it. Where torchrun's agent serves
    it, a choice may be of an earlier world: there each rank asks under a name that it makes up,
    and rank 0 answers all who ask until every rank of its own world has taken the answer.
    """
    if own.rank == 0:
        try:
            choice = look()
        except Exception as error:
            # The others would wait for an answer, and then fail with a timeout.
            _answer(own, call, "%s%s: %s" % (_FAILED, type(error).__name__, error), served)
            raise
        _answer(own, call, choice or "", served)
        return choice
    began_s = time.monotonic()
    try:
        with _said("rank 0 has not said yet which checkpoint it loads: waiting for it"):
            store = _store(own, served)
            key = _key(call)
            if served:
                key = "%s/%s" % (key, uuid.uuid4().hex)
                store.set(_key(call, own.rank), key)
            answer = store.get(key).decode("utf-8")
            if served:
                name, _, answer = answer.partition(" ")
                store.set("%s/%s" % (key, name), "taken")
    except RuntimeError as error:
        raise RuntimeError(
            "rank 0 did not choose a checkpoint, and this rank waited %.0f s: every rank must call"
            " last_checkpoint() the same number of times (%s)" % (time.monotonic() - began_s, error)
        ) from error
    if answer.startswith(_FAILED):
        raise RuntimeError("rank 0 cannot choose a checkpoint: " + answer[len(_FAILED) :])
    return answer or None


def _answer(own: RankIdentity, call: int, answer: str, served: bool) -> None:
    """Write the answer where the other ranks read it."""
    store = _store(own, served)
    if not served:
        store.set(_key(call), answer)
        return
    name = uuid.uuid4().hex
    waiting: Dict[int, str] = dict.fromkeys(range(1, own.world_size), "")
    until_s = time.monotonic() + WAIT_S
    with _said("not every rank has asked yet which checkpoint to load: waiting for them"):
        while waiting:
            for rank in list(waiting):
                asked = _key(call, rank)
                key = store.get(asked).decode("utf-8") if store.check([asked]) else ""
                if key != waiting[rank]:  # of an earlier world at first, perhaps
                    store.set(key, "%s %s" % (name, answer))
                    waiting[rank] = key
                elif key and store.check(["%s/%s" % (key, name)]):
                    del waiting[rank]
            if time.monotonic() > until_s:
                raise RuntimeError(
                    "ranks %s have not asked within %g s which checkpoint to load: every rank must"
                    " call last_checkpoint() the same number of times" % (sorted(waiting), WAIT_S)
                )
            time.sleep(POLL_S)


def _key(call: int, rank: int = 0) -> str:
    # Ranks of 0.1.0 put their count of restarts where the 0 is: as a rule it is 0.
    return "muster/choice/0/%d%s" % (call, "/%d" % rank if rank else "")


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Log ``what`` if the block takes ``SAY_S``."""
    timer = threading.Timer(SAY_S, log.warning, ("%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store(own: RankIdentity, served: bool) -> "dist.TCPStore":
    host, _, port = own.master.rpartition(":")
    store = dist.TCPStore(
        host,
        int(port),
        None,
        own.rank == 0 and not served,
        timedelta(seconds=WAIT_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    _kept.append(store)
    return store
