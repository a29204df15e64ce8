# SPDX-License-Identifier: Apache-2.0
"""A process between a rank and its torchrun is gone only where the kernel says so."""

from __future__ import annotations

import errno
import os

import pytest

from muster import process
from muster.process import Lineage


@pytest.mark.parametrize(
    ("number", "broken"),
    [
        (errno.ENOENT, True),
        (errno.ESRCH, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.EACCES, False),
    ],
)
def test_a_process_that_cannot_be_looked_at_is_still_there(
    monkeypatch: pytest.MonkeyPatch, number: int, broken: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    own = Lineage({})
    own._above = [(os.getpid(), os.getppid())]
    assert not own.broken
    monkeypatch.setattr(process, "open", refuse, raising=False)
    assert own.broken == broken
