# SPDX-License-Identifier: Apache-2.0
"""The sidecar's order for its pod's ranks: ``$MUSTER_RUN_DIR/world``, renamed into place.

The file is there from the sidecar's start if worlds may change in place, and only then. Each change
of it has a higher epoch. A rank looks by ``stat`` at each boundary, after it has published its own
state: so no sidecar can agree on a step that the rank has already passed.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Mapping, NamedTuple, Optional, Tuple

log = logging.getLogger(__name__)

WORLD_NAME = "world"

IDLE, TRAIN, HOLD, FORM = "idle", "train", "hold", "form"
BROKEN, FALL_BACK, LEAVE, OVER = "broken", "fall-back", "leave", "over"
PHASES = (IDLE, TRAIN, HOLD, FORM, BROKEN, FALL_BACK, LEAVE, OVER)


class Order(NamedTuple):
    """The content of the file.

    ``number``: the world that the phase is about. ``step``: the boundary at which all stop, or the
    step whose state all have after a form; None while ranks vote. ``first_rank``: that of this
    pod's first local rank. ``source``: the rank in the new world that has the state. ``store`` and
    ``prefix``: the address of a TCPStore, and the part of it that is this world's alone. ``tag``:
    the save tag of the new world; empty for that of the source.
    """

    epoch: int = 0
    phase: str = IDLE
    number: int = -1
    step: Optional[int] = None
    size: int = 0
    first_rank: int = 0
    source: int = 0
    store: str = ""
    prefix: str = ""
    tag: str = ""
    why: str = ""


class OrderFile:
    """The file of one run directory, parsed only when it has changed; for one thread."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, WORLD_NAME)
        self._seen: Optional[Tuple[int, int]] = None
        self._order: Optional[Order] = None
        self._warned = False

    def read(self) -> Optional[Order]:
        """Return the present order; None without one.

        If it cannot be read, the last one stays in force, and a warning is logged once.
        """
        try:
            status = os.stat(self._path)
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                with open(self._path, "rb") as file:
                    self._order = parse(file.read())
                self._seen = seen
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            if not self._warned:
                self._warned = True
                log.warning("cannot read %s, keeping the last order, if any: %s", self._path, error)
        return self._order


def comes_later(environ: Mapping[str, str]) -> bool:
    """Return whether a rank is started beside a world that trains, into which it is to come.

    The other ranks of its launcher's world are in that one: with them it forms none.
    """
    run_dir = environ.get("MUSTER_RUN_DIR", "")
    if not run_dir or "TORCHELASTIC_RUN_ID" not in environ:
        return False
    order = OrderFile(run_dir).read()
    return order is not None and order.number > 0 and order.phase != FALL_BACK


def parse(content: bytes) -> Order:
    """Parse an order; raises ``ValueError``."""
    fields = json.loads(content.decode("utf-8"))
    try:
        if fields["phase"] not in PHASES:
            raise ValueError("no phase of a world: %r" % (fields["phase"],))
        step, number = fields.get("step"), fields.get("number")
        return Order(
            epoch=int(fields["epoch"]),
            phase=fields["phase"],
            step=None if step is None else int(step),
            number=-1 if number is None else int(number),
            size=int(fields.get("size") or 0),
            first_rank=int(fields.get("first_rank") or 0),
            source=int(fields.get("source") or 0),
            store=str(fields.get("store") or ""),
            prefix=str(fields.get("prefix") or ""),
            tag=str(fields.get("tag") or ""),
            why=str(fields.get("why") or ""),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError("a field is missing or of another type: %s" % error) from error
