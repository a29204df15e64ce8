# SPDX-License-Identifier: Apache-2.0
"""Sidecars and commands on a real etcd with TLS and users: set up as the page says, and quiet."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from rdzv.keys import JobKeys
from rdzv.store.access import Access
from rdzv.store.etcd.admin import JobRole
from tests.support.sidecars.processes import (
    PATIENCE_S,
    ROOT,
    Sidecar,
    impatient_muster,
    muster,
    sidecar,
    until,
)
from tests.support.store.certificates import write
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.secure import (
    ROOT_PASSWORD,
    job_access,
    named_cluster,
    secure_cluster,
    shell,
)

__all__ = ["named_cluster", "secure_cluster"]

pytestmark = pytest.mark.etcd

PLANTED = "planted-secret-password"
PLANTED_NEXT = "planted-secret-password-2"
TOKEN = re.compile(r"\b[A-Za-z]{16}\.\d+\b")
"""What etcd's simple tokens look like."""


def environment(access: Access) -> dict[str, Any]:
    """The variables of a sidecar that reaches the store like this."""
    given = {
        "MUSTER_ETCD_ENDPOINTS": ",".join(access.endpoints),
        "MUSTER_ETCD_CACERT": access.cacert,
        "MUSTER_ETCD_CERT": access.cert,
        "MUSTER_ETCD_KEY": access.key,
        "MUSTER_ETCD_USER": access.user,
        "MUSTER_ETCD_PASSWORD_FILE": access.password_file,
    }
    return {name: value for name, value in given.items() if value}


def password_file(folder: Path, name: str, password: str) -> str:
    path = folder / f"{name}.password"
    write(path, f"{password}\n".encode())
    return str(path)


async def printed(cluster: EtcdCluster, *arguments: str) -> str:
    """Have ``muster store-role`` print what to do, and do it in a shell; gives what was run."""
    ended = await muster("store-role", *arguments)
    assert (ended.status, ended.err) == (0, "")
    await asyncio.to_thread(shell, cluster, ended.out)
    return ended.out


async def test_the_printed_commands_let_a_sidecar_in_and_keep_another_job_out(
    secure_cluster: EtcdCluster, tmp_path: Path
) -> None:
    path = await asyncio.to_thread(password_file, tmp_path, "it's", "printed-password")
    script = await printed(secure_cluster, "printed", "--new-password-file", path)
    assert "readwrite /muster/v1/default/printed/\n" in script
    keys = JobKeys("default", "printed")
    access = secure_cluster.access(user=JobRole(keys).user_name, password_file=path)
    variables = environment(access)
    async with sidecar("", tmp_path / "run", MUSTER_JOB="printed", **variables) as one:
        await one.until_ready()
        assert await one.end() == 0
    variables["MUSTER_START_TIMEOUT"] = "30"
    async with sidecar("", tmp_path / "other", MUSTER_JOB="printed-2", **variables) as other:
        assert await asyncio.wait_for(other.process.wait(), PATIENCE_S) == 69
    last = other.lines[-1]["message"]
    assert "permission denied" in last
    assert "muster store-role" in last
    # A refusal is told when it begins, not each time it is met.
    assert len([line for line in other.lines if "permission denied" in line["message"]]) <= 3


async def test_a_sidecar_is_let_in_by_the_name_in_its_certificate(
    named_cluster: EtcdCluster, tmp_path: Path
) -> None:
    await printed(named_cluster, "named", "--user", "trainer.example", "--no-password")
    cert, key = await asyncio.to_thread(named_cluster.authority.client, "trainer.example")
    variables = environment(named_cluster.access(cert=str(cert), key=str(key)))
    async with sidecar("", tmp_path, MUSTER_JOB="named", **variables) as one:
        await one.until_ready()
        ended = await muster("status", "--json", MUSTER_JOB="named", **variables)
        assert (ended.status, '"node-0"' in ended.out) == (0, True)
        assert await one.end() == 0


async def test_apply_makes_the_role_again_and_changes_the_password(
    secure_cluster: EtcdCluster, tmp_path: Path
) -> None:
    root = await asyncio.to_thread(password_file, tmp_path, "root", ROOT_PASSWORD)
    as_root = environment(secure_cluster.access(user="root", password_file=root))
    fresh = await asyncio.to_thread(password_file, tmp_path, "fresh", "first-password")
    words = ("store-role", "applied", "--apply", "--new-password-file", fresh)
    for password in ("first-password", "second-password"):
        await asyncio.to_thread(password_file, tmp_path, "fresh", password)
        ended = await muster(*words, **as_root)
        assert ended.status == 0, ended.err
        assert "may read and write what is under /muster/v1/default/applied/" in ended.out
        assert "until etcdctl auth enable" not in ended.out
        user = JobRole(JobKeys("default", "applied")).user_name
        as_job = environment(secure_cluster.access(user=user, password_file=fresh))
        asked = await muster("history", "--job", "applied", **as_job)
        assert "no job applied" in asked.err
        refused = await muster("history", "--job", "other", **as_job)
        assert refused.status == 69
        assert "permission denied" in refused.err
    refused = await muster(*words, **as_job)
    assert (refused.status, "permission denied" in refused.err) == (69, True)


async def test_a_user_without_a_password_is_given_none_unnoticed(
    secure_cluster: EtcdCluster, tmp_path: Path
) -> None:
    """etcd answers that it has changed the password, and keeps none."""
    root = await asyncio.to_thread(password_file, tmp_path, "root", ROOT_PASSWORD)
    as_root = environment(secure_cluster.access(user="root", password_file=root))
    path = await asyncio.to_thread(password_file, tmp_path, "fresh", "first-password")
    made = await muster("store-role", "without", "--apply", "--no-password", **as_root)
    assert made.status == 0, made.err
    words = ("store-role", "without", "--apply", "--new-password-file", path)
    ended = await muster(*words, **as_root)
    assert ended.status == 69
    assert "etcdctl user delete muster/v1/default/without" in ended.err


_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(secure_cluster: EtcdCluster, tmp_path: Path) -> list[str]:
    """The page's blocks, with a real store in the place of the one that it names."""
    text = (ROOT / "docs" / "security.md").read_text()
    endpoints = ",".join(secure_cluster.endpoints)
    command = shlex.join([sys.executable, "-m", "console.main"])
    (tmp_path / "muster").write_text(f'#!/bin/sh\nexec env PYTHONPATH={ROOT} {command} "$@"\n')
    (tmp_path / "muster").chmod(0o755)
    (tmp_path / "ca.pem").write_bytes(secure_cluster.authority.cacert.read_bytes())
    write(tmp_path / "root.password", ROOT_PASSWORD.encode())
    return [re.sub(r"https://etcd-0\S+", endpoints, block) for block in _BLOCK.findall(text)]


async def test_the_commands_of_the_page_do_what_it_says(
    page: list[str], secure_cluster: EtcdCluster, tmp_path: Path
) -> None:
    apply, print_, by_name, try_it, _in_pods = page
    here = f"cd {tmp_path}; PATH={tmp_path}:$PATH\n"
    exports = "".join(line for line in apply.splitlines(keepends=True) if "export" in line)
    done = await asyncio.to_thread(shell, secure_cluster, here + apply)
    assert (
        done == "muster/v1/team/digits may read and write what is under /muster/v1/team/digits/\n"
    )
    # What the job has no record of yet it may nevertheless look for.
    tried = f"{here}{exports}{try_it.strip()} 2>&1 || echo status $?"
    told = await asyncio.to_thread(shell, secure_cluster, tried)
    assert "no job digits in namespace team" in told
    other = tried.replace("--job digits", "--job digits-2")
    told = await asyncio.to_thread(shell, secure_cluster, other)
    assert "permission denied" in told
    assert "status 69" in told
    user = role = "muster/v1/team/digits"
    await asyncio.to_thread(
        shell, secure_cluster, f"etcdctl user delete {user}; etcdctl role delete {role}"
    )
    await asyncio.to_thread(shell, secure_cluster, here + print_)
    told = await asyncio.to_thread(shell, secure_cluster, tried)
    assert "no job digits in namespace team" in told
    await asyncio.to_thread(shell, secure_cluster, f"etcdctl role delete {role}")
    await asyncio.to_thread(shell, secure_cluster, here + by_name)
    told = await asyncio.to_thread(shell, secure_cluster, "etcdctl user get trainer.example")
    assert told.split() == ["User:", "trainer.example", "Roles:", role]


BLANK = "two words"
"""A password that etcdctl would cut short."""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("no/job",), "JOB or --user is wrong"),
        (("job", "--user", "a:b"), "without a colon"),
        (("job", "--apply"), "--new-password-file, or --no-password"),
        (("job", "--no-password", "--new-password-file", "f"), "exclude each other"),
        (("job", "--apply", "--new-password-file", "/none"), "--new-password-file"),
        (("job", "--apply", "--new-password-file", "{blank}"), "has a blank in it"),
    ],
)
async def test_a_mistake_in_store_role_is_told(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    path = await asyncio.to_thread(password_file, tmp_path, "p", BLANK)
    ended = await muster("store-role", *(word.format(blank=path) for word in words))
    assert (ended.status, ended.out) == (2, "")
    assert told in ended.err
    assert BLANK not in ended.err
    assert len(ended.err.splitlines()) == 1


def told_by(one: Sidecar) -> dict[str, str]:
    """Return what lies in ``/proc`` and in the run directory, by its place."""
    proc = Path(f"/proc/{one.process.pid}")
    kept = [path for path in one.run_dir.rglob("*") if path.is_file()]
    places = (proc / "cmdline", proc / "environ", proc / "comm", *kept)
    return {str(path): path.read_bytes().decode(errors="replace") for path in places}


def check_quiet(texts: dict[str, str], key: Path) -> None:
    """Check that none has the password, a line of the private key, or a token."""
    lines = [line for line in key.read_text().splitlines() if "KEY" not in line]
    for place, text in texts.items():
        assert PLANTED not in text, place
        assert TOKEN.search(text) is None, place
        assert not [line for line in lines if line in text], place


LOUD = """\
import logging
configure = logging.basicConfig
logging.basicConfig = lambda **given: configure(**{**given, "level": logging.DEBUG})
"""
"""Makes every library of a process that Python runs with it log all it can."""


async def lease_left_s(one: Sidecar) -> float:
    _, text = await one.get("/metrics")
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(numbers["muster_lease_remaining_seconds"])


async def test_secrets_are_told_to_nobody(secure_cluster: EtcdCluster, tmp_path: Path) -> None:
    """Through a start, a renewed token, a changed password, and a stop."""
    keys = JobKeys("default", "quiet")
    user = JobRole(keys).user_name
    await job_access(secure_cluster, keys)
    path = await asyncio.to_thread(password_file, tmp_path, "secret", PLANTED)
    words = ("user", "passwd", user, "--interactive=false")
    as_root = f"root:{ROOT_PASSWORD}"
    cert, key = await asyncio.to_thread(secure_cluster.authority.client, "somebody", "quiet")
    await asyncio.to_thread(secure_cluster.etcdctl, *words, user=as_root, stdin=PLANTED)
    access = secure_cluster.access(user=user, password_file=path, cert=str(cert), key=str(key))
    await asyncio.to_thread((tmp_path / "sitecustomize.py").write_text, LOUD)
    loud = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "GRPC_VERBOSITY": "DEBUG"}
    variables = {**environment(access), **loud, "MUSTER_JOB": "quiet"}
    run_dir = tmp_path / "run"
    async with sidecar("", run_dir, MUSTER_LEASE_TTL="3", **variables) as one:
        await one.until_ready()
        texts = await asyncio.to_thread(told_by, one)
        for page in ("/metrics", "/healthz", "/readyz"):
            texts[page] = (await one.get(page))[1]
        for words_ in (("status",), ("status", "--json"), ("hosts",), ("history", "--json")):
            ended = await muster(*words_, **variables)
            assert ended.status == 0, ended.err
            texts[" ".join(words_)] = ended.out + ended.err
        await asyncio.to_thread(secure_cluster.etcdctl, *words, user=as_root, stdin=PLANTED_NEXT)
        await until(lambda: any("does not let user" in line["message"] for line in one.lines))
        refused_command = await muster("status", **variables)
        assert refused_command.status == 69
        texts["refused"] = refused_command.out + refused_command.err
        drained = await impatient_muster("drain", "node-0", **variables)
        assert (drained.status, "does not let user" in drained.err) == (69, True)
        texts["drain refused"] = drained.out + drained.err
        # The sidecar outlives its lease, and goes on as soon as its file has the new password.

        async def lost() -> bool:
            return await lease_left_s(one) == 0

        async def renewed() -> bool:
            return await lease_left_s(one) > 1

        await until(lost)
        assert (await one.get("/healthz"))[0] == 200
        await asyncio.to_thread(password_file, tmp_path, "secret", PLANTED_NEXT)
        await until(renewed)
        await one.end()
    texts["log"] = "\n".join(map(str, one.lines))
    assert "debug" in texts["log"]
    texts["help"] = (await muster("agent", "--help", **variables)).out
    texts["faults"] = (await muster("agent", **{**variables, "MUSTER_MIN": "x"})).err
    assert texts["faults"]
    await asyncio.to_thread(check_quiet, texts, key)
    assert str(path) in texts[f"/proc/{one.process.pid}/environ"]
