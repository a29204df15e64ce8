# SPDX-License-Identifier: Apache-2.0
"""Drains as the handlers and the agent of an older torch live through them."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from older_torch import SETUP_TIMEOUT_S, python_with_torch

RUN_S = 600

# Its own torch comes first; all else is what this test runs with.
PYTEST = """
import sys
sys.path += [sys.argv[1], sys.argv[2]]
import pytest, torch
assert torch.__version__.startswith(sys.argv[3]), torch.__version__
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[4:]]))
"""


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(SETUP_TIMEOUT_S + RUN_S)
@pytest.mark.parametrize("module", ["test_leaving_rounds.py", "test_leaving_agents.py"])
def test_a_release_that_closes_the_rendezvous_at_sigterm(module: str) -> None:
    here = Path(__file__).parent
    root = here.parent.parent
    ran = subprocess.run(
        [
            *(python_with_torch("2.6.0"), "-c", PYTEST, sysconfig.get_paths()["purelib"]),
            *(str(root), "2.6.0", str(here / module)),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
