# SPDX-License-Identifier: Apache-2.0
"""How long the two sides of a Horovod command look for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_shim.horovod.exec.frames import (
    LEASE_TTL_S,
    MARGIN_S,
    delivered_lease_ttl_s,
    patience_s,
)


@pytest.mark.parametrize(
    ("delivered", "lease_ttl_s"),
    [
        ("MUSTER_HOST=node-0.1a2b3c4d\nMUSTER_LEASE_TTL=60\n", 60),
        ("MUSTER_LEASE_TTL=3600\n", 3600),
        ("MUSTER_LEASE_TTL=\n", LEASE_TTL_S),
        ("MUSTER_LEASE_TTL=\u0663\n", LEASE_TTL_S),
        ("MUSTER_LEASE_TTL=-1\nA\n", LEASE_TTL_S),
        ("", LEASE_TTL_S),
        (None, LEASE_TTL_S),
    ],
)
def test_it_follows_the_lease_that_the_sidecar_delivers(
    tmp_path: Path, delivered: str | None, lease_ttl_s: int
) -> None:
    if delivered is not None:
        (tmp_path / "env").write_text(delivered, encoding="utf-8")
    assert patience_s(delivered_lease_ttl_s(str(tmp_path))) == lease_ttl_s + MARGIN_S
