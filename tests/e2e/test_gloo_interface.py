# SPDX-License-Identifier: Apache-2.0
"""Ranks of two machines whose host names are in no DNS meet by Gloo, under ``muster-run`` alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.cut_node import CutNode, cut_node
from tests.support.sidecars.pod_programs import deliver
from tests.support.sources import ROOT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network namespace"),
]

SCRIPT = ROOT / "tests" / "support" / "scripts" / "meet_by_gloo.py"
DEADLINE_S = 600.0
"""Ends what hangs."""
NAMED = """\
import os, socket, sys
socket.sethostname(sys.argv[1])
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[CutNode]:
    with cut_node(six=request.param == 6) as node:
        yield node


def wrapper(directory: Path, address: str) -> tuple[str, str]:
    """Deliver ``muster-run`` to a pod of that address."""
    (directory / "bin").mkdir(parents=True)
    deliver(directory)
    (directory / "env").write_text(f"PET_LOCAL_ADDR={address}\n")
    return str(directory / "bin" / "muster-run"), "--"


def meet(tmp_path: Path, node: CutNode, *, wrapped: bool, timeout_s: int) -> list[tuple[int, str]]:
    """Let two ranks meet, one on each machine; return their statuses and outputs."""
    family = socket.AF_INET6 if ":" in node.outside else socket.AF_INET
    with socket.create_server((node.outside, 0), family=family) as taken:
        port = taken.getsockname()[1]
    environ = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    environ.pop("GLOO_SOCKET_IFNAME", None)
    ranks = []
    for rank, address in enumerate((node.outside, node.inside)):
        alone = ("unshare", "--uts", sys.executable, "-c", NAMED, f"alone-{rank}.invalid")
        before = wrapper(tmp_path / str(rank), address) if wrapped else ()
        place = (str(rank), node.outside, str(port), str(timeout_s))
        command = (*alone, *before, sys.executable, str(SCRIPT), *place)
        ranks.append(
            subprocess.Popen(
                node.command(*command) if rank else command,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [one.communicate(timeout=DEADLINE_S)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [(one.returncode, out) for one, out in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("node", [4, 6], indirect=True)
def test_they_meet_under_muster_run(tmp_path: Path, node: CutNode) -> None:
    for status, out in meet(tmp_path, node, wrapped=True, timeout_s=300):
        assert "both are here: 2" in out
        assert out.count("GLOO_SOCKET_IFNAME=") == 1
        assert "does not resolve to" in out
        assert status == 0


@pytest.mark.parametrize("node", [4], indirect=True)
def test_without_it_each_listens_at_its_own_loopback(tmp_path: Path, node: CutNode) -> None:
    for status, out in meet(tmp_path, node, wrapped=False, timeout_s=10):
        assert "Using the loopback address as fallback" in out
        assert "both are here" not in out
        assert status != 0
