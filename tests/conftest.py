# SPDX-License-Identifier: Apache-2.0
"""What every test shares: no test blocks the event loop, none sees the caller's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def _no_blocking_call() -> Iterator[None]:
    with blockbuster_ctx():
        yield


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        if name.startswith(("MUSTER_", "PET_")) and not name.startswith("MUSTER_TEST_"):
            monkeypatch.delenv(name)
