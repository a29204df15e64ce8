# SPDX-License-Identifier: Apache-2.0
"""Users and roles of an etcd cluster, one at a time: listed, made and removed.

Each user is known by the name in a client certificate, and none has a password. So nothing that is
kept here can be lost, and everything may be made again.
"""

from __future__ import annotations

from random import Random
from typing import Any

from rdzv.store.access import Access
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.endpoint import (
    AUTH_STATUS,
    ROLE_ADD,
    ROLE_GRANT_PERMISSION,
    USER_ADD,
    USER_GRANT_ROLE,
    Method,
)
from rdzv.store.etcd.errors import Outcome
from rdzv.store.etcd.http2_endpoint import endpoints_of
from rdzv.store.etcd.rights import WRITE_TIMEOUT_S
from rdzv.store.intervals import Interval
from rdzv.store.pb import etcd_pb2 as pb

ROOT = "root"
"""The user and the role that may do everything."""

_AUTH = "/etcdserverpb.Auth/"
ENABLE = Method(f"{_AUTH}AuthEnable", pb.AuthEnableRequest, pb.AuthEnableResponse)
USER_LIST = Method(f"{_AUTH}UserList", pb.AuthUserListRequest, pb.AuthUserListResponse)
USER_GET = Method(f"{_AUTH}UserGet", pb.AuthUserGetRequest, pb.AuthUserGetResponse)
USER_DELETE = Method(f"{_AUTH}UserDelete", pb.AuthUserDeleteRequest, pb.AuthUserDeleteResponse)
ROLE_LIST = Method(f"{_AUTH}RoleList", pb.AuthRoleListRequest, pb.AuthRoleListResponse)
ROLE_GET = Method(f"{_AUTH}RoleGet", pb.AuthRoleGetRequest, pb.AuthRoleGetResponse)
ROLE_DELETE = Method(f"{_AUTH}RoleDelete", pb.AuthRoleDeleteRequest, pb.AuthRoleDeleteResponse)


class Accounts:
    """The calls that manage users and roles. Use it within a running event loop.

    Each raises ``StoreRefused`` without the right, ``StoreUnavailable`` and ``StoreAmbiguous``: a
    retry is safe.
    """

    def __init__(self, access: Access) -> None:
        endpoints = endpoints_of(access)
        self._calls = Calls(endpoints, 0, access, Random())

    async def users(self) -> frozenset[str]:
        """Read the names of all users."""
        answer = await self._call(USER_LIST, pb.AuthUserListRequest())
        return frozenset(answer.users)

    async def roles(self) -> frozenset[str]:
        """Read the names of all roles."""
        answer = await self._call(ROLE_LIST, pb.AuthRoleListRequest())
        return frozenset(answer.roles)

    async def roles_of(self, user: str) -> frozenset[str]:
        """Read the roles of a user; return none if there is no such user."""
        answer = await self._call(USER_GET, pb.AuthUserGetRequest(name=user), Outcome.MISSING)
        return frozenset() if answer is None else frozenset(answer.roles)

    async def may_use(self, role: str, prefix: str) -> bool:
        """Return whether a role may read and write what is under a prefix."""
        answer = await self._call(ROLE_GET, pb.AuthRoleGetRequest(role=role), Outcome.MISSING)
        return answer is not None and _permission(prefix) in answer.perm

    async def make_role(self, role: str, prefix: str) -> None:
        """Make a role, unless it exists, that may read and write what is under ``prefix``."""
        await self._call(ROLE_ADD, pb.AuthRoleAddRequest(name=role), Outcome.EXISTS)
        granted = pb.AuthRoleGrantPermissionRequest(name=role, perm=_permission(prefix))
        await self._call(ROLE_GRANT_PERMISSION, granted)

    async def make_user(self, user: str, role: str) -> None:
        """Make a user without a password, unless it exists, and grant it a role.

        Raises ``StoreRefused`` if there is no such role.
        """
        options = pb.UserAddOptions(no_password=True)
        added = pb.AuthUserAddRequest(name=user, password="", options=options)
        await self._call(USER_ADD, added, Outcome.EXISTS)
        await self._call(USER_GRANT_ROLE, pb.AuthUserGrantRoleRequest(user=user, role=role))

    async def delete_user(self, user: str) -> None:
        """Delete a user, if it exists: the rights of its certificate end at once."""
        await self._call(USER_DELETE, pb.AuthUserDeleteRequest(name=user), Outcome.MISSING)

    async def delete_role(self, role: str) -> None:
        """Delete a role, if it exists."""
        await self._call(ROLE_DELETE, pb.AuthRoleDeleteRequest(role=role), Outcome.MISSING)

    async def enable(self) -> bool:
        """Enable authentication; return whether it was off before."""
        status = await self._call(AUTH_STATUS, pb.AuthStatusRequest())
        if status.enabled:
            return False
        await self.make_user(ROOT, ROOT)
        await self._call(ENABLE, pb.AuthEnableRequest())
        return True

    async def close(self) -> None:
        """Close every connection."""
        await self._calls.close()

    async def _call(self, method: Method, request: Any, done: Outcome | None = None) -> Any:
        _, answer = await self._calls.call(
            method, request, WRITE_TIMEOUT_S, Effect.IDEMPOTENT, done=done
        )
        return answer


def _permission(prefix: str) -> Any:
    interval = Interval.of(prefix, prefix=True)
    return pb.Permission(
        permType=pb.Permission.READWRITE, key=interval.start, range_end=interval.end
    )
