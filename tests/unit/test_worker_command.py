# SPDX-License-Identifier: Apache-2.0
"""The shell text that horovodrun sends, taken apart, and the environment that comes of it."""

from __future__ import annotations

import subprocess
from shlex import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.horovod.exec.client import UsageError, read_arguments
from launcher_shim.horovod.exec.command import CommandError, merge_environment, read_command

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
