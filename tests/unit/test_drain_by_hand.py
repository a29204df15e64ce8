# SPDX-License-Identifier: Apache-2.0
"""What ``muster drain`` puts on record beside the drain itself."""

from __future__ import annotations

import os
import pwd

import pytest

from console.job.changing import requester

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")


def test_who_asks_is_a_user_and_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "ada")
    assert requester("host-1") == "ada@host-1"


def test_a_user_without_a_name_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    # As in a container whose user is in no passwd file: that of the sidecar.
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert requester("pod-0") == f"{os.getuid()}@pod-0"
