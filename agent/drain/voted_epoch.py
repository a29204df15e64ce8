# SPDX-License-Identifier: Apache-2.0
"""The newest epoch that this pod has voted in: kept on disk before the vote is sent."""

from __future__ import annotations

import asyncio
import logging

from agent.rundir.files import RunDir
from launcher_shim.rundir import layout
from rdzv.errors import RecordError
from rdzv.records.codec import dump_record, load_record, take

log = logging.getLogger(__name__)


class VotedEpoch:
    """The newest epoch that this pod has voted in; ``epoch`` is 0 before the first vote.

    The gate writer writes it, and decisions read it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.epoch = 0
        self._run_dir = run_dir

    def restore(self, assumed: int) -> None:
        """Read the note from disk; take ``assumed`` instead if it is unreadable.

        May block for as long as the disk does.
        """
        try:
            note = self._run_dir.content(layout.COMMIT)
            self.epoch = 0 if note is None else _epoch_in(note)
        except (OSError, RecordError) as error:
            # The pod may have voted: then only the store may open the gate.
            self.epoch = assumed
            log.warning(
                "assuming that this pod has voted, its own note is unreadable: %s",
                error,
                extra={"event": "note_unreadable"},
            )

    async def note(self, epoch: int) -> None:
        """Write ``epoch`` to disk, then adopt it; raise ``OSError`` if that fails."""
        await asyncio.to_thread(self._run_dir.put, layout.COMMIT, dump_record({"sent": epoch}))
        self.epoch = epoch


def _epoch_in(note: bytes) -> int:
    return take(layout.COMMIT, load_record(layout.COMMIT, note), "sent", int)
