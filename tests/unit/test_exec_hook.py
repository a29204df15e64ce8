# SPDX-License-Identifier: Apache-2.0
"""How long a hook looks for a way to its agent; the shell text of horovodrun, taken apart."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.horovod.exec import client
from launcher_shim.horovod.exec.client import RemoteCommand, UnknownEnd, UsageError, read_arguments
from launcher_shim.horovod.exec.command import CommandError, merge_environment, read_command
from launcher_shim.rundir.exec_frames import ATTACHED, EXIT, LEASE_TTL_S, encode, patience_s

PATIENCE_S = patience_s(LEASE_TTL_S)


class Connection:
    """A connection to a sidecar that ends at ``until_s``, or brings the command's end."""

    def __init__(self, times: Times, until_s: float, answers: bytes) -> None:
        self._times = times
        self._until_s = until_s
        self._answers = answers

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, size: int) -> bytes:
        answers, self._answers = self._answers, b""
        if not answers:
            self._times.now_s = self._until_s
        return answers


class Times:
    """Time that passes only by waiting; a sidecar listens in each of ``spans``.

    The last one has a way to the agent.
    """

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self.now_s = 0.0
        self._spans = spans

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic(self) -> float:
        return self.now_s

    def connect(self, host: str) -> Connection:
        for number, (from_s, until_s) in enumerate(self._spans, 1):
            if from_s <= self.now_s < until_s:
                last = encode(ATTACHED) + encode(EXIT, b"7", 1)
                return Connection(self, until_s, last if number == len(self._spans) else b"")
        raise ConnectionRefusedError("nothing listens there")


@pytest.fixture(autouse=True)
def _of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", str(tmp_path))


def run(monkeypatch: pytest.MonkeyPatch, *spans: tuple[float, float]) -> int:
    times = Times(spans)
    monkeypatch.setattr(client, "time", times)
    monkeypatch.setattr(client, "connect", times.connect)
    return RemoteCommand("node-0.1a2b3c4d", "true").run()


def test_i5_sidecars_that_know_no_way_while_the_store_is_away_end_no_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each gap is within its patience, all of them together are not.
    assert run(monkeypatch, (6, 106), (112, 130), (137, 145), (150, 200)) == 7


@pytest.mark.parametrize(
    "spans",
    [
        [(PATIENCE_S + 1, 100)],
        # A sidecar that ends as soon as it has begun is none.
        [(8, 8.5), (16.5, 17), (25, 100)],
        [(8, 8.5), (8.5 + PATIENCE_S + 1, 100)],
    ],
)
def test_where_no_sidecar_stays_the_end_is_unknown(
    monkeypatch: pytest.MonkeyPatch, spans: list[tuple[float, float]]
) -> None:
    with pytest.raises(UnknownEnd, match="there is no way to host"):
        run(monkeypatch, *spans)


HOROVOD = {"HOROVOD_HOSTNAME": "node-0.1a2b3c4d", "HOROVOD_RANK": "3", "HOROVOD_LOCAL_RANK": "1"}


def as_horovod_sends(directory: str, environ: dict[str, str], argv: list[str]) -> str:
    told = " ".join(f"{name}={value}" for name, value in HOROVOD.items())
    sent = " ".join(f"{name}={quote(value)}" for name, value in environ.items())
    words = " ".join(map(quote, argv))
    return f"cd {directory} > /dev/null 2>&1 ; env {told} {sent} HOROVOD_CONTROLLER=gloo {words}"


names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("HOROVOD")
)
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
programs = texts.filter(lambda text: text and "=" not in text)


@given(st.dictionaries(names, texts, max_size=5), programs, st.lists(texts, max_size=4))
def test_what_is_taken_apart_is_what_was_meant(
    environ: dict[str, str], program: str, arguments: list[str]
) -> None:
    command = read_command(as_horovod_sends("/home/user/training", environ, [program, *arguments]))
    assert command.directory == "/home/user/training"
    assert command.argv == (program, *arguments)
    assert {name: command.environment[name] for name in environ} == environ
    assert (command.host, command.local_rank) == ("node-0.1a2b3c4d", 1)


def test_it_runs_as_the_shell_would_run_it() -> None:
    tricky = ["$HOME", "a b", "'", '"', "\\", "*", ";", "\n", "é", "x=y", ""]
    text = as_horovod_sends("/", {"TRICKY": "'; $(exit 3)"}, ["printf", "%s|", *tricky])
    by_shell = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True).stdout
    command = read_command(text)
    by_us = subprocess.run(command.argv, capture_output=True, check=True).stdout
    assert by_us == by_shell == "".join(f"{word}|" for word in tricky).encode()


def test_a_directory_with_blanks_is_the_one_that_was_meant() -> None:
    assert read_command(as_horovod_sends("/my work", {}, ["true"])).directory == "/my work"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reboot",
        "cd /x",
        "cd /x > /dev/null 2>&1 ; reboot",
        "cd /x > /etc/passwd 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=0 true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=0",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_LOCAL_RANK=0 true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=-1 true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=² true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=0 'true",
        "cd /x > /dev/null 2>&1 ; env HOROVOD_HOSTNAME=a HOROVOD_LOCAL_RANK=0 tr\0ue",
    ],
)
def test_i8_what_horovodrun_would_not_send_is_refused(text: str) -> None:
    with pytest.raises(CommandError):
        read_command(text)


@given(st.text(max_size=100))
def test_i8_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        command = read_command(text)
    except CommandError:
        return
    assert command.argv


def test_the_pods_own_environment_stands_but_for_what_horovod_tells() -> None:
    own = {"PATH": "/pod", "MODE": "pod", "HOROVOD_RANK": "9", "MUSTER_MEMBER": "node-1"}
    sent = {
        "PATH": "/launcher",
        "HOSTNAME": "launcher",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "MUSTER_MEMBER": "launcher",
        "MUSTER_RUN_DIR": "/launcher",
        "PYTHONPATH": "/launcher",
        "MODE": "launcher",
        "SEED": "7",
        "HOROVOD_RANK": "0",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert merge_environment(own, sent) == {
        "PATH": "/pod",
        "MODE": "pod",
        "MUSTER_MEMBER": "node-1",
        "SEED": "7",
        "HOROVOD_RANK": "0",
        "NCCL_SOCKET_IFNAME": "lo",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["node-0.1", "cd / ; env true"],
        ["-o", "PasswordAuthentication=no", "-o", "A=no", "node-0.1", "cd / ; env true"],
        ["-o", "A=no", "node-0.1", "-p", "22", "-i", "key", "cd / ; env true"],
        ["node-0.1", "cd", "/", ";", "env true"],
    ],
)
def test_host_and_command_of_either_form(arguments: list[str]) -> None:
    assert read_arguments(arguments) == ("node-0.1", "cd / ; env true")


@pytest.mark.parametrize(
    "arguments",
    [[], ["node-0"], ["-v", "node-0", "x"], ["../x", "x"], ["", "x"], ["a/b", "x"], ["a\n", "x"]],
)
def test_other_forms_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        read_arguments(arguments)
