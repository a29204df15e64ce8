# SPDX-License-Identifier: Apache-2.0
"""The command line as a newcomer meets it: help, versions, exit statuses, mistakes.

Each mistake prints what is wrong and what to type, and ends with 2. ``muster local`` has its own
(``test_local_checks.py``), and so has a store that answers
(``tests/contract/test_console_commands.py``).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import muster
from console import options
from console.job.reading import endpoint_is_local, outage_cause
from console.main import ALIASES, TASKS
from console.main import main as command_line
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


HERE = "and no store is named (nothing listens at 127.0.0.1:2379): start a job by muster local, or"


@pytest.fixture(autouse=True)
def usual_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens where the usual store would."""
    monkeypatch.setattr(options, "listens", lambda _: True)


MISTAKES = (
    (
        "stauts",
        2,
        "there is no command 'stauts': did you mean 'status'?\nmuster: see muster --help",
    ),
    ("xyzzy", 2, "there is no command 'xyzzy': muster --help lists them"),
    ("help stauts", 2, "there is no command 'stauts': muster --help lists them"),
    ("status --namspace x", 2, "No such option '--namspace'. Did you mean '--namespace'?"),
    ("status -o yaml", 2, "'yaml' is not one of 'json', 'wide'"),
    ("hosts -o wide", 2, "'wide' is not 'json'"),
    ("hosts --etcd-endpoints 127.0.0.1:1", 2, "no job is named: give its name, or set --job"),
    ("store --listen x", 2, "--listen"),
    ("history", 2, "no job is named: give its name, or set --job (MUSTER_JOB); muster list shows"),
    ("doctor", 2, "no job is named"),
    ("drain w-0", 2, "no job is named"),
    ("drain --job a", 2, "Missing argument 'MEMBER', or --node\nmuster: see"),
    ("store-role", 2, "JOB is missing"),
    ("status a --job b", 2, "two jobs are named, a and, by --job, b: name one"),
    ("status a --interval 1s", 2, "--interval is for --watch: give both, or neither"),
    ("status a -w --interval soon", 2, "--interval: 'soon' is wrong: expected a time such as 10s"),
    (
        "status a --etcd-endpoints localhost",
        2,
        "muster: --etcd-endpoints (MUSTER_ETCD_ENDPOINTS): 'localhost': expected host:port, for"
        " example etcd-0.etcd:2379\n",
    ),
    ("set a", 2, "nothing to set: give --min, --max"),
    ("set a --max eight", 2, "--max: 'eight' is wrong: expected a whole number"),
    ("status --kubeconfig x a", 2, "--kubeconfig: x cannot be read: No such file"),
    ("inject nosuch.yaml", 2, "nosuch.yaml cannot be read (No such file or directory): check the"),
    (
        "status a --etcd-endpoints nosuchhost.invalid:2379",
        69,
        "cannot reach the store at nosuchhost.invalid:2379 within",
    ),
    (
        "list --etcd-endpoints 127.0.0.1:1",
        69,
        "(connection refused: nothing listens there)\n"
        "muster: worlds that train go on; no pod joins or leaves until it answers\n"
        "muster: check --etcd-endpoints (MUSTER_ETCD_ENDPOINTS); is a port-forward down?",
    ),
)


Told = Callable[[str], tuple[object, str, str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Status, output and errors of a command line."""
    for name in ("JOB", "ETCD_ENDPOINTS"):
        monkeypatch.delenv(f"MUSTER_{name}", raising=False)

    def run(line: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["muster", *line.split()])
        with pytest.raises(SystemExit) as ended:
            command_line()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("line", "status", "said"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_says_what_is_wrong_and_what_to_type(
    told: Told, line: str, status: int, said: str
) -> None:
    code, out, err = told(line)
    assert (code, out) == (status, "")
    assert said in err
    assert all(one.startswith("muster: ") for one in err.splitlines())


@pytest.mark.parametrize(
    ("line", "job"),
    [("status", ""), ("why", ""), ("list", ""), ("history", ""), ("why a", "a"), ("status a", "a")],
)
def test_no_store_and_no_local_job_is_one_story_at_once(
    told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, job: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(options, "listens", lambda _: False)
    code, _, err = told(line)
    missing = f"no job {job}: " if job else ""
    assert code == 69
    assert err.startswith(f"muster: {missing}no muster local runs here, {HERE}")


def test_muster_alone_prints_its_help(told: Told) -> None:
    code, out, err = told("")
    assert (not code, err) == (True, "")
    assert out.startswith("Usage: muster ")


NO_ETCD = "what answers there is no etcd, but a web server or a proxy"


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("Failed to connect to remote host: Connection refused", "nothing listens there"),
        ("DNS resolution failed for nowhere:2379", "the name is not known"),
        (
            "hostname lookup error:address lookup failed: Could not contact DNS servers",
            "the name is not known, or no name server answers",
        ),
        ("CERTIFICATE_VERIFY_FAILED", "the certificates do not fit"),
        ("Range at 10.0.0.1:2379: Received http2 header with status: 404", NO_ETCD),
        ("ipv4:127.0.0.1:80: Failed parsing HTTP/2 (Expected SETTINGS frame as", NO_ETCD),
        ("UNIMPLEMENTED: Method not found", NO_ETCD),
        ("DEADLINE_EXCEEDED", "it does not answer"),
        ("", "it does not answer"),
        ("something new", "something new"),
    ],
)
def test_why_a_store_cannot_be_reached(trouble: str, said: str) -> None:
    assert outage_cause(trouble).endswith(said)
