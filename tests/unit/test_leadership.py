# SPDX-License-Identifier: Apache-2.0
"""A replica of the controller: its Lease, and the webhook's certificate."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from controller.certificate_keeper import pair_in, with_pair
from controller.certificates import LEAF_DAYS, Pair, due, make_pair, renewal
from controller.leadership import GIVE_UP_S, Leadership
from rdzv.errors import ClusterRefused

pytestmark = pytest.mark.virtual


class Lease:
    """The one object of an API server; ``hangs``: it answers nobody any more."""

    def __init__(self) -> None:
        self.version = 0
        self.spec: dict[str, Any] = {}
        self.hangs = False
        self.written_s = 0.0

    async def get(self, path: str) -> dict[str, Any]:
        if self.hangs:
            await asyncio.sleep(3600)
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    async def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ClusterRefused("the object has been modified", 409)
        self.version += 1
        self.spec = body["spec"]
        self.written_s = asyncio.get_running_loop().time()
        return body


async def test_who_cannot_renew_stops_before_another_may_begin() -> None:
    clock = asyncio.get_running_loop().time
    lease: Any = Lease()
    worked_until: list[float] = []

    async def work() -> None:
        try:
            lease.hangs = True
            await asyncio.sleep(3600)
        finally:
            worked_until.append(clock())

    running = asyncio.create_task(Leadership(lease, "lease", "one", clock).lead(work))
    await asyncio.sleep(60)
    assert [until <= lease.written_s + GIVE_UP_S for until in worked_until] == [True]
    running.cancel()
    await asyncio.wait((running,))


async def leading(lease: Any) -> asyncio.Task[None]:
    """Start a replica, and wait until it leads."""
    working = asyncio.Event()

    async def work() -> None:
        working.set()
        await asyncio.sleep(3600)

    clock = asyncio.get_running_loop().time
    running = asyncio.create_task(Leadership(lease, "lease", "one", clock).lead(work))
    await working.wait()
    assert lease.spec["holderIdentity"] == "one"
    return running


@pytest.mark.parametrize("holder", ["one", "two"])
async def test_a_replica_that_is_stopped_releases_its_lease_and_no_others(holder: str) -> None:
    """It was suspended for longer than the Lease, and is stopped before it reads it again."""
    lease: Any = Lease()
    running = await leading(lease)
    lease.version, lease.spec = lease.version + 1, {"holderIdentity": holder}
    running.cancel()
    await asyncio.wait((running,))
    assert lease.spec["holderIdentity"] == ("" if holder == "one" else "two")


NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
NAMES = ("muster-controller.muster-system.svc",)
MADE = make_pair(None, NAMES, NOW)
OTHER = make_pair(None, NAMES, NOW)


def test_one_is_made_where_there_is_none_and_kept_while_it_is_good() -> None:
    assert due(None, NAMES, NOW) == "there is none yet"
    assert due(MADE, NAMES, NOW) is None
    assert due(MADE, NAMES, NOW + timedelta(days=LEAF_DAYS // 2)) is None


def test_a_renewal_changes_nothing_that_is_trusted_and_an_expired_one_is_renewed() -> None:
    for later in (renewal(MADE), NOW + timedelta(days=10 * LEAF_DAYS)):
        assert due(MADE, NAMES, later) is not None
        renewed = make_pair(MADE, NAMES, later)
        assert (renewed.authority, due(renewed, NAMES, later)) == (MADE.authority, None)
        leaf = x509.load_pem_x509_certificate(renewed.certificate)
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(MADE.authority))


def test_another_name_and_an_authority_near_its_end_make_a_new_one() -> None:
    assert due(MADE, ("other.svc",), NOW) is not None
    old = NOW + timedelta(days=3600)
    assert make_pair(MADE, NAMES, old).authority != MADE.authority


FIELDS = st.sampled_from(["authority", "authority_key", "certificate", "key"])


@given(FIELDS, st.binary(max_size=40) | st.none())
def test_what_somebody_wrote_into_the_secret_is_replaced_and_raises_nothing(
    field: str, content: bytes | None
) -> None:
    broken = replace(MADE, **{field: getattr(OTHER, field) if content is None else content})
    made: Pair = make_pair(broken, NAMES, NOW)
    assert due(made, NAMES, NOW) is None
    if field != "authority_key":
        assert due(broken, NAMES, NOW) is not None


def test_keys_of_a_kind_that_is_not_known_are_replaced() -> None:
    """1.2.3.4 as the algorithm of a PKCS #8 key: a newer library, or a module, may have made it."""
    der = bytes.fromhex("3011020100300506032a030404050403010203")
    foreign = b"-----BEGIN PRIVATE KEY-----\n%s\n-----END PRIVATE KEY-----\n" % b64encode(der)
    with pytest.raises(UnsupportedAlgorithm):
        load_pem_private_key(foreign, None)
    for field in ("authority_key", "key"):
        broken = replace(MADE, **{field: foreign})
        why = due(broken, NAMES, NOW)
        assert why is None if field == "authority_key" else "cannot be read" in str(why)
        made = make_pair(broken, NAMES, NOW)
        assert due(made, NAMES, NOW) is None
        assert (made.authority == MADE.authority) is (field == "key")


def test_a_secret_carries_a_pair_beside_what_others_keep_there() -> None:
    secret = with_pair({"metadata": {"resourceVersion": "7"}, "data": {"other": "eA=="}}, MADE)
    assert pair_in(secret) == MADE
    assert (secret["data"]["other"], secret["metadata"]["resourceVersion"]) == ("eA==", "7")
    del secret["data"]["tls.key"]
    assert pair_in(secret) is None
