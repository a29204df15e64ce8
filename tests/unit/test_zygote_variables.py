# SPDX-License-Identifier: Apache-2.0
"""Which variables a module may read while a zygote imports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher_shim.pod.warm import worker


def imported(folder: Path, reads: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a zygote does without a module that does ``reads``; empty if it has it."""
    (folder / "reads_it.py").write_text(f"import os\n{reads}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "reads_it", raising=False)
    try:
        worker.load(["reads_it"], set())
    except worker.Unfit as error:
        return str(error)
    return ""


def test_a_variable_of_a_worker_alone_is_not_for_the_zygote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    for name in ("RANK", "NCCL_DEBUG", "HOROVOD_RANK"):
        assert name in imported(tmp_path, f"os.environ.get({name!r})", monkeypatch)


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_DEBUG"])
def test_a_variable_that_the_pod_has_is_known_to_the_zygote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "eth0")
    assert imported(tmp_path, "dict(os.environ)", monkeypatch) == ""
    assert imported(tmp_path, f"os.environ[{name!r}]", monkeypatch) == ""
