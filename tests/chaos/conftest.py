# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the chaos tests."""

from __future__ import annotations

import pytest

from tests.support.store.etcd_cluster import etcd_cluster

__all__ = ["etcd_cluster"]


@pytest.fixture(autouse=True)
def _one_worker_store_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handlers of one process would share a worker store from round to round."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
