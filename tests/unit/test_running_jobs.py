# SPDX-License-Identifier: Apache-2.0
"""How commands find the job of a ``muster local``, and what two of them may not share."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from agent.job_config import AccessConfig, JobConfig, StoreConfig
from console import options
from console.job import jobs, status
from console.logs.command import logs
from console.options import configured_by, job_named
from console.remote.scalein import scalein
from console.remote.scaleout import scaleout
from console.whereabouts import RunningJob, found_running, locked, published_run, running_jobs
from rdzv.errors import ConfigError

STORE = "127.0.0.1:1234"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(options, "listens", lambda _: True)
    for name in ("ETCD_ENDPOINTS", "NAMESPACE", "JOB"):
        monkeypatch.delenv(f"MUSTER_{name}", raising=False)
    return tmp_path / "muster" / "local"


def job(name: str = "local", endpoints: str = STORE) -> RunningJob:
    return RunningJob(endpoints, "local", name, os.getpid())


@click.command()
@job_named
@configured_by(JobConfig)
def show(config: JobConfig) -> None:
    click.echo(f"{config.job} in {config.namespace} at {','.join(config.etcd_endpoints)}")


@click.command()
@configured_by(StoreConfig)
def other(config: StoreConfig) -> None:
    click.echo(",".join(config.etcd_endpoints))


@click.command()
@configured_by(AccessConfig)
@click.option("--namespace")
def all_jobs(config: AccessConfig, namespace: str | None) -> None:
    click.echo(",".join(config.etcd_endpoints))


def test_a_list_of_jobs_is_of_the_store_of_the_one_that_runs() -> None:
    with published_run(job()):
        assert CliRunner().invoke(all_jobs, []).stdout == f"{STORE}\n"
        assert CliRunner().invoke(all_jobs, ["--namespace", "x"]).stdout == "127.0.0.1:2379\n"


def test_a_status_without_a_job_is_of_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(jobs, "_show_all", lambda config, *_: shown.append(*config.etcd_endpoints))
    monkeypatch.setattr(status, "show", lambda config, *_, **__: shown.append(config.job))
    with published_run(job()):
        CliRunner().invoke(status.status, [], catch_exceptions=False)
    CliRunner().invoke(status.status, [], catch_exceptions=False)
    assert shown == ["local", "127.0.0.1:2379"]


@pytest.mark.parametrize("words", [["b"], ["--job", "b"]])
def test_of_several_the_named_one_is_shown(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(status, "show", lambda config, *_, **__: shown.append(config.job))
    with published_run(job("a")), published_run(job("b", "127.0.0.1:9")):
        CliRunner().invoke(status.status, words, catch_exceptions=False)
        assert isinstance(CliRunner().invoke(status.status, []).exception, ConfigError)
    assert shown == ["b"]


def test_a_command_finds_the_job_that_runs() -> None:
    with published_run(job()):
        ran = CliRunner().invoke(show, [])
        assert ran.stdout == "local in local at 127.0.0.1:1234\n"
        assert ran.stderr.startswith("muster: job local of muster local, pid ")
        assert CliRunner().invoke(show, ["local"]).stdout == ran.stdout
        another = CliRunner().invoke(show, ["x"])
        assert another.stdout == "x in default at 127.0.0.1:2379\n"
        assert "muster local runs job local here" in another.stderr
        assert "x is looked for at 127.0.0.1:2379" in another.stderr
        assert CliRunner().invoke(other, []).stdout == "127.0.0.1:2379\n"
    assert running_jobs() == []
    assert isinstance(CliRunner().invoke(show, []).exception, ConfigError)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ({"etcd_endpoints": "etcd:2379"}, {}),
        ({}, {"MUSTER_ETCD_ENDPOINTS": "etcd:2379"}),
        ({"namespace": "team"}, {}),
        ({}, {"MUSTER_JOB": "digits"}),
    ],
)
def test_a_store_or_another_job_that_is_named_counts(
    flags: dict[str, str | None], environ: dict[str, str]
) -> None:
    with published_run(job()):
        assert found_running(flags, environ) is None
        assert found_running({}, {}) == job()


def test_of_several_the_user_chooses() -> None:
    with published_run(job("a")), published_run(job("b", "127.0.0.1:9")):
        assert found_running({"job": "b"}, {}) == job("b", "127.0.0.1:9")
        with pytest.raises(ConfigError, match=r"a \(pid \d+, 127.0.0.1:1234\), b \(pid"):
            found_running({}, {})


def test_one_job_of_a_store_is_run_once() -> None:
    with published_run(job()):
        with pytest.raises(ConfigError, match=f"is in use by muster local, pid {os.getpid()}"):
            published_run(job()).__enter__()
        with published_run(job("another")):
            assert len(running_jobs()) == 2


def test_the_file_of_a_run_that_was_killed_is_stale(state: Path) -> None:
    code = (
        "import sys, time\n"
        "from console.whereabouts import RunningJob, published_run\n"
        "with published_run(RunningJob('127.0.0.1:1234', 'local', 'local', 7)):\n"
        "    print('there', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert [one.pid for one in running_jobs()] == [7]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert len(list(state.iterdir())) == 1
    assert running_jobs() == []
    assert list(state.iterdir()) == []
    with published_run(job()):
        assert running_jobs() == [job()]


def test_a_file_that_is_none_of_ours_does_no_harm(state: Path) -> None:
    state.mkdir(parents=True)
    with locked(state / "x.json", "no JSON", "x", "wait"), locked(state / "y.json", "[]", "y", ""):
        assert running_jobs() == []


def test_a_directory_of_logs_is_for_one_run(tmp_path: Path) -> None:
    file = tmp_path / ".muster-local"
    text = json.dumps({"pid": 42})
    with locked(file, text, "--log-dir logs", "choose another directory"):
        with pytest.raises(ConfigError) as refused:
            locked(file, text, "--log-dir logs", "choose another directory").__enter__()
        assert str(refused.value) == (
            "--log-dir logs is in use by muster local, pid 42: choose another directory"
        )
    assert not file.exists()


def test_a_read_only_home_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with published_run(job()) as known:
        assert not known
    assert running_jobs() == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_missing_locks_are_no_fault(
    code: int, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with published_run(job()) as known:
        assert not known
    with locked(state / "logs", "{}", "--log-dir logs", "choose another directory") as held:
        assert not held
    assert running_jobs() == []
    assert list(state.iterdir()) == []


def test_another_users_directory_is_no_fault(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.mkdir(parents=True)

    def refused(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refused)
    with published_run(job()) as known:
        assert not known


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def has_run(folder: Path, name: str, text: str, *, killed: bool = False) -> None:
    """Run a job whose only node writes ``text``."""
    (folder / "node-0").mkdir(parents=True)
    (folder / "node-0" / "torchrun.log").write_text(text)
    one = RunningJob(STORE, "local", name, os.getpid(), str(folder))
    if killed:
        one.file.parent.mkdir(parents=True, exist_ok=True)
        one.file.write_text(json.dumps(asdict(one)))
        return
    with published_run(one):
        pass


@pytest.mark.usefixtures("no_cluster")
def test_logs_of_a_job_that_has_ended_are_its_files(tmp_path: Path) -> None:
    has_run(tmp_path / "first", "digits", "old\n")
    has_run(tmp_path / "other", "other", "another job\n")
    has_run(tmp_path / "second", "digits", "epoch 1\nepoch 2")
    ran = CliRunner().invoke(logs, ["digits"], catch_exceptions=False)
    assert ran.stdout == "[node-0] epoch 1\n[node-0] epoch 2\n"
    assert "job digits of muster local has ended" in ran.stderr
    assert CliRunner().invoke(logs, ["digits", "--tail", "1", "-f"]).stdout == "[node-0] epoch 2\n"
    for option in (["--why"], ["--rank", "0"]):
        error = CliRunner().invoke(logs, ["digits", *option]).exception
        assert isinstance(error, ConfigError)
        assert "no longer known" in str(error)
    assert running_jobs() == []


@pytest.mark.usefixtures("no_cluster")
def test_logs_of_a_job_that_was_killed_are_found(tmp_path: Path) -> None:
    has_run(tmp_path / "killed", "digits", "epoch 1\n", killed=True)
    assert CliRunner().invoke(logs, []).stdout == "[node-0] epoch 1\n"


@pytest.mark.parametrize(
    "words", [(scaleout, "--count", "1"), (scalein, "--count", "1"), (scalein, "node-0")]
)
def test_a_job_of_muster_local_is_not_scaled(words: tuple[click.Command, ...]) -> None:
    command, *options = words
    with published_run(job("digits")):
        error = CliRunner().invoke(command, ["digits", *map(str, options)]).exception
    assert isinstance(error, ConfigError)
    assert "muster drain NODE takes one out after a save" in str(error)
