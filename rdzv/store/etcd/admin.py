# SPDX-License-Identifier: Apache-2.0
"""Queries about an etcd cluster: its members, its authentication, its compactions."""

from __future__ import annotations

from random import Random
from typing import Any

from rdzv.errors import StoreRefused
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.endpoint import AUTH_STATUS, RANGE, Method
from rdzv.store.etcd.errors import Outcome
from rdzv.store.etcd.http2_endpoint import endpoints_of
from rdzv.store.etcd.messages import span
from rdzv.store.pb import etcd_pb2 as pb

MEMBER_LIST = Method(
    "/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse
)

_AUTH_REFUSALS = ("permission denied", "user name is empty", "invalid auth token")


async def cluster_members(access: Access, *, timeout_s: float) -> tuple[tuple[int, str], ...]:
    """Read the id and the name of each member.

    Raises ``StoreRefused`` if the store does not say, as the embedded one.
    """
    # As the endpoint that answers has them: this works without a leader, too.
    request = pb.MemberListRequest(linearizable=False)
    response = await _ask(access, MEMBER_LIST, request, timeout_s)
    return tuple((member.ID, member.name) for member in response.members)


async def auth_enabled(access: Access, *, timeout_s: float) -> bool:
    """Return whether the cluster has authentication enabled.

    Only its root user is answered: any other one is refused, which shows it as well. Raises
    ``StoreRefused`` if the server cannot be asked: the embedded one has no authentication, and etcd
    before 3.5 does not say.
    """
    try:
        response = await _ask(access, AUTH_STATUS, pb.AuthStatusRequest(), timeout_s)
    except StoreRefused as error:
        if any(text in str(error) for text in _AUTH_REFUSALS):
            return True
        raise
    return bool(response.enabled)


async def history_compacted(access: Access, keys: JobKeys, *, timeout_s: float) -> bool:
    """Return whether any of the history was compacted.

    Reads one key as of the first revision. A watch from there would show more, and make etcd go
    through its whole history, during which no client can write.
    """
    request = pb.RangeRequest(**span(keys.job, prefix=False), revision=1)
    return await _ask(access, RANGE, request, timeout_s, done=Outcome.COMPACTED) is None


async def _ask(
    access: Access,
    method: Method,
    request: Any,
    timeout_s: float,
    done: Outcome | None = None,
) -> Any:
    endpoints = endpoints_of(access)
    calls = Calls(endpoints, 0, access, Random())
    try:
        _, response = await calls.call(method, request, timeout_s, Effect.READ, done=done)
        return response
    finally:
        await calls.close()
