# SPDX-License-Identifier: Apache-2.0
"""What etcd thinks of a connection that nobody uses: members that were left have many of them."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from rdzv.store.etcd import grpc_endpoint
from rdzv.store.etcd.client import EtcdStore
from tests.support.store.etcd_cluster import EtcdCluster

pytestmark = pytest.mark.etcd

PERIOD = ("grpc.keepalive_time_ms", 1000)
IDLE_S = 6.0
"""For five pings of that period: etcd ends a connection with the third that it forbids."""


async def test_a_connection_that_nobody_uses_is_not_ended_for_its_pings(
    etcd_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*(one for one in grpc_endpoint.CHANNEL_OPTIONS if one[0] != PERIOD[0]), PERIOD)
    monkeypatch.setattr(grpc_endpoint, "CHANNEL_OPTIONS", options)
    store = EtcdStore(etcd_cluster.endpoints)
    await store.range("/idle")
    endpoint = store._calls.rotation.current
    assert isinstance(endpoint, grpc_endpoint.GrpcEndpoint)
    channel = endpoint._channel
    assert channel is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(IDLE_S):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    await store.close()
