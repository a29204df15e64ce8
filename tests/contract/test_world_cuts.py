# SPDX-License-Identifier: Apache-2.0
"""The connections that are cut are those of the world that is lost."""

from __future__ import annotations

import threading

import pytest

from muster.world.conduct import Order
from muster.world.group import Group


def _order(number: int) -> Order:
    return Order(number=number, size=2, store="127.0.0.1:1")


def test_a_cut_never_hits_the_world_that_forms_next(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, found = threading.Event(), threading.Event()
    cut = []

    def is_lost(number: int, forms: bool) -> bool:
        judged.set()
        return found.wait(30)

    def form(number: int) -> None:
        with group.forming(_order(number), 0):
            """Its connections exist now."""

    group = Group("gloo", None, is_lost)
    monkeypatch.setattr("muster.world.group.dist.TCPStore", lambda *_, **__: None)
    monkeypatch.setattr("muster.world.group.dist.PrefixStore", lambda *_: None)
    monkeypatch.setattr(group, "_init", lambda *_: None)
    monkeypatch.setattr(group, "cut", lambda: cut.append(group._number))
    form(1)
    with group.busy():
        looks = threading.Thread(target=group._judge)
        looks.start()
        assert judged.wait(30)
        next_one = threading.Thread(target=form, args=(2,))
        next_one.start()
        next_one.join(0.2)  # enough for one that does not wait for the look
        found.set()
        looks.join(30)
        next_one.join(30)
    assert cut == [1]
