# SPDX-License-Identifier: Apache-2.0
"""The Jobs that put a snapshot in the place of a member's records, without a cluster."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import of_kind, rendered
from tests.support.cluster.chart_release import command

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

RESTORED = (
    *("etcd.replicas=3", "etcd.backup.enabled=true", "etcd.backup.claim=snapshots"),
    "etcd.restore=muster-etcd-1.db",
)
POD = "muster-etcd-restore-0-1-abcde"
UPGRADE = "helm upgrade muster charts/muster --namespace muster-system --reuse-values --wait"
PATIENCE_S = 3
"""The Job's own would make a test of minutes."""


def jobs() -> list[dict[str, Any]]:
    return of_kind(rendered(*RESTORED), "Job")


class Member:
    """A member's volume in a folder of this machine, with a snapshot that is restored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "data" / "member" / "snap" / "db"
        self.log = folder / "data" / "member" / "wal" / "0.wal"
        for path in (self.records, self.log, folder / POD / "restored"):
            path.parent.mkdir(parents=True)
            path.touch()

    def exchange(self) -> subprocess.Popen[str]:
        """Begin what the Job does once the snapshot is restored beside the records."""
        (container,) = jobs()[0]["spec"]["template"]["spec"]["containers"]
        _, _, script = container["command"]
        script = script.replace("/var/lib/etcd", str(self.folder))
        script = script.replace("time.monotonic() + 120", f"time.monotonic() + {PATIENCE_S}")
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "POD_NAME": POD},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_restored(self) -> bool:
        return (self.folder / "data" / "restored").exists()


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(tmp_path)


def ended(exchange: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, said = exchange.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        exchange.kill()
        exchange.communicate()
        raise
    return exchange.returncode, said.strip()


def test_a_member_that_has_ended_begins_with_the_snapshot(member: Member) -> None:
    assert ended(member.exchange()) == (0, "")
    assert member.is_restored()
    (aside,) = member.folder.glob("data-*")
    assert (aside / "member" / "snap" / "db").exists()


@pytest.mark.parametrize("held", ["records", "log"])
def test_nothing_is_taken_from_a_member_that_runs(member: Member, held: str) -> None:
    """A Job that outlives its command meets members that were started again."""
    with (member.records if held == "records" else member.log).open("rb+") as file:
        (fcntl.flock if held == "records" else fcntl.lockf)(file, fcntl.LOCK_EX)
        assert ended(member.exchange()) == (1, "the member still runs: nothing was changed")
    assert [path.name for path in member.folder.iterdir()] == ["data"]
    assert not member.is_restored()


def test_nothing_is_taken_from_a_member_that_defragments_its_records(member: Member) -> None:
    """It puts another file in their place, and lets the one go that somebody waits for."""
    with member.records.open("rb+") as before, (member.folder / "new").open("wb+") as after:
        fcntl.flock(before, fcntl.LOCK_EX)
        fcntl.flock(after, fcntl.LOCK_EX)
        exchange = member.exchange()
        assert exchange.stdout is not None
        assert "waiting" in exchange.stdout.readline()
        (member.folder / "new").rename(member.records)
        fcntl.flock(before, fcntl.LOCK_UN)
        assert ended(exchange) == (1, "the member still runs: nothing was changed")
    assert not member.is_restored()


def test_each_attempt_has_names_and_a_cluster_of_its_own() -> None:
    """A Job cannot be changed, and members of one token take each other for their own."""
    assert [one["metadata"]["name"] for one in jobs()] == [
        f"muster-etcd-restore-{number}-1" for number in range(3)
    ]
    tokens = {
        word
        for one in jobs()
        for word in one["spec"]["template"]["spec"]["initContainers"][0]["command"]
        if "cluster-token" in word
    }
    assert tokens == {"--initial-cluster-token=muster-etcd.muster-system.muster-etcd-1.db.1"}


def test_no_job_outlives_the_command_of_the_page() -> None:
    """helm removes what an upgrade that fails has made only where it is told to."""
    words = command(f"{UPGRADE} --wait-for-jobs")
    assert "--cleanup-on-fail" in words
    waits_min = int(words[words.index("--timeout") + 1].removesuffix("m"))
    for one in jobs():
        assert one["spec"]["activeDeadlineSeconds"] < waits_min * 60
