# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of Lightning in a directory, and which one to go on from."""

from __future__ import annotations

import glob
import logging
import os
from typing import Dict, List, Optional

from muster.cursor import CommittedStep
from muster.resuming import shortfall
from muster.tag import TAG
from muster.torch_file import tag_of, whole_step
from muster.world_mark import is_left_behind

log = logging.getLogger(__name__)


def newest(directory: str, committed: Optional[CommittedStep]) -> Optional[str]:
    """Return the checkpoint to go on from; None without one.

    ``committed``: what ``last_commit()`` has returned.
    """
    own = None if committed is None else path_of(directory, committed, committed.tag)
    steps: Dict[str, int] = {}
    for path in glob.glob(os.path.join(glob.escape(directory), "*.ckpt")):
        step = step_of(path)
        if step is not None and is_left_behind(step, tag_of(described(path)), committed):
            log.warning("%s is of a world that was cut off: passed over", path)
        elif step is not None:
            steps[path] = step
        elif path != own:
            log.warning("%s is not whole, or no checkpoint of Lightning's: passed over", path)
    # Found by name, as a listing may be stale; in any format, as all ranks have saved it.
    if committed is not None and own and (os.path.isfile(own) or step_of(own) is not None):
        steps[own] = committed
    # Of two of the same step, prefer the one that was renamed into place.
    ordered = sorted(steps, key=lambda path: (steps[path], path == own, is_own(path)))
    found = ordered[-1] if ordered else None
    missing, _ = shortfall(steps[found] if found else 0, directory)
    if missing:
        log.warning("%s", missing)
    return found


def path_of(directory: str, step: int, tag: str) -> str:
    """Return the path of the callback's own checkpoint."""
    return os.path.join(directory, "muster-%d%s.ckpt" % (step, "-" + tag if tag else ""))


def is_own(path: str) -> bool:
    """Return whether the callback has saved the checkpoint itself."""
    return os.path.basename(path).startswith("muster-")


def not_later(paths: List[str], tag: str) -> List[str]:
    """Leave out what a later world saves: it counts, and this world does not know of it."""
    tags = {path: TAG.search(os.path.basename(path)) for path in paths}
    return [path for path, found in tags.items() if found is None or found.group() <= tag]


def step_of(path: str) -> Optional[int]:
    """Return the step of a whole file, or of a sharded checkpoint's last part; else None."""
    return whole_step(described(path))


def described(path: str) -> str:
    """Return the file that describes a checkpoint: itself, or its last part if it is sharded."""
    return os.path.join(path, "meta.pt") if os.path.isdir(path) else path
