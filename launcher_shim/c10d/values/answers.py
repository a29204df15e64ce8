# SPDX-License-Identifier: Apache-2.0
"""A cache of encoded answers by encoded requests, emptied by each change of a cell.

Most reads are of a few keys that seldom change. The same request bytes get the same answer bytes,
without being parsed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher_shim.tcpstore import wire

READS_MAX = 4
"""Maximum number of requests answered together: torch's client sends a Wait and a Get."""
ANSWERS_MAX = 512
ANSWER_MAX = 4096
"""Maximum bytes of a request and its answer together; the whole cache is at most 2 MiB."""

Values = Mapping[bytes, tuple[bytes, int]]


class Answers:
    """The cache of one run. ``by_request`` is read-only, and stays the same object."""

    def __init__(self) -> None:
        self.by_request: dict[bytes, bytes] = {}
        self._over = False

    def keep(self, data: bytes, requests: Sequence[wire.Request], values: Values) -> None:
        """Keep the answers of ``values`` to ``requests``, whose bytes are ``data``, if complete."""
        if self._over or len(requests) > READS_MAX or len(data) > ANSWER_MAX:
            return
        answers = [_answer(request, values) for request in requests]
        whole = b"".join(answer for answer in answers if answer is not None)
        if None in answers or len(data) + len(whole) > ANSWER_MAX:
            return
        if len(self.by_request) >= ANSWERS_MAX:
            self.by_request.clear()
        self.by_request[data] = whole

    def forget(self) -> None:
        """Empty the cache: a cell has changed, or the read floor forbids an answer."""
        self.by_request.clear()

    def end(self) -> None:
        """Keep nothing any more: the generation is over."""
        self._over = True
        self.forget()


def _answer(request: wire.Request, values: Values) -> bytes | None:
    """Return the answer of ``values``; None if they do not have it."""
    if isinstance(request, wire.Get):
        entry = values.get(request.key)
        return None if entry is None else wire.vec(entry[0])
    if isinstance(request, wire.Check | wire.Wait) and all(key in values for key in request.keys):
        return wire.READY if isinstance(request, wire.Check) else wire.STOP_WAITING
    return None
