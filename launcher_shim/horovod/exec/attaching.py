# SPDX-License-Identifier: Apache-2.0
"""The first frame of each connection of a command: which one it is, and on which host. Pure.

A session is one command; it outlives its connections. Its name is known to those alone whom it
concerns. ``attempt`` counts its connections: a later one takes the place of an earlier one, and an
earlier one that comes late, or again, takes none.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher_shim.horovod.exec.frames import ATTACH, OPENINGS, ExecFrameError, Frame, encode

SESSION_LENGTH = 32
_HEXADECIMAL = frozenset("0123456789abcdef")


class Attaching(NamedTuple):
    """What an ATTACH or ABANDON says.

    ``acknowledged`` is the newest of the launcher's frames that the agent has had, ``received``
    the newest of the agent's that the launcher's side has had.
    """

    host: str
    session: str
    attempt: int = 0
    acknowledged: int = 0
    received: int = 0


def encode_attaching(attaching: Attaching, kind: int = ATTACH) -> bytes:
    """One frame; host and session are plain names."""
    body = '{"host": "%s", "session": "%s", "attempt": %d, "acknowledged": %d}' % attaching[:4]
    return encode(kind, body.encode(), attaching.received)


def read_attaching(frame: Frame) -> Attaching:
    """Read one; raises ``ExecFrameError``."""
    import json  # not by the launcher's side, which is to start fast

    if frame.kind not in OPENINGS:
        raise ExecFrameError("the first frame is of kind %d, and attaches to nothing" % frame.kind)
    try:
        fields = json.loads(frame.body)
        attaching = Attaching(
            fields["host"],
            fields["session"],
            fields["attempt"],
            fields["acknowledged"],
            frame.number,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExecFrameError("the first frame does not say which command it is of") from error
    texts, numbers = attaching[:2], attaching[2:]
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    ):
        raise ExecFrameError("the first frame does not say which command it is of")
    if len(attaching.session) != SESSION_LENGTH or not _HEXADECIMAL.issuperset(attaching.session):
        raise ExecFrameError("the first frame names no session")
    return attaching
