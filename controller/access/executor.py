# SPDX-License-Identifier: Apache-2.0
"""Executes a job's access decisions: reads in the order that they rely on, and acts.

Every write of the Secret compares its resourceVersion; after a conflict it is read again. Writes
to the store need no compare: users and roles exist or do not.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from controller.access import decision
from controller.access.certificates import SPARE, ClientPair
from controller.access.decision import AccessPolicy, AccessSnapshot, Action
from controller.access.names import JobName, digest_of, job_of
from controller.access.secret import grant_of, is_ours, object_of, other_release
from controller.access.store_keeper import StoreEntry, StoreKeeper
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.events import Events, reference
from rdzv.errors import ClusterRefused
from rdzv.store.etcd.accounts import Accounts

log = logging.getLogger(__name__)

GONE, CONFLICT = 404, 409
STEPS_MOST = 60
"""Limit on consecutive steps for one job: two replicas that undo each other would be a defect."""


class AccessExecutor:
    """The users, roles and Secrets of jobs; ``in_use`` returns whether a job has a pod now.

    ``events`` reports Secrets that need a user's action. ``release``: the release of the chart, as
    its Secrets name it.
    """

    def __init__(
        self,
        api: ClusterApi,
        accounts: Accounts,
        keeper: StoreKeeper,
        policy: AccessPolicy,
        in_use: Callable[[JobName], bool],
        now: Callable[[], datetime],
        events: Events,
        release: str = "",
    ) -> None:
        self._api = api
        self._release = release
        self._events = events
        self._accounts = accounts
        self._keeper = keeper
        self._policy = policy
        self._in_use = in_use
        self._now = now

    async def bring_in_line(self, job: JobName) -> datetime | None:
        """Take all steps that a job needs; return the time of the next check, None if none is due.

        Raises ``ClusterRefused`` also if a user has to act on the job's Secret.
        """
        for _ in range(STEPS_MOST):
            seen, held = await self._read(job)
            fresh = job.user(secrets.token_hex(6))
            action = decision.decide(self._now(), seen, self._policy, fresh)
            if action.kind == "rest":
                if action.blocked and seen.in_use and held is not None:
                    raise self._refused(job, action, held)
                return action.until
            try:
                await self._apply(job, action, held)
            except ClusterRefused as error:
                if error.status not in (GONE, CONFLICT):
                    raise
                continue  # another replica has written, to the same effect: read again
            log.info(
                "access of %s: %s, as %s",
                job,
                action.kind.replace("_", " "),
                action.reason,
                extra={"event": "access_changed"},
            )
        log.critical(
            "access of %s: giving up after %d steps without reaching the desired state",
            job,
            STEPS_MOST,
            extra={"event": "defect"},
        )
        return None

    def _refused(self, job: JobName, action: Action, held: Mapping[str, Any]) -> ClusterRefused:
        """Publish the reason as an Event of the Secret, and return it as an error."""
        about = {"apiVersion": "v1", "kind": "Secret", **held["metadata"]}
        self._events.say(
            reference(about, job.namespace), "AccessNotGiven", action.reason, warning=True
        )
        return ClusterRefused(f"the Secret {job.secret}: {action.reason}", CONFLICT)

    async def jobs(self) -> frozenset[JobName]:
        """Return every job with a role in the store; delete the users of all other jobs."""
        users = await self._accounts.users()
        roles = await self._accounts.roles()
        jobs = frozenset(filter(None, map(job_of, roles)))
        digests = {job.digest for job in jobs}
        for user in sorted(users):
            digest = digest_of(user)
            if digest is not None and digest not in digests:
                await self._accounts.delete_user(user)
        return jobs

    async def _read(self, job: JobName) -> tuple[AccessSnapshot, Object | None]:
        # Users before the Secret: each user that is found had its Secret before.
        users = frozenset(filter(job.owns, await self._accounts.users()))
        role = await self._accounts.may_use(job.role, job.keys.prefix)
        granted = {user for user in users if job.role in await self._accounts.roles_of(user)}
        try:
            held = await self._api.get(paths.core(job.namespace, paths.SECRETS, job.secret))
        except ClusterRefused as error:
            if error.status != GONE:
                raise
            held = None
        grant = None
        release = "" if held is None else other_release(held, self._release)
        if held is not None and not release:
            now, entry = self._now(), self._entry
            grant = grant_of(
                held,
                job,
                entry.members_authority,
                lambda pair, user: entry.clients.fault(pair, user, now),
                self._release,
            )
            # The label may be lost; a valid certificate of the job's own user shows that it is
            # ours.
            if not is_ours(held) and grant.fault:
                grant = None
        seen = AccessSnapshot(
            self._in_use(job),
            users,
            frozenset(granted),
            role,
            grant,
            held is not None and grant is None,
            release,
        )
        return seen, held

    async def _apply(self, job: JobName, action: Action, held: Object | None) -> None:
        here = paths.core(job.namespace, paths.SECRETS)
        match action.kind:
            case "make_role":
                await self._accounts.make_role(job.role, job.keys.prefix)
            case "make_user":
                await self._accounts.make_user(action.user, job.role)
            case "delete_user":
                await self._accounts.delete_user(action.user)
            case "delete_role":
                await self._accounts.delete_role(job.role)
            case "create_secret":
                await self._api.create(here, self._written(job, action, None))
            case "write_secret":
                await self._api.replace(f"{here}/{job.secret}", self._written(job, action, held))
            case "delete_secret":
                assert action.secret is not None
                await self._api.delete(f"{here}/{job.secret}", action.secret.version)

    def _written(self, job: JobName, action: Action, held: Object | None) -> Object:
        assert action.secret is not None
        pair: ClientPair | None = None
        if action.sign:
            life = self._policy.rotate + SPARE
            pair = self._entry.clients.sign(action.secret.user, life, self._now())
        authority = self._entry.members_authority
        return object_of(held, job, action.secret, pair, authority, self._release)

    @property
    def _entry(self) -> StoreEntry:
        """The current entry: an authority may be replaced while the controller runs."""
        assert self._keeper.entry is not None
        return self._keeper.entry
