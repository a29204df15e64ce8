# SPDX-License-Identifier: Apache-2.0
"""Names of jobs and pods in the shell: soon, or none, and never an error."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from console import options as completion
from console.main import muster
from console.whereabouts import RunningJob, published_run

ASKED: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("{}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ASKED.clear()

    def names_in(options: object, **asked: Any) -> list[str]:
        ASKED.append({"options": options, **asked})
        return ["digits-0", "digits-1", "other-0"] if asked["pods"] else ["digits", "other"]

    monkeypatch.setattr("console.remote.pods.names_in", names_in)


def offered(line: str) -> list[str]:
    asked = {"_MUSTER_COMPLETE": "bash_complete", "COMP_WORDS": line}
    asked["COMP_CWORD"] = str(len(line.split(" ")) - 1)
    done = CliRunner().invoke(muster, [], env=asked, prog_name="muster", catch_exceptions=False)
    assert done.stderr == ""
    return [word.removeprefix("plain,") for word in done.output.split()]


@pytest.mark.parametrize("line", ["muster status di", "muster get di", "muster pause --job di"])
def test_jobs_of_the_cluster_are_offered(line: str) -> None:
    assert offered(line) == ["digits"]


def test_jobs_of_muster_local_are_offered_too() -> None:
    with published_run(RunningJob("127.0.0.1:1", "local", "dinner", os.getpid())):
        assert offered("muster status di") == ["digits", "dinner"]


def test_pods_of_the_job_are_offered() -> None:
    assert offered("muster drain --job digits -n team di") == ["digits-0", "digits-1"]
    (asked,) = ASKED
    assert (asked["job"], asked["options"].namespace) == ("digits", "team")


def test_nothing_is_offered_where_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_ETCD_ENDPOINTS", "e:1")
    assert offered("muster status di") == []


def test_an_error_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[str]:
        raise RuntimeError("no API server")

    monkeypatch.setattr("console.remote.pods.names_in", broken)
    assert offered("muster status di") == []


def test_a_slow_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def slow(*_: object, **__: object) -> list[str]:
        never.wait()
        return ["digits"]

    monkeypatch.setattr("console.remote.pods.names_in", slow)
    monkeypatch.setattr(completion, "PATIENCE_S", 0.05)
    assert offered("muster status di") == []
    never.set()
