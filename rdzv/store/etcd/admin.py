# SPDX-License-Identifier: Apache-2.0
"""The administration of an etcd cluster: its members and state, and the rights of a job's users.

A job needs the right to read and write its own prefix, and nothing else. The prefix ends in a
slash, so that the rights to ``train`` are none to ``train-2``. An account is known by the name in a
client certificate, and has no password: nothing kept here can be lost, and all may be made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from rdzv.errors import StoreRefused
from rdzv.keys import JobKeys
from rdzv.store import etcd_pb2 as pb
from rdzv.store.access import Access
from rdzv.store.etcd.answers import Outcome, span
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.endpoint import (
    AUTH_STATUS,
    AUTHENTICATE,
    RANGE,
    ROLE_ADD,
    ROLE_GRANT_PERMISSION,
    USER_ADD,
    USER_CHANGE_PASSWORD,
    USER_GRANT_ROLE,
    Method,
)
from rdzv.store.etcd.http2_endpoint import endpoints_of
from rdzv.store.interface import Interval

MEMBER_LIST = Method(
    "/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse
)

_AUTH_REFUSALS = ("permission denied", "user name is empty", "invalid auth token")

WRITE_TIMEOUT_S = 10.0
"""Timeout of each change of rights, in seconds; a password takes the store a moment."""

_NO_PASSWORD = "password was given for no password user"

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


@dataclass(frozen=True, slots=True)
class JobRole:
    """The role of one job, and the user that has it. No two jobs share a name."""

    keys: JobKeys
    user: str = ""

    @property
    def name(self) -> str:
        """The name of the role: the job's prefix, which is unique, without slashes around it."""
        return self.keys.prefix.strip("/")

    @property
    def user_name(self) -> str:
        """The name of the user: the one that was chosen, or that of the role."""
        return self.user or self.name


class Rights:
    """The calls of a user who may manage users and roles. Use it within a running event loop."""

    def __init__(self, access: Access) -> None:
        endpoints = endpoints_of(access)
        self._calls = Calls(endpoints, 0, access, Random())

    async def make(self, role: JobRole, password: str | None) -> None:
        """Make the role and its user, or complete them; a new password replaces the old one.

        Without a password the user can only come by a client certificate of that name: an existing
        one that may have a password is refused. Raises ``StoreRefused`` for that and without the
        right, ``StoreUnavailable``, ``StoreAmbiguous``: a retry is safe.
        """
        interval = Interval.of(role.keys.prefix, prefix=True)
        permission = pb.Permission(
            permType=pb.Permission.READWRITE, key=interval.start, range_end=interval.end
        )
        await self.call(ROLE_ADD, pb.AuthRoleAddRequest(name=role.name))
        await self.call(
            ROLE_GRANT_PERMISSION,
            pb.AuthRoleGrantPermissionRequest(name=role.name, perm=permission),
        )
        await self._make_user(role.user_name, password)
        await self.call(
            USER_GRANT_ROLE, pb.AuthUserGrantRoleRequest(user=role.user_name, role=role.name)
        )

    async def call(self, method: Method, request: Any, timeout_s: float = WRITE_TIMEOUT_S) -> Any:
        """Make one call; return None if it was to make what exists already."""
        _, response = await self._calls.call(
            method, request, timeout_s, Effect.IDEMPOTENT, done=Outcome.EXISTS
        )
        return response

    async def close(self) -> None:
        """Close every connection."""
        await self._calls.close()

    async def _make_user(self, name: str, password: str | None) -> None:
        options = pb.UserAddOptions(no_password=password is None)
        request = pb.AuthUserAddRequest(name=name, password=password or "", options=options)
        made = await self.call(USER_ADD, request)
        if made is not None:
            return
        if password is None:
            await self._check_without_password(name)
            return
        change = pb.AuthUserChangePasswordRequest(name=name, password=password)
        await self.call(USER_CHANGE_PASSWORD, change)
        # For a user made without a password, etcd takes one, reports success, and forgets it.
        login = pb.AuthenticateRequest(name=name, password=password)
        try:
            await self._calls.call(
                AUTHENTICATE, login, WRITE_TIMEOUT_S, Effect.IDEMPOTENT, done=Outcome.NO_LOGIN
            )
        except StoreRefused as error:
            raise StoreRefused(
                f"user {name} was made before, for a client certificate and without a password:"
                f" etcdctl user delete {name}, then run this again ({error})"
            ) from error

    async def _check_without_password(self, name: str) -> None:
        """Check, by a login, that the user has no password; raise ``StoreRefused`` if it may have.

        etcd says so to any client that gives one.
        """
        login = pb.AuthenticateRequest(name=name, password="none")
        try:
            await self._calls.call(
                AUTHENTICATE, login, WRITE_TIMEOUT_S, Effect.IDEMPOTENT, done=Outcome.NO_LOGIN
            )
        except StoreRefused as error:
            if _NO_PASSWORD in str(error):
                return
        raise StoreRefused(
            f"user {name} is there already, perhaps with a password: etcdctl user delete {name},"
            " then run this again"
        )


class Accounts:
    """The calls that manage users and roles. Use it within a running event loop.

    Each raises ``StoreRefused`` without the right, ``StoreUnavailable`` and ``StoreAmbiguous``: a
    retry is safe.

    Each user is known by the name in a client certificate, and none has a password. So nothing
    that is kept here can be lost, and everything may be made again.
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
