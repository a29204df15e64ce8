# SPDX-License-Identifier: Apache-2.0
"""The controller's component that gives jobs access to the store: executes each job's decisions.

A job is reconciled when its pods come or go, and periodically, by every replica: a step that one of
them has taken needs nothing from the others. Every write of the Secret compares its
resourceVersion; after a conflict it is read again. Writes to the store need no compare: users and
roles exist or do not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from controller.access import decision
from controller.access.decision import AccessPolicy, AccessSnapshot, Action
from controller.access.secret import (
    JobName,
    JobsWithPods,
    digest_of,
    grant_of,
    is_ours,
    job_of,
    object_of,
    other_release,
)
from controller.access.store_keeper import StoreEntry, StoreKeeper, StoreSecrets
from controller.certificates import SPARE, ClientPair
from controller.cluster import paths
from controller.cluster.api import CONFLICT, NOT_FOUND, ClusterApi, Object
from controller.cluster.events import Events, reference
from controller.config import ControllerConfig
from injection.settings import TABLE
from rdzv.errors import ClusterRefused, ConfigError, MusterError, StoreRefused
from rdzv.pacing import Doubling
from rdzv.reconcile import Loop, Outlook, restarted
from rdzv.sentences import Diary, named
from rdzv.store.access import Access
from rdzv.store.etcd.admin import Accounts

log = logging.getLogger(__name__)

STEPS_MOST = 60
"""Limit on consecutive steps for one job: two replicas that undo each other would be a defect."""

LOOK_S = 60.0
"""Interval between two checks of every job: the bound on how late a changed or deleted Secret, or
a restored store, is noticed. A check costs at least three calls to the store and one to the API
server per job."""
AGAIN_S = 5.0
"""Retry interval if the store or the API server is unavailable."""
REFUSED = Doubling(AGAIN_S, LOOK_S)
"""Backoff after either has refused a call, which ends only once somebody acts: at most the
interval of the periodic check. A job whose pods come or go is checked at once."""
AT_ONCE = 8
"""Maximum number of jobs that are checked concurrently."""

FOLDER = Path(tempfile.gettempdir()) / "muster-store"
"""The folder of the controller's own credentials for the store."""


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
                if error.status not in (NOT_FOUND, CONFLICT):
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
            if error.status != NOT_FOUND:
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


class AccessReconciler(Loop):
    """The reconciler of access: of a job as its pods come or go, of all jobs every ``LOOK_S``."""

    def __init__(
        self, executor: AccessExecutor, jobs: JobsWithPods, now: Callable[[], datetime]
    ) -> None:
        super().__init__()
        self._executor = executor
        self._jobs = jobs
        self._now = now
        self._due: set[JobName] = set()
        self._again: dict[JobName, tuple[float, int]] = {}
        """Jobs whose check failed: the time of the next retry, and the number of refusals in a
        row."""
        self._diaries: dict[JobName, Diary] = {}
        self._look_s = -math.inf
        """The time of the next check of all jobs."""
        self._limit = asyncio.Semaphore(AT_ONCE)
        jobs.changed = self.stir

    def stir(self, job: JobName) -> None:
        """Request an immediate check of ``job``."""
        self._due.add(job)
        self.wake()

    async def run(self) -> None:
        """Reconcile jobs until cancelled."""
        await self._jobs.known.wait()
        await super().run()

    async def step(self) -> Outlook:
        """Check the jobs that are due."""
        due, self._due = self._due, set()
        if self.clock() >= self._look_s:
            every = self._jobs.all() | await self._known_to_the_store()
            due |= every - self._again.keys()
            self._look_s = self.clock() + LOOK_S
        due |= {job for job, (due_s, _) in self._again.items() if due_s <= self.clock()}
        async with asyncio.TaskGroup() as tasks:
            for job in sorted(due):
                tasks.create_task(self._look_at(job))
        return Outlook(look_at_s=min([self._look_s, *(due_s for due_s, _ in self._again.values())]))

    async def _known_to_the_store(self) -> frozenset[JobName]:
        try:
            return await self._executor.jobs()
        except MusterError as error:
            log.warning(
                "cannot list or clean up the store's users and roles: %s",
                error,
                extra={"event": "access_not_given"},
            )
            return frozenset()

    async def _look_at(self, job: JobName) -> None:
        async with self._limit:
            try:
                until = await self._executor.bring_in_line(job)
            except MusterError as error:
                self._note(job, error)
                return
            except Exception as error:  # one job's failure must not affect the access of others
                told = {"event": "defect"}
                log.critical("access of %s: %s", job, error, exc_info=error, extra=told)
                _, before = self._again.get(job, (0.0, 0))
                self._again[job] = (self.clock() + LOOK_S, before)
                return
        self._again.pop(job, None)
        self._diaries.pop(job, None)
        if until is not None:
            left_s = (until - self._now()).total_seconds()
            if left_s < LOOK_S:
                asyncio.get_running_loop().call_later(max(left_s, 0.0), self.stir, job)

    def _note(self, job: JobName, error: MusterError) -> None:
        """Log the error once and schedule a retry, with backoff if a call was refused."""
        diary = self._diaries.setdefault(job, Diary(log))
        told = {"event": "access_not_given"}
        diary.say(f"access of {job}: {error}", level=logging.WARNING, extra=told)
        refused = isinstance(error, ClusterRefused | StoreRefused)
        _, before = self._again.get(job, (0.0, 0))
        again_s = REFUSED.after(before) if refused else AGAIN_S
        due_s = self.clock() + again_s
        self._again[job] = (due_s, before + 1 if refused else before)


class StoreAccess:
    """The upkeep of the store's certificates and of each job's access."""

    def __init__(
        self, keeper: StoreKeeper, policy: AccessPolicy, api: ClusterApi, release: str
    ) -> None:
        self.keeper = keeper
        self._release = release
        self._policy = policy
        self._api = api

    async def run(self, *, give: bool) -> None:
        """Maintain the certificates until cancelled and, with ``give``, also the jobs' access.

        A failure is reported and retried: it must not take the webhook down.
        """
        await restarted("keeping the store's access", partial(self._run, give=give))

    async def _run(self, *, give: bool) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keeper.run())
            if give:
                await self.keeper.ready.wait()
                assert self.keeper.entry is not None
                await self._give(self.keeper.entry.access)

    async def _give(self, access: Access) -> None:
        accounts, events = Accounts(access), Events(self._api, time.monotonic)
        jobs = JobsWithPods(self._api, self._release)
        executor = AccessExecutor(
            self._api,
            accounts,
            self.keeper,
            self._policy,
            jobs.__contains__,
            now,
            events,
            self._release,
        )
        reconciler = AccessReconciler(executor, jobs, now)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(jobs.run())
                tasks.create_task(reconciler.run())
                tasks.create_task(events.run())
        finally:
            await accounts.close()


def store_access(
    config: ControllerConfig, environ: Mapping[str, str], api: ClusterApi
) -> StoreAccess | None:
    """Build the component; None if the controller manages no access and no members' certificate.

    Raises ``ConfigError`` if the store's endpoints do not use TLS.
    """
    hosts = tuple(filter(None, config.store_hosts.split(",")))
    if not config.store_access and not config.store_members:
        return None
    endpoints = TABLE["etcd_endpoints"].parse(environ.get(TABLE["etcd_endpoints"].variable, ""))
    if not endpoints or not endpoints[0].startswith("https://"):
        raise ConfigError(
            f"{named('--store-access')} and {named('--store-members')} are for a store with TLS:"
            " give --default etcd-endpoints=https://…"
        )
    names = StoreSecrets(
        config.own_namespace,
        config.store_access,
        config.store_members,
        hosts,
        own=bool(config.store_members),
    )
    keeper = StoreKeeper(api, names, tuple(endpoints), FOLDER, now)
    policy = AccessPolicy(
        timedelta(seconds=config.access_keep_s), timedelta(seconds=config.access_rotate_s)
    )
    return StoreAccess(keeper, policy, api, config.release)


def now() -> datetime:
    """Return the current time, in UTC."""
    return datetime.now(UTC)
