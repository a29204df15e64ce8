# SPDX-License-Identifier: Apache-2.0
"""The user's own file of defaults, and where a command goes without a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from agent.job_config import JobConfig
from console.options import configured_by, job_named
from console.whereabouts import ClusterOptions, defaults_of_file, is_cluster_known
from rdzv.errors import ConfigError

GONE: list[tuple[ClusterOptions, str | None]] = []


def in_cluster(options: ClusterOptions, job: str | None) -> None:
    GONE.append((options, job))


@click.command()
@job_named
@configured_by(JobConfig, elsewhere=f"{__name__}:in_cluster")
def show(config: JobConfig) -> None:
    click.echo(f"{config.namespace}/{config.job} at {','.join(config.etcd_endpoints)}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(
        "console.options.import_module", lambda _: __import__("sys").modules[__name__]
    )
    monkeypatch.setattr("console.options.listens", lambda _: True)
    (tmp_path / "config" / "muster").mkdir(parents=True)
    GONE.clear()
    return tmp_path


def write(home: Path, text: str) -> None:
    (home / "config" / "muster" / "config.yaml").write_text(text)


def with_kubeconfig(home: Path) -> None:
    (home / ".kube").mkdir()
    (home / ".kube" / "config").write_text("{}")


def run(*words: str, **environ: str) -> str:
    done = CliRunner().invoke(show, words, env=environ, catch_exceptions=False)
    return done.stdout.strip()


STORE = {"MUSTER_ETCD_ENDPOINTS": "e:1"}


@pytest.mark.parametrize(
    ("kubeconfig", "words", "environ", "goes"),
    [
        (False, [], {}, "default/digits at 127.0.0.1:2379"),
        (True, ["-n", "team"], {}, ClusterOptions(None, None, "team")),
        (True, ["--etcd-endpoints", "e:1"], {}, "default/digits at e:1"),
        (True, [], STORE, "default/digits at e:1"),
        (False, ["--context", "prod"], STORE, ClusterOptions(None, "prod", None)),
    ],
    ids=["the default store", "a kubeconfig", "a store before it", "in the environment, too",
         "a cluster that is named before a variable"],
)  # fmt: skip
def test_where_a_command_goes(
    home: Path, kubeconfig: bool, words: list[str], environ: dict[str, str],
    goes: str | ClusterOptions,
) -> None:  # fmt: skip
    if kubeconfig:
        with_kubeconfig(home)
    by_store = isinstance(goes, str)
    assert run("digits", *words, **environ) == (goes if by_store else "")
    assert ([] if by_store else [(goes, "digits")]) == GONE


def test_a_cluster_and_a_store_are_not_named_at_once() -> None:
    with pytest.raises(ConfigError, match="give one"):
        run("digits", "--context", "prod", "--etcd-endpoints", "e:1")


def test_the_file_has_defaults_for_the_cluster(home: Path) -> None:
    with_kubeconfig(home)
    write(home, "namespace: team-a\ncontext: prod\nkubeconfig: ~/k\n")
    run("digits")
    run("digits", "-n", "team-b", "--context", "test")
    assert [one for one, _ in GONE] == [
        ClusterOptions(str(home / "k"), "prod", "team-a"),
        ClusterOptions(str(home / "k"), "test", "team-b"),
    ]


def test_the_file_has_defaults_for_the_store(home: Path) -> None:
    with_kubeconfig(home)
    write(home, "namespace: team-a\netcd-endpoints: e:1,e:2\n")
    assert run("digits") == "team-a/digits at e:1,e:2"
    assert run("digits", MUSTER_NAMESPACE="b") == "b/digits at e:1,e:2"
    assert GONE == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "it is no YAML"),
        ("- a", "expected lines of NAME: VALUE"),
        ("namespaces: a", "there is no setting 'namespaces': did you mean namespace?"),
        ("namespace: [a]", "namespace: expected a text"),
        ("namespace: a b", "namespace: 'a b' is wrong"),
        ("etcd-endpoints: ftp://x", "etcd-endpoints: 'ftp://x' is wrong"),
    ],
)
def test_wrong_content_is_one_sentence_with_the_path(home: Path, text: str, says: str) -> None:
    write(home, text)
    with pytest.raises(ConfigError) as error:
        defaults_of_file({"XDG_CONFIG_HOME": str(home / "config")})
    assert says in str(error.value)
    assert "config.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_empty_file_is_no_default(home: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(home / "config")}
    assert defaults_of_file(environ) == {}
    write(home, "# nothing yet\n")
    assert defaults_of_file(environ) == {}


def test_a_kubeconfig_that_does_not_exist_is_no_cluster(home: Path) -> None:
    with_kubeconfig(home)
    assert is_cluster_known({})
    assert not is_cluster_known({"KUBECONFIG": str(home / "none")})
    assert is_cluster_known({"KUBECONFIG": f"{home / 'none'}:{home / '.kube' / 'config'}"})


def test_without_the_package_the_store_is_used_and_a_word_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> Any:
        raise ModuleNotFoundError("no", name="aiohttp")

    with_kubeconfig(home)
    monkeypatch.setattr("console.options.import_module", missing)
    done = CliRunner().invoke(show, ["digits"])
    assert done.stdout == "default/digits at 127.0.0.1:2379\n"
    assert "without the package aiohttp: pip install" in done.stderr
    with pytest.raises(ConfigError, match="pip install"):
        run("digits", "--context", "prod")
