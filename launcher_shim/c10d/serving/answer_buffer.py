# SPDX-License-Identifier: Apache-2.0
"""The answers to one client that are not written yet: those of one pass are written together."""

from __future__ import annotations

import asyncio

_FLUSH = 64 * 1024
"""Size in bytes at which answers are written at once, without waiting for the end of the pass."""


class AnswerBuffer:
    """A buffer that writes answers in the order given; none once the client is gone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.write = transport.write
        self._answers: list[bytes] = []
        self._size = 0
        self._lost = False

    def add(self, answer: bytes) -> None:
        """Append ``answer``, to be written with the next flush."""
        self._answers.append(answer)
        self._size += len(answer)
        if self._size > _FLUSH:
            self.flush()

    def send(self, answer: bytes) -> None:
        """Write ``answer`` now, after those before it; do nothing if it is empty."""
        if answer and not self._answers and not self._lost:
            self.write(answer)
        elif answer:
            self._answers.append(answer)
            self.flush()

    def flush(self) -> None:
        """Write all answers."""
        answers = self._answers
        if answers and not self._lost:
            self.write(answers[0] if len(answers) == 1 else b"".join(answers))
        answers.clear()
        self._size = 0

    def lose(self) -> None:
        """Drop answers from now on: the client is gone."""
        self._lost = True
