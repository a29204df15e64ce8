# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a ``Training``: folders, each with the place in the data that it is of.

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
from typing import Any, List, NamedTuple, Optional

from muster.cursor import CommittedStep
from muster.resuming import last_commit
from muster.tag import TAG
from muster.torch_parts import TorchParts
from muster.world_mark import is_left_behind

log = logging.getLogger(__name__)

SEAL = "muster.json"

_NAME = re.compile(r"(%s)-(\d{8,})" % TAG.pattern)


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
