# SPDX-License-Identifier: Apache-2.0
"""The command line as a newcomer meets it: help, versions, mistakes, exit statuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import muster
from console.job.reading import endpoint_is_local
from console.main import ALIASES, TASKS
from console.main import muster as program
from tests.support.sources import ROOT

COMMANDS = [name for commands in TASKS.values() for name in commands]


def helped(*arguments: str) -> str:
    outcome = CliRunner().invoke(program, [*arguments, "--help"], terminal_width=100)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_help_begins_where_a_newcomer_starts() -> None:
    shown = helped()
    assert shown == CliRunner().invoke(program, [], terminal_width=100).output
    assert shown.index("\nExamples:\n") < shown.index("\nOptions:\n")
    places = [shown.index(f"\n{task}:\n") for task in TASKS]
    assert places == sorted(places)
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_first_and_exit_statuses_last(name: str) -> None:
    shown = helped(name)
    if name not in ("version", "controller"):
        assert shown.index("\nExample") < shown.index("\nOptions:\n")
    assert "\nExit status:\n  0 " in shown
    sections = ("\nStore:\n", "\nCluster:\n")
    assert any(one in shown for one in sections) == ("\n  69 " in shown)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal_and_names_variables_in_one_way(name: str) -> None:
    shown = CliRunner().invoke(program, [*name.split(), "--help"], terminal_width=80).output
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    words = " ".join(shown.split())
    assert "[MUSTER_" not in words
    assert ("--job NAME" in words) <= ("env var: MUSTER_JOB" in words or name == "store-role")


def test_help_says_that_the_job_may_be_named_in_other_ways() -> None:
    for name in ("status", "doctor", "drain"):
        text = " ".join(helped(name).split())
        assert "env var: MUSTER_JOB" in text
        assert "required" not in text


def test_options_of_the_store_are_shown_once() -> None:
    topic = CliRunner().invoke(program, ["help", "store-options"]).output
    for flag in ("--etcd-endpoints", "--etcd-cacert", "--etcd-user", "--store-driver"):
        assert flag in topic
    assert "--etcd-cacert" not in helped("status")
    assert "muster help store-options" in helped("status")
    assert helped("status") == CliRunner().invoke(
        program, ["help", "status"], terminal_width=100
    ).output.replace("muster  status", "muster status")


@pytest.mark.parametrize(("name", "command"), ALIASES.items())
def test_a_short_name_is_a_command(name: str, command: str) -> None:
    assert helped(name) == helped(command).replace(f"muster {command} [", f"muster {name} [")


@pytest.mark.parametrize("code", ["--help", "status --help"])
def test_help_imports_no_client_of_the_store(code: str) -> None:
    """What costs processor time: grpc, rich and the training library have no part in a help."""
    words = f"import sys; sys.argv = ['muster', *{code.split()}]"
    run = "from console.main import main\ntry: main()\nexcept SystemExit: print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", f"{words}\n{run}"], capture_output=True, text=True, check=True
    )
    loaded = set(told.stdout.split())
    unwanted = {"rich", "muster.draining", "difflib", "importlib.metadata", "uvloop"}
    unwanted |= {"aiohttp", "kubernetes"}
    unwanted |= {"grpc", "asyncio"} if code == "--help" else set()
    assert loaded & unwanted == set()


def test_status_imports_no_rule_that_a_job_that_trains_has_no_use_for() -> None:
    """Nearly all of its processor time is imports: the sidecar's decisions have no part in it."""
    run = "import sys, console.main, console.job.status; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    loaded = set(told.stdout.split())
    unwanted = {"muster", "agent.config", "rdzv.drain.decision", "rdzv.drain.inputs"}
    unwanted |= {"rdzv.job", "launcher_shim.c10d.rounds.decision", "rich", "aiohttp", "kubernetes"}
    assert loaded & unwanted == set()


@pytest.mark.parametrize("missing", ["aiohttp", "kubernetes"])
@pytest.mark.parametrize("code", ["doctor --cluster", "controller --own-namespace muster-system"])
def test_a_command_about_a_cluster_says_what_to_install(code: str, missing: str) -> None:
    words = f"import sys; sys.modules['{missing}'] = None; sys.argv = ['muster', *{code.split()}]"
    done = subprocess.run(
        [sys.executable, "-c", f"{words}\nfrom console.main import main\nmain()"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"without the package {missing}" in done.stderr
    assert "pip install 'muster-elastic[controller]'" in done.stderr


@pytest.mark.parametrize(
    ("words", "offered"), [("muster dr", "plain,drain"), ("muster status --wi", "plain,--wide")]
)
def test_words_are_completed(words: str, offered: str) -> None:
    asked = {"_MUSTER_COMPLETE": "bash_complete", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split()) - 1)
    shown = CliRunner().invoke(program, [], env=asked, prog_name="muster").output
    assert shown.split() == [offered]


def test_help_and_its_page_say_how_words_are_completed() -> None:
    line = 'eval "$(_MUSTER_COMPLETE=bash_source muster)"'
    assert line in helped()
    assert line in (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["status", "drain", "agent"])
def test_settings_of_the_store_come_after_the_commands_own(name: str) -> None:
    shown = helped(name)
    assert shown.index("--job") < shown.index("\nStore:\n") < shown.index("--etcd-endpoints")


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_version_names_what_a_report_needs(arguments: list[str]) -> None:
    shown = CliRunner().invoke(program, arguments).output
    assert shown.startswith(f"muster {muster.__version__}")
    assert all(word in shown for word in ("store schema 1", "python 3.", "torch"))


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("127.0.0.1:2379", True),
        ("localhost:2379", True),
        ("[::1]:2379", True),
        ("etcd:2379", False),
        ("https://127.0.0.1:2379", False),
    ],
)
def test_a_store_of_ones_own_is_only_offered_on_this_machine(endpoint: str, local: bool) -> None:
    assert endpoint_is_local(endpoint) is local
