# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.store.etcd_cluster import EtcdCluster, etcd_cluster

__all__ = ["cluster", "etcd_cluster"]


@pytest.fixture(autouse=True)
def _one_worker_store_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handlers of one process would share a worker store from round to round."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def in_seconds(request: pytest.FixtureRequest) -> bool:
    """Whether the bounds in seconds hold, too: in the full proof, for a busy machine has none."""
    return request.node.get_closest_marker("long") is not None


@pytest.fixture
def cluster(etcd_cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    """Three healthy members; healthy again for the next test."""
    yield etcd_cluster
    etcd_cluster.restore()
