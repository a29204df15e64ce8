# SPDX-License-Identifier: Apache-2.0
"""What a configuration gives a sidecar's parts to go by."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config.sidecar import Config
from agent.config.table import load
from agent.rundir.files import RunDir
from agent.surroundings import MemberSettings, Sockets

NEEDED = {"MUSTER_JOB": "digits", "MUSTER_MIN": "2", "MUSTER_MAX": "4"}


def read(**environ: str) -> Config:
    return load(Config, {}, {**NEEDED, **environ})


def test_what_is_not_said_is_as_in_the_table_of_settings() -> None:
    told = MemberSettings.of(read(), "uid")
    assert told == MemberSettings(keys=told.keys, identity=told.identity)


def test_what_is_said_reaches_the_parts() -> None:
    told = MemberSettings.of(
        read(
            MUSTER_NAMESPACE="team",
            MUSTER_LEASE_TTL="20s",
            MUSTER_START_TIMEOUT="21s",
            MUSTER_FIRST_CALL="22s",
            MUSTER_LAST_CALL="23s",
            MUSTER_GRACE_S="24s",
            MUSTER_BELOW_MIN="commit",
            MUSTER_C10D_PORT="2500",
            MUSTER_UNIT="2",
            MUSTER_GATHER="25s",
        ),
        "uid",
    )
    assert (told.keys.namespace, told.keys.job_name) == ("team", "digits")
    who = told.identity
    assert (who.pod_uid, str(who.template)) == ("uid", "min=2 max=4 unit=2 gather=25s")
    assert (told.lease_ttl_s, told.start_timeout_s) == (20, 21)
    assert (told.first_call_s, told.last_call_s, told.grace_s) == (22, 23, 24)
    assert (told.below_min, told.launcher_port, told.relayed) == ("commit", 2500, False)


@pytest.mark.parametrize(("role", "slots"), [("worker", 3), ("launcher", 0)])
def test_a_launcher_has_no_slots(role: str, slots: int) -> None:
    told = MemberSettings.of(read(MUSTER_ROLE=role, MUSTER_SLOTS="3"), "uid")
    assert told.identity.slots == slots


def test_where_the_relay_serves_the_port_the_sidecar_does_not(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path))
    config = read(MUSTER_C10D_PORT="0", MUSTER_RELAY_PORT="2600")
    told = MemberSettings.of(config, "uid")
    assert (told.launcher_port, told.relayed) == (2600, True)
    sockets = Sockets.of(config, run_dir)
    assert sockets.c10d_port is None
    assert sockets.c10d_path == str(tmp_path / "c10d.sock")
    assert sockets.notice_path == tmp_path / "notice.sock"
    assert Sockets.of(read(), run_dir).c10d_port == 29400


def test_by_default_nothing_listens() -> None:
    assert Sockets() == Sockets(c10d_port=None, c10d_path=None, notice_path=None)
