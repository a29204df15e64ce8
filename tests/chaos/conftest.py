# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the chaos tests."""

from __future__ import annotations

from tests.support.store.etcd_cluster import etcd_cluster

__all__ = ["etcd_cluster"]
