# SPDX-License-Identifier: Apache-2.0
"""docs/faq.md has the texts that people search for, as they see them."""

from __future__ import annotations

import pytest

from tests.support.sources import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
SEARCHED = (
    "Error waiting on exit barrier",
    "node_rank is only used for static rdzv_backend",
    "master_addr is only used for static",
    "The IPv6 network addresses of (",
    "cannot be retrieved (gai error: -2",
    "Name or service not known",
    "failed to connect to any network address",
    "Connection refused",
    "Unable to resolve hostname to a (local) address",
    "Gloo connectFullMesh failed",
    "Bootstrap : no socket interface found",
    "SignalException: Process ",
    " got signal: 15",
    "recvValue failed",
    "got 0 bytes",
    "sendBytes failed",
    "Broken pipe",
    "exitcode: -9",
    "KeyError: 'RANK'",
    "NODE_RANK is not set",
    "DistNetworkError",
    "DistStoreError",
    "EADDRINUSE",
    "timed out",
)
"""Of torch, NCCL, Gloo and libraries around them; without what varies."""


@pytest.mark.parametrize("text", SEARCHED)
def test_the_page_of_messages_has_the_text(text: str) -> None:
    headings = [line for line in PAGE.splitlines() if line.startswith("### ")]
    assert any(text in heading for heading in headings)
