# SPDX-License-Identifier: Apache-2.0
"""What anybody may have written into a job's Secret: it costs that job alone its certificate."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from controller.access.decision import AccessPolicy, AccessSnapshot, Grant, decide
from controller.access.reconciler import AccessReconciler, StoreAccess
from controller.access.secret import (
    MANAGED_BY,
    MANAGER,
    JobName,
    JobsWithPods,
    grant_of,
    object_of,
    other_release,
)
from controller.certificates import ClientAuthority, ClientPair, make_clients_authority
from rdzv.errors import ClusterRefused, ClusterUnavailable, ConfigError
from tests.support.tasks import beside

pytestmark = pytest.mark.virtual

JOB, OTHER = JobName("team-a", "train"), JobName("team-b", "train")
NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
POLICY = AccessPolicy(keep=timedelta(hours=24), rotate=timedelta(days=30))
AUTHORITY = ClientAuthority(*make_clients_authority(NOW))
MEMBERS = b"the members' authority"
USER = JOB.user("0a")

# A key on a curve that the library does not have: `openssl ecparam -name secp112r1 -genkey`.
UNKNOWN_CURVE = b"""-----BEGIN EC PRIVATE KEY-----
MD4CAQEEDilrrFPPuhJZ0ofd12floAcGBSuBBAAGoSADHgAEm69ULYnUKKwQhOu6
MDxKm2NW5j3PkXkk5aaJ8g==
-----END EC PRIVATE KEY-----
"""


def decided(annotations: dict[str, str], data: dict[str, bytes]) -> tuple[str, str]:
    """Return what is done about a Secret with these changes, and whose certificate it then has."""
    pair = AUTHORITY.sign(USER, timedelta(days=60), NOW)
    notes = {"muster.dev/store-user": USER, "muster.dev/store-issued": NOW.isoformat()}
    good = {"ca.crt": MEMBERS, "tls.crt": pair.certificate, "tls.key": pair.key}
    held = {
        "metadata": {
            "resourceVersion": "5",
            "labels": {MANAGED_BY: MANAGER},
            "annotations": {**notes, **annotations},
        },
        "data": {key: base64.b64encode(text).decode() for key, text in {**good, **data}.items()},
    }
    grant = grant_of(held, JOB, MEMBERS, lambda found, user: AUTHORITY.fault(found, user, NOW))
    seen = AccessSnapshot(True, frozenset({USER}), frozenset({USER}), True, grant)
    action = decide(NOW, seen, POLICY, JOB.user("0b"))
    written = object_of(held, JOB, action.secret or grant, None, MEMBERS)
    return action.kind, written["metadata"]["annotations"]["muster.dev/store-user"]


@pytest.mark.parametrize(
    ("annotations", "data", "kind"),
    [
        ({}, {}, "rest"),
        ({"muster.dev/store-issued": "9999-12-31T23:59:59+00:00"}, {}, "write_secret"),
        ({"muster.dev/store-issued": "0001-01-01T00:00:00+14:00"}, {}, "write_secret"),
        ({"muster.dev/unused-since": "9999-12-31T23:59:59+00:00"}, {}, "rest"),
        ({}, {"tls.key": UNKNOWN_CURVE}, "write_secret"),
        ({}, {"tls.key": b"no key"}, "write_secret"),
        ({}, {"tls.crt": b"no certificate"}, "write_secret"),
    ],
)
def test_a_secret_that_somebody_has_changed_is_mended(
    annotations: dict[str, str], data: dict[str, bytes], kind: str
) -> None:
    assert decided(annotations, data) == (kind, USER)


class Failing:
    """An executor; a look at the one job fails each time, with the next of ``errors``.

    ``fault``: what is wrong with the controller's own certificate at the first look at all jobs.
    """

    def __init__(self, errors: Iterable[Exception], fault: Exception | None = None) -> None:
        self.errors = iter(errors)
        self.fault = fault
        self.done: list[JobName] = []
        self.tried_s: list[float] = []

    async def bring_in_line(self, job: JobName) -> datetime | None:
        await asyncio.sleep(0)
        self.done.append(job)
        if job == JOB:
            self.tried_s.append(asyncio.get_running_loop().time())
            raise next(self.errors)
        return None

    async def jobs(self) -> frozenset[JobName]:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return frozenset({JOB, OTHER})

    @property
    def waited_s(self) -> list[int]:
        return [round(b - a) for a, b in itertools.pairwise(self.tried_s)]


@asynccontextmanager
async def reconciling(executor: Failing, seconds: float) -> AsyncIterator[AccessReconciler]:
    """Let a reconciler work for some time; it is at work in the block, too."""
    given: Any = executor
    pods = JobsWithPods(None)  # type: ignore[arg-type]
    pods.known.set()
    reconciler = AccessReconciler(given, pods, lambda: NOW)
    async with beside(reconciler.run()):
        await asyncio.sleep(seconds)
        yield reconciler


async def test_a_defect_that_one_job_brings_out_leaves_the_others_their_access() -> None:
    fault = ConfigError("the certificate and the key are no pair")
    executor = Failing(itertools.repeat(OverflowError("date value out of range")), fault)
    async with reconciling(executor, 150):
        assert executor.done == [JOB, OTHER, JOB, OTHER]


class FailsFirst:
    """A keeper of the store's certificates with a defect."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self) -> None:
        self.runs += 1
        if self.runs == 1:
            raise ValueError("a defect")
        await asyncio.sleep(3600)


async def test_a_defect_of_the_stores_keeping_does_not_take_the_webhook_along() -> None:
    keeper: Any = FailsFirst()
    api: Any = None
    async with beside(StoreAccess(keeper, POLICY, api, "ours").run(give=False)) as (running,):
        await asyncio.sleep(100)
        assert (keeper.runs, running.done()) == (2, False)


async def test_what_is_refused_is_tried_again_the_later_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "controller")
    executor = Failing(itertools.repeat(ClusterRefused("the API server refused it", 422)))
    async with reconciling(executor, 400) as reconciler:
        assert executor.waited_s == [5, 10, 20, 40, 60, 60, 60, 60, 60]
        # Its pods come: somebody may have done something.
        tried = len(executor.tried_s)
        reconciler.stir(JOB)
        await asyncio.sleep(1)
        assert len(executor.tried_s) == tried + 1
    assert [one.message for one in caplog.records] == [
        f"access of {JOB}: the API server refused it"
    ]


async def test_a_defect_after_the_store_was_away_is_looked_at_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "controller")
    away, defect = ClusterUnavailable("the API server is away"), ValueError("a defect")
    executor = Failing([away, *[defect] * 100])
    async with reconciling(executor, 400):
        assert executor.waited_s == [5, 60, 60, 60, 60, 60, 60]
    told = [one.event for one in caplog.records]  # type: ignore[attr-defined]
    assert told == ["access_not_given"] + ["defect"] * 7


def test_of_two_releases_one_keeps_a_jobs_secret() -> None:
    """Each has an authority and a store of its own, and both see the job's pods."""
    secret: Any = None
    stores: dict[str, set[str]] = {"a": set(), "b": set()}
    authorities = {name: ClientAuthority(*make_clients_authority(NOW)) for name in stores}
    writers, refused = [], set()
    for release in ("a", "b", "a", "b"):
        clients, users = authorities[release], stores[release]
        for _ in range(6):
            other = "" if secret is None else other_release(secret, release)
            grant = None
            if secret is not None and not other:
                fault = partial(_fault, clients)
                grant = grant_of(secret, JOB, MEMBERS, fault, release)
            held = frozenset(users)
            seen = AccessSnapshot(True, held, held, True, grant, other != "", other)
            action = decide(NOW, seen, POLICY, JOB.user(release * 8))
            if action.kind == "make_user":
                users.add(action.user)
            if action.secret is not None:
                pair = clients.sign(action.secret.user, timedelta(days=60), NOW)
                made = object_of(secret, JOB, action.secret, pair, MEMBERS, release)
                secret = {**made, "metadata": {**made["metadata"], "resourceVersion": "1"}}
                writers.append(release)
            if action.blocked:
                refused.add(action.reason)
    assert writers == ["a"]
    assert {len(users) for users in stores.values()} == {0, 1}
    (reason,) = refused
    assert "belongs to release a " in reason


def _fault(clients: ClientAuthority, pair: ClientPair, user: str) -> str:
    return clients.fault(pair, user, NOW)


def test_a_secret_without_a_release_becomes_that_of_the_one_whose_certificate_it_has() -> None:
    pair = AUTHORITY.sign(USER, timedelta(days=60), NOW)
    first = object_of(None, JOB, Grant("", USER, NOW), pair, MEMBERS)
    grant = grant_of(first, JOB, MEMBERS, partial(_fault, AUTHORITY), "ours")
    assert not grant.labelled
    seen = AccessSnapshot(True, frozenset({USER}), frozenset({USER}), True, grant)
    action = decide(NOW, seen, POLICY, JOB.user("0b"))
    assert action.secret is not None
    named = object_of(first, JOB, action.secret, None, MEMBERS, "ours")
    assert other_release(named, "theirs") == "ours"
    assert named["data"] == first["data"]
