# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the store's contract."""

from tests.chaos.etcd_cluster import etcd_cluster
from tests.contract.store_backend import _backing, backend, store

__all__ = ["_backing", "backend", "etcd_cluster", "store"]
