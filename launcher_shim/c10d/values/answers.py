# SPDX-License-Identifier: Apache-2.0
"""Whole answers to whole reads, for as long as nothing that they rest on has moved.

Most reads are of a few keys that seldom change. What was answered once from what is known is then
answered again without being parsed: the same bytes get the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher_shim.tcpstore import wire

READS_MAX = 4
"""Requests that are answered together: torch's client sends a Wait and a Get."""
ANSWERS_MAX = 512
ANSWER_MAX = 4096
"""Bytes of what was asked and its answer: all that is kept takes two MiB at most."""

Values = Mapping[bytes, tuple[bytes, int]]


class Answers:
    """Those of one run. ``by_request`` is to be read only; it stays the same object."""

    def __init__(self) -> None:
        self.by_request: dict[bytes, bytes] = {}
        self._over = False

    def keep(self, data: bytes, requests: Sequence[wire.Request], values: Values) -> None:
        """Keep what ``values`` answer to ``requests``, if they do; ``data`` are their bytes."""
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
        """Something has changed, or not all of it may be told any more."""
        self.by_request.clear()

    def end(self) -> None:
        """The life of the job that these are of is over: no answers any more."""
        self._over = True
        self.forget()


def _answer(request: wire.Request, values: Values) -> bytes | None:
    """What known values answer; None where they do not."""
    if isinstance(request, wire.Get):
        entry = values.get(request.key)
        return None if entry is None else wire.vec(entry[0])
    if isinstance(request, wire.Check | wire.Wait) and all(key in values for key in request.keys):
        return wire.READY if isinstance(request, wire.Check) else wire.STOP_WAITING
    return None
