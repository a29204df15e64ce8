# SPDX-License-Identifier: Apache-2.0
"""Rights in the store: one user and role for one job.

A job needs the right to read and write its own prefix, and nothing else. The prefix ends in a
slash, so that the rights to ``train`` are none to ``train-2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from rdzv.errors import StoreRefused
from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.etcd.calls import Calls, Effect
from rdzv.store.etcd.endpoint import (
    AUTHENTICATE,
    ROLE_ADD,
    ROLE_GRANT_PERMISSION,
    USER_ADD,
    USER_CHANGE_PASSWORD,
    USER_GRANT_ROLE,
    Method,
)
from rdzv.store.etcd.errors import Outcome
from rdzv.store.etcd.http2_endpoint import endpoints_of
from rdzv.store.intervals import Interval
from rdzv.store.pb import etcd_pb2 as pb

WRITE_TIMEOUT_S = 10.0
"""Timeout of each change of rights, in seconds; a password takes the store a moment."""

_NO_PASSWORD = "password was given for no password user"


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
