# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line: each prints what is wrong and what to type, and ends with 2.

``muster local`` has its own (``test_local_command.py``), a store that answers those of
``tests/contract/test_console_commands.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from console import options
from console.job.reading import outage_cause
from console.main import main as command_line

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
