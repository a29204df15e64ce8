# SPDX-License-Identifier: Apache-2.0
"""The processes of this container, as the kernel shows them."""

from __future__ import annotations

import os
from typing import Dict, List, Set

PART_MAX_BYTES = 4 * 1024 * 1024
"""More than the kernel lets a process start with."""


def parents() -> Dict[int, int]:
    """Return the parent of each process that has not ended."""
    found: Dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has just ended, or hidepid hides it: another user's, so not below us
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def descendants(root: int) -> Set[int]:
    """Return the processes below ``root`` that have not ended."""
    return below(root, parents())


def below(root: int, parent_of: Dict[int, int]) -> Set[int]:
    """Return those of ``parent_of`` that are below ``root``."""
    children: Dict[int, Set[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, set()).add(pid)
    below_root: Set[int] = set()
    unseen = {root}
    while unseen:
        found = children.get(unseen.pop(), set()) - below_root
        below_root |= found
        unseen |= found
    return below_root


def parts(path: str) -> List[str]:
    """Read the texts of a file such as ``/proc/PID/environ``; raises ``OSError``."""
    with open(path, "rb") as file:
        return file.read(PART_MAX_BYTES).decode(errors="replace").rstrip("\0").split("\0")
