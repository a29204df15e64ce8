# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/security.md, typed as they stand there."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.sidecars.processes import ROOT
from tests.support.store.certificates import write
from tests.support.store.etcd_cluster import EtcdCluster
from tests.support.store.secure import ROOT_PASSWORD, secure_cluster, shell

__all__ = ["secure_cluster"]

pytestmark = pytest.mark.etcd

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
