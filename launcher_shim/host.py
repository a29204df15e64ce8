# SPDX-License-Identifier: Apache-2.0
"""A pod as a host of a central launcher: its name, which no later pod has."""

from __future__ import annotations

import re
from hashlib import sha256

from rdzv.dataclass import dataclass
from rdzv.records.job import Member

_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Host:
    """One line of the list; ``token`` is the host's name, ``revision`` the record's."""

    token: str
    member: str
    slots: int
    revision: int = 0


def host_of(member: Member) -> Host | None:
    """Return the host of ``member``; None if its name could not go into a shell line."""
    if not _TOKEN.fullmatch(member.name):
        return None
    token = token_of(member.name, member.pod_uid)
    return Host(token, member.name, member.slots, member.mod_revision)


def token_of(member: str, pod_uid: str) -> str:
    """Return the name of a pod to the launcher."""
    return f"{member}.{sha256(pod_uid.encode()).hexdigest()[:8]}"
