# SPDX-License-Identifier: Apache-2.0
"""The versions of etcd that are fit for a job, and the defects of the others.

From etcd's change logs, and from what was measured on 3.4.23, 3.5.1 and 3.6.16.
"""

from __future__ import annotations

import re
from typing import Literal

from rdzv.dataclass import dataclass

Version = tuple[int, int, int]

FLOOR = "3.5.23 or 3.6.5"

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of etcd and, for each release line, the first release without it.

    Lines older than any named have it in all releases, newer ones in none. ``fatal``: a job can be
    harmed by it whatever it does.
    """

    what: str
    fixed_in: tuple[Version, ...]
    fatal: bool = True
    since: Version = (3, 0, 0)

    def has(self, version: Version) -> bool:
        """Return whether ``version`` has the defect."""
        if version < self.since:
            return False
        line = [fixed for fixed in self.fixed_in if fixed[:2] == version[:2]]
        return version < line[0] if line else version[:2] < min(self.fixed_in)[:2]


EARLY_PROGRESS = Defect(
    "it reports the progress of a watch ahead of pending events (etcd#15220)",
    ((3, 4, 25), (3, 5, 8)),
)

DEFECTS = (
    Defect("it can lose writes when it is killed", ((3, 5, 3),), since=(3, 5, 0)),
    Defect(
        "a leader that was frozen revokes leases that were renewed meanwhile: healthy members are"
        " lost",
        ((3, 4, 31), (3, 5, 13)),
    ),
    EARLY_PROGRESS,
    Defect("a watch can miss events after a compaction", ((3, 4, 36), (3, 5, 18))),
    Defect(
        "it confirms the renewal of a lease that is gone: a member does not learn that it is lost",
        ((3, 4, 38), (3, 5, 23), (3, 6, 5)),
    ),
    Defect(
        "a watch can show a user keys that the user may not read",
        ((3, 5, 33), (3, 6, 14), (3, 7, 1)),
        fatal=False,
    ),
)

END_OF_LIFE = (3, 5)
"""The oldest release line that is still maintained."""


def parse(text: str) -> Version | None:
    """Parse a version as etcd reports it; return None for what is none."""
    match = _VERSION.match(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def progress_is_certain(text: str) -> bool:
    """Return whether a server of this version reports progress only after the events."""
    version = parse(text)
    return version is not None and not EARLY_PROGRESS.has(version)


def is_embedded(text: str) -> bool:
    """Return whether a version is that of the embedded store."""
    return text.endswith("+memory")


def judge(text: str) -> tuple[Literal["ok", "warning", "fault"], str]:
    """Judge whether a server of this version is fit for a job; return why not, too."""
    version = parse(text)
    if version is None:
        return "warning", f"{text!r} is not a known version of etcd"
    if is_embedded(text):
        return (
            "warning",
            "the embedded store keeps nothing across a restart: use etcd in production",
        )
    defects = [defect for defect in DEFECTS if defect.has(version)]
    fatal = [defect.what for defect in defects if defect.fatal]
    if fatal:
        return "fault", f"etcd {text}: {'; '.join(fatal)}"
    if version[:2] < END_OF_LIFE:
        return "fault", f"etcd {text} is of a release line that is no longer maintained"
    if defects:
        return "warning", f"etcd {text}: {'; '.join(defect.what for defect in defects)}"
    return "ok", f"etcd {text}"
