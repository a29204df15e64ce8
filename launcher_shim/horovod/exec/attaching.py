# SPDX-License-Identifier: Apache-2.0
"""The first frame of each connection of a command: its session, and its host. Pure.

A session is one command; it outlives its connections. Its name is known only to the processes that
take part in it. ``attempt`` counts its connections: a later one replaces an earlier one, and an
earlier one that comes late, or again, is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher_shim.horovod.exec.frames import ATTACH, OPENINGS, ExecFrameError, Frame, encode

SESSION_LENGTH = 32
_HEXADECIMAL = frozenset("0123456789abcdef")


class Attaching(NamedTuple):
    """The content of an ATTACH or ABANDON.

    ``acknowledged`` is the number of the newest of the launcher's frames that the agent has
    acknowledged, ``received`` that of the newest of the agent's frames that the launcher's side has
    received.
    """

    host: str
    session: str
    attempt: int = 0
    acknowledged: int = 0
    received: int = 0


def encode_attaching(attaching: Attaching, kind: int = ATTACH) -> bytes:
    """Encode the first frame; host and session must be plain names."""
    body = '{"host": "%s", "session": "%s", "attempt": %d, "acknowledged": %d}' % attaching[:4]
    return encode(kind, body.encode(), attaching.received)


def read_attaching(frame: Frame) -> Attaching:
    """Decode the first frame; raises ``ExecFrameError``."""
    import json  # not at the top: the launcher's side has to start fast

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
