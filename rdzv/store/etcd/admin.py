# SPDX-License-Identifier: Apache-2.0
"""Asks an etcd cluster for its members, and whether authentication is enabled."""

from __future__ import annotations

from random import Random
from typing import Any

from rdzv.errors import StoreRefused
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.certificates import CertificateFiles
from rdzv.store.etcd.endpoint import AUTH_STATUS, RANGE, EtcdEndpoint, Method
from rdzv.store.etcd.errors import Outcome
from rdzv.store.etcd.messages import span
from rdzv.store.pb import etcd_pb2 as pb

MEMBER_LIST = Method(
    "/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse
)

_AUTH_REFUSALS = ("permission denied", "user name is empty", "invalid auth token")


async def cluster_members(access: Access, *, timeout_s: float) -> tuple[tuple[int, str], ...]:
    """Ask for the id and the name of each member.

    Raises ``StoreRefused`` where the store does not tell us, as the embedded one does.
    """
    # As the endpoint that answers knows them: this works without a leader, too.
    request = pb.MemberListRequest(linearizable=False)
    response = await _ask(access, MEMBER_LIST, request, timeout_s)
    return tuple((member.ID, member.name) for member in response.members)


async def auth_enabled(access: Access, *, timeout_s: float) -> bool:
    """Whether the cluster has authentication switched on.

    Only its root user is told so: everybody else is refused, which tells it as well. Raises
    ``StoreRefused`` where the server cannot be asked: the embedded one has no authentication, and
    etcd before 3.5 does not tell.
    """
    try:
        response = await _ask(access, AUTH_STATUS, pb.AuthStatusRequest(), timeout_s)
    except StoreRefused as error:
        if any(text in str(error) for text in _AUTH_REFUSALS):
            return True
        raise
    return bool(response.enabled)


async def history_compacted(access: Access, keys: JobKeys, *, timeout_s: float) -> bool:
    """Whether any of the history was compacted.

    One key is read as of the first revision. To watch from there would tell more, and make etcd
    go through its whole history while nobody may write.
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
    files = CertificateFiles(access) if access.tls else None
    endpoints = [EtcdEndpoint(target, files) for target in access.targets]
    calls = Calls(endpoints, 0, access, Random())
    try:
        _, response = await calls.call(method, request, timeout_s, Effect.READ, done=done)
        return response
    finally:
        await calls.close()
