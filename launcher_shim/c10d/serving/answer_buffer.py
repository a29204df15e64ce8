# SPDX-License-Identifier: Apache-2.0
"""The answers to one client that are not written yet: those of one pass are written together."""

from __future__ import annotations

import asyncio


class AnswerBuffer:
    """A buffer that writes answers in the order given; none once the client is gone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.write = transport.write
        self._answers: list[bytes] = []
        self.add = self._answers.append  # the list's own: it is called for every request
        """Append an answer, to be written with the next flush."""
        self._lost = False

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

    def lose(self) -> None:
        """Drop answers from now on: the client is gone."""
        self._lost = True
