# SPDX-License-Identifier: Apache-2.0
"""How the command line of ``muster local`` is read, and what is wrong before it starts a node."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.job_config import JobConfig
from agent.verdict.view import JobView
from console.local import command, request
from console.local.launch_line import interpreter_of, script_fault
from console.local.settings import LocalSettings, Reach, read_event
from rdzv.errors import StoreUnavailable
from rdzv.records.policy import JobPolicy
from rdzv.snapshot import Snapshot, listing_of
from tests.support.records import member

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="muster local runs on Linux")

REACH = Reach(nodes=3, slots=2, sizes=JobPolicy(1, 4))


EVEN = Reach(nodes=4, slots=1, sizes=JobPolicy(2, 4, unit=2))


def faults(*texts: str, reach: Reach) -> list[str]:
    return list(reach.faults([read_event(text) for text in texts]))


@pytest.mark.parametrize(
    ("reach", "texts", "sentence"),
    [
        (REACH, ["kill:node-9@30s"], "there is no node-9: the nodes are node-0 to node-2"),
        (
            REACH,
            ["add@10s", "kill:node-4@30s"],
            "there is no node-4: the nodes are node-0 to node-3",
        ),
        (
            REACH,
            ["add@40s", "kill:node-3@30s"],
            "there is no node-3 so early: the nodes are node-0",
        ),
        (
            REACH,
            ["drain:rank6@30s"],
            "there is no rank 6; there are 3 nodes with 2 ranks each: rank",
        ),
        (REACH, ["kill:node-0@world8"], "no world of 8 ranks can form: the largest has 6"),
        (REACH, ["kill:node-0@world3"], "no world of 3 ranks can form: a node has 2"),
        (REACH, ["kill:launcher@3s"], "there is no launcher: torchrun runs on each node"),
        (
            EVEN,
            ["kill:rank0@world3"],
            "no world of 3 ranks can form: the sizes are min 2 and max 4, in multiples of 2",
        ),
    ],
)
def test_an_impossible_event_is_refused(reach: Reach, texts: list[str], sentence: str) -> None:
    (fault,) = faults(*texts, reach=reach)
    assert fault.startswith(f"--event {read_event(texts[-1])}: {sentence}")


@pytest.mark.parametrize(
    ("reach", "texts"),
    [
        (REACH, ["kill:node-2@30s", "drain:rank5@30s", "kill:node-0@world6+3s"]),
        (REACH, ["add@10s", "kill:node-3@30s", "kill:rank7@20s", "kill:rank0@world8"]),
        (REACH, ["add:node-7@10s", "kill:node-7@world2+1s"]),
        (REACH, ["kill:node-1@5s", "add:node-1@9s", "add:node-0@20s"]),
        (REACH, ["kill:rank0@world2", "kill:rank0@world4"]),
        (EVEN, ["kill:rank0@world4"]),
    ],
)
def test_an_event_that_may_fit_is_taken(reach: Reach, texts: list[str]) -> None:
    assert faults(*texts, reach=reach) == []


def local(tmp_path: Path, *words: str) -> Result:
    return CliRunner().invoke(command.local, ["--log-dir", str(tmp_path / "logs"), *words])


def said(result: Result) -> str:
    return " ".join(result.output.replace("\u2502", " ").split())


@pytest.fixture
def torchrun(tmp_path: Path) -> Path:
    """A torchrun whose Python has no torch."""
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    program = tmp_path / "bin" / "torchrun"
    program.parent.mkdir()
    program.write_text(f"#!{python} -IS\n")
    program.chmod(0o755)
    return program


def test_a_missing_torch_is_found(torchrun: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    refused = local(tmp_path, "--", str(torchrun), str(script))
    assert refused.exit_code == 2
    assert "cannot import torch: install torch there, or activate" in said(refused)
    assert not (tmp_path / "logs").exists(), "nothing is made for a run that does not start"


def test_a_launcher_that_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = local(tmp_path, "--", "torchrun", __file__)
    assert refused.exit_code == 2
    assert "torchrun is not found: activate the environment that it is installed in" in said(
        refused
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import os\ndef f(:\n", "train.py, line 2: invalid syntax: def f(:"),
        ("if True:\npass\n", "train.py, line 2: expected an indented block"),
        ("a = '\0'\n", "train.py: source code"),
    ],
)
def test_a_syntax_error_is_found(tmp_path: Path, text: str, sentence: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    fault = script_fault((sys.executable,), str(script), needs_torch=False)
    assert sentence in fault
    assert "\n" not in fault
    script.write_text("import nothing_of_that_name\nraise SystemExit(1)\n")
    assert script_fault((sys.executable,), str(script), needs_torch=False) == ""


def test_a_python_that_cannot_be_asked_is_no_fault(tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    for program in (str(hangs), str(tmp_path / "none"), "/bin/false"):
        assert script_fault((program,), "x.py", needs_torch=True, timeout_s=0.5) == ""


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("#!/opt/env/bin/python3\n", ("/opt/env/bin/python3",)),
        ("#!/opt/env/bin/python -E\n", ("/opt/env/bin/python", "-E")),
        ("#!/usr/bin/env python3\n", ("/usr/bin/env", "python3")),
        ('#!/bin/sh\n\'\'\'exec\' "/a b/bin/python3.12" "$0" "$@"\n', ("/a b/bin/python3.12",)),
        ("#!/bin/bash\nexec python -m torch.distributed.run\n", ()),
        ("\x7fELF", ()),
    ],
)
def test_the_python_of_a_launcher(tmp_path: Path, head: str, words: tuple[str, ...]) -> None:
    program = tmp_path / "torchrun"
    program.write_text(head)
    assert interpreter_of(program) == words
    assert interpreter_of(tmp_path / "none") == ()


def test_a_silent_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/none/{name}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = local(tmp_path, "--etcd-endpoints", f"127.0.0.1:{port}", "--", "torchrun", __file__)
    assert isinstance(refused.exception, StoreUnavailable)
    assert "cannot reach the store at 127.0.0.1" in str(refused.exception)
    assert not (tmp_path / "logs").exists()


def test_a_job_with_members_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(_: JobConfig) -> JobView:
        await asyncio.sleep(0)
        snapshot = Snapshot(5, members={name: member(name) for name in ("node-1", "node-0")})
        return JobView("local", "local", snapshot, listing_of(snapshot), (), (), {}, {})

    monkeypatch.setattr(request, "look", look)
    monkeypatch.setattr("shutil.which", lambda name: f"/none/{name}")
    refused = local(tmp_path, "--etcd-endpoints", "127.0.0.1:9", "--", "torchrun", __file__)
    assert refused.exit_code == 2
    assert "job local in namespace local is in use: node-0, node-1 are registered" in said(refused)
    assert not (tmp_path / "logs").exists()


def test_a_read_only_log_dir_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/none/{name}")
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may always write
    refused = local(tmp_path, "--", "torchrun", __file__)
    assert refused.exit_code == 2
    assert f"--log-dir {tmp_path}/logs: this user cannot write there" in said(refused)


LINE = ("--", "torchrun", __file__)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[LocalSettings]:
    """The settings of every job that would have been run."""
    seen: list[LocalSettings] = []

    async def run_session(settings: LocalSettings, *_: Any, **__: Any) -> int:
        await asyncio.sleep(0)
        seen.append(settings)
        return 0

    monkeypatch.setattr(command, "run_session", run_session)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return seen


def command_local(tmp_path: Path, *words: str, environ: Mapping[str, str] | None = None) -> Result:
    given = ("--log-dir", str(tmp_path), *words, *LINE)
    return CliRunner().invoke(command.local, given, env=dict(environ or {}))


@pytest.mark.parametrize(
    ("lease", "grace", "seconds"),
    [("10", "30", (10, 30)), ("12s", "45s", (12, 45)), ("1m", "1.5m", (60, 90))],
)
def test_times_are_written_as_for_the_sidecar(
    runs: list[LocalSettings], tmp_path: Path, lease: str, grace: str, seconds: tuple[float, float]
) -> None:
    by_flag = command_local(tmp_path, "--lease-ttl", lease, "--grace", grace)
    by_variable = command_local(
        tmp_path, environ={"MUSTER_LEASE_TTL": lease, "MUSTER_GRACE_S": grace}
    )
    assert (by_flag.exit_code, by_variable.exit_code) == (0, 0), by_flag.output + by_variable.output
    assert [(run.lease_ttl_s, run.grace_s) for run in runs] == [seconds, seconds]


def test_sizes_are_those_of_the_sidecars(runs: list[LocalSettings], tmp_path: Path) -> None:
    assert command_local(tmp_path, "--max", "4", "--unit", "2", "--gather", "5s").exit_code == 0
    assert command_local(tmp_path, "--max", "4", environ={"MUSTER_SIZES": "1,4"}).exit_code == 0
    assert [(run.policy.sizes, run.policy.unit, run.policy.gather_s) for run in runs] == [
        ((), 2, 5),
        ((1, 4), 1, 2),
    ]


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            ["--job", "my job", "--namespace", "a b"],
            ["--job (MUSTER_JOB): 'my job' is wrong", "--namespace (MUSTER_NAMESPACE): 'a b' is"],
        ),
        (
            ["--lease-ttl", "soon", "--grace", "0.5s"],
            [
                "--lease-ttl (MUSTER_LEASE_TTL): 'soon' is wrong: expected a time such",
                "--grace (MUSTER_GRACE_S): '0.5s' is wrong: expected 1s to",
            ],
        ),
        (["--nodes", "0"], ["--nodes 0: choose from 1 to 64"]),
        (["--min", "3"], ["--min 3: only 2 nodes start; lower --min, or start more by --nodes or"]),
        (["--max", "4", "--unit", "5"], ["no multiple of 5 lies between min 1 and max 4"]),
    ],
)
def test_all_that_is_wrong_is_told_at_once_and_nothing_is_run(
    runs: list[LocalSettings], tmp_path: Path, words: list[str], sentences: list[str]
) -> None:
    refused = command_local(tmp_path, *words)
    assert refused.exit_code == 2
    assert all(sentence in said(refused) for sentence in sentences)
    assert ("--min" in said(refused)) is ("--min" in words), "a wrong number is named once"
    assert runs == []


def test_the_demo_has_its_own_drill_and_script(runs: list[LocalSettings], tmp_path: Path) -> None:
    def demo(*words: str) -> Result:
        return CliRunner().invoke(command.local, ["--demo", "--log-dir", str(tmp_path), *words])

    assert demo().exit_code == 0
    assert demo("--nodes", "2").exit_code == 0
    assert [(run.nodes, run.policy.max_nodes) for run in runs] == [(3, 4), (2, 2)]
    for run in runs:
        words = run.line.command
        assert words[0] == "torchrun"
        assert Path(words[-1]).is_file()
    refused = demo("--", "torchrun", __file__)
    assert refused.exit_code == 2
    assert "--demo has a script of its own" in " ".join(refused.output.split())
