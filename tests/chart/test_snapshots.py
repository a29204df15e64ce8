# SPDX-License-Identifier: Apache-2.0
"""Snapshots and what comes of them: what the chart runs, on this machine's own etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import command_of, etcdutl_program, of_kind, rendered
from tests.support.ports import free_ports
from tests.support.store.etcd_cluster import START_S, find_etcd

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm and etcdutl

PLAIN = ("etcd.auth.enabled=false", "etcd.tls.enabled=false", "etcd.backup.claim=snapshots")
ONE, THREE = "etcd.replicas=1", "etcd.replicas=3"
GROWN = (THREE, "etcd.restore=snapshot.db", "etcd.restoreToNewClaims=true")
KEYS = 6
POD = "$(POD_NAME)"
SERVICE = "muster-etcd.muster-system.svc"


class Members:
    """The chart's members, with a folder for each volume and ports in place of their names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {port: free_ports(3) for port in (2379, 2380, 2381)}

    @contextmanager
    def running(self, value: str) -> Iterator[list[str]]:
        """Run the StatefulSet's pods; yield their endpoints once all are ready."""
        (found,) = of_kind(rendered(*PLAIN, value), "StatefulSet")
        (container,) = found["spec"]["template"]["spec"]["containers"]
        processes = []
        try:
            for number in range(found["spec"]["replicas"]):
                command = self._here(container["command"], number, f"muster-etcd-{number}")
                with (self._folder / f"{number}.log").open("ab") as log:
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            endpoints = [f"127.0.0.1:{port}" for port in self._ports[2379][: len(processes)]]
            self.etcdctl(endpoints, "endpoint", "health")
            yield endpoints
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=START_S)

    def restore(self) -> None:
        """Run what the Jobs of ``etcd.restore`` run; then put it in the place of the records."""
        for number, job in enumerate(of_kind(rendered(*PLAIN, *GROWN), "Job")):
            (first,) = job["spec"]["template"]["spec"]["initContainers"]
            command = self._here(first["command"], number, "new")
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)
            volume = self._volume(number)
            if (volume / "data").exists():
                (volume / "data").rename(volume / "before")
            (volume / "new").rename(volume / "data")

    def backup(self, containers: Sequence[Mapping[str, Any]]) -> None:
        """Run containers of a backup's pod, one after the other; raises if one fails."""
        for container in containers:
            command = self._here(container["command"], 0, "")
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)

    def etcdctl(self, endpoints: Sequence[str], *words: str) -> Any:
        limits = (f"--command-timeout={START_S:g}s", f"--dial-timeout={START_S:g}s")
        given = (f"--endpoints={','.join(endpoints)}", *limits, "--write-out=json")
        etcdctl = find_etcd().with_name("etcdctl")
        done = subprocess.run(
            [etcdctl, *words, *given], check=True, capture_output=True, text=True, timeout=600
        )
        return json.loads(done.stdout) if done.stdout.startswith(("{", "[")) else None

    def _volume(self, number: int) -> Path:
        folder = self._folder / f"volume-{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def _here(self, command: Sequence[str], number: int, pod: str) -> list[str]:
        """Return a container's command line with this machine's programs, folders and ports."""
        here = []
        for word in command:
            for port, ports in self._ports.items():
                for one in range(3):
                    word = word.replace(
                        f"muster-etcd-{one}.{SERVICE}:{port}", f"127.0.0.1:{ports[one]}"
                    )
                own = f"127.0.0.1:{ports[number]}"
                for name in ("0.0.0.0", f"{POD}.{SERVICE}", SERVICE):
                    word = word.replace(f"{name}:{port}", own)
            word = word.replace(POD, pod).replace("/backup", str(self._folder))
            word = word.replace("/restored", str(self._folder / "restored"))
            here.append(word.replace("/var/lib/etcd", str(self._volume(number))))
        program = os.path.basename(here[0])
        known = {
            **{"etcd": find_etcd(), "etcdctl": find_etcd().with_name("etcdctl")},
            **{"etcdutl": etcdutl_program(), "python3": sys.executable},
        }
        return [str(known[program]), *here[1:]]


def test_one_member_becomes_three_with_all_its_records(tmp_path: Path) -> None:
    members = Members(tmp_path)
    with members.running(ONE) as (one,):
        for number in range(KEYS):
            members.etcdctl([one], "put", f"/muster/{number}", f"value {number}")
        members.etcdctl([one], "snapshot", "save", str(tmp_path / "snapshot.db"))
        members.etcdctl([one], "put", "/muster/late", "after the snapshot")
    members.restore()
    with members.running(THREE) as three:
        assert len(three) == 3
        read = [members.etcdctl([one], "get", "/muster/", "--prefix") for one in three]
        assert {answer["header"]["cluster_id"] for answer in read} == {
            read[0]["header"]["cluster_id"]
        }
        for answer in read:
            assert answer["count"] == KEYS
            assert answer["kvs"] == read[0]["kvs"]
        assert len(members.etcdctl(three, "member", "list")["members"]) == 3
        # Those of the snapshot still count, so that no watch starts before what it has seen.
        assert read[0]["header"]["revision"] > KEYS


def test_the_restore_makes_the_claims_that_no_member_has_made_yet() -> None:
    objects = rendered(*PLAIN, *GROWN, "etcd.persistence.storageClass=ssd")
    found = {one["metadata"]["name"]: one for one in of_kind(objects, "PersistentVolumeClaim")}
    (statefulset,) = of_kind(rendered(*PLAIN, THREE), "StatefulSet")
    (template,) = statefulset["spec"]["volumeClaimTemplates"]
    assert list(found) == ["data-muster-etcd-1", "data-muster-etcd-2"]
    for claim in found.values():
        assert claim["spec"] == {**template["spec"], "storageClassName": "ssd"}
        assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize("values", [(), ("etcd.restore=snapshot.db",), (ONE, *GROWN[1:])])
def test_no_claim_is_made_otherwise(values: tuple[str, ...]) -> None:
    assert not of_kind(rendered(*PLAIN, *values), "PersistentVolumeClaim")


def test_new_volumes_are_bound_to_nodes_of_their_own() -> None:
    for job in of_kind(rendered(*PLAIN, *GROWN), "Job"):
        template = job["spec"]["template"]
        apart = template["spec"]["affinity"]["podAntiAffinity"]
        (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
        selected = term["labelSelector"]["matchLabels"].items()
        assert selected <= template["metadata"]["labels"].items()


def backups() -> list[dict[str, Any]]:
    """The pod of each day's backup."""
    return [
        one["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        for one in of_kind(rendered(*PLAIN, "etcd.backup.enabled=true"), "CronJob")
        if "-backup-" in one["metadata"]["name"]
    ]


def test_a_backup_is_of_any_member_that_answers() -> None:
    for pod in backups():
        save = pod["initContainers"][0]["command"]
        # The name of the Service: it has the addresses of all members.
        assert "--endpoints=http://muster-etcd.muster-system.svc:2379" in save


def test_the_controller_may_see_when_each_backup_succeeded() -> None:
    objects = rendered(*PLAIN, "etcd.backup.enabled=true")
    made = [one["metadata"]["name"] for one in of_kind(objects, "CronJob")]
    (flag,) = [word for word in command_of(objects) if word.startswith("--backups=")]
    names = flag.partition("=")[2].split(",")
    assert names == [name for name in made if "-backup-" in name]
    (role,) = of_kind(objects, "Role")
    (rule,) = [one for one in role["rules"] if one["resources"] == ["cronjobs"]]
    assert (rule["resourceNames"], rule["verbs"]) == (names, ["get"])


def test_a_backup_is_kept_once_it_was_restored_and_one_that_is_not_whole_leaves_the_last(
    tmp_path: Path,
) -> None:
    members, pod = Members(tmp_path), backups()[3]
    save, restore, _ = pod["initContainers"]
    kept, fresh = (tmp_path / f"muster-etcd-3.db{end}" for end in ("", ".new"))
    with members.running(ONE) as (one,):
        members.etcdctl([one], "put", "/muster/1", "value")
        members.backup([*pod["initContainers"], *pod["containers"]])
        last = kept.read_bytes()
        assert not fresh.exists()
        members.backup([save])
    with fresh.open("r+b") as file:
        file.seek(8192)
        file.write(b"damage")
    with pytest.raises(subprocess.CalledProcessError):
        members.backup([restore])
    assert pod["restartPolicy"] == "Never"
    assert kept.read_bytes() == last
