# SPDX-License-Identifier: Apache-2.0
"""What of a command goes to a sidecar, and what is for this side."""

from __future__ import annotations

from importlib import import_module

import click
import pytest

from console.main import TASKS
from console.remote.passing import Passed, passed_on
from console.remote.pods import forbidden, steps_asked_for
from console.remote.sidecar import cut_sequence, harmless

PLACES = {name: one.place for task in TASKS.values() for name, one in task.items()}


def passed(line: str) -> Passed:
    name, *words = line.split()
    module, _, attribute = PLACES[name].partition(":")
    command: click.Command = getattr(import_module(module), attribute)
    return passed_on(command.make_context(name, words))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("status digits", "status"),
        ("status digits -w --interval 2s -o wide", "status --interval 2s -o wide --watch"),
        ("status --job digits -n team --context c --kubeconfig k --json", "status --json"),
        ("history digits --watch", "history --watch"),
        ("set digits --max 8 --gather 30s", "set --max 8 --gather 30s"),
        ("drain a-1 --job digits --wait", "drain --wait -- a-1"),
        ("drain a-1 --deadline 2m --cancel", "drain --deadline 2m --cancel -- a-1"),
        ("admit a-1", "admit -- a-1"),
        ("doctor digits --all", "doctor --all"),
        ("pause digits --reason x --wait", "pause --reason x --wait"),
    ],
)
def test_a_command_goes_as_it_was_typed(line: str, words: str) -> None:
    found = list(passed(line).words)
    assert sorted(found) == sorted(words.split())
    assert found[0] == words.split()[0]


def test_what_it_is_about_is_known_here() -> None:
    drain = passed("drain a-1 --wait")
    assert (drain.member, drain.follows, drain.is_view) == ("a-1", True, False)
    status = passed("status digits -w -o json")
    assert (status.follows, status.is_view, status.as_json) == (True, True, True)


def test_a_refusal_names_the_right_to_ask_for() -> None:
    told = (
        "the API server refused GET /api/v1/namespaces/team/pods with 403: pods is forbidden:"
        ' User "bob" cannot list resource "pods" in API group "" in the namespace "team"'
    )
    assert forbidden("muster status", "list pods", "team", told) == (
        "muster status may not list pods in namespace team: ask for that right, as in"
        ' docs/verbs.md#rights (Kubernetes: pods is forbidden: User "bob" cannot list resource'
        ' "pods" in API group "" in the namespace "team")'
    )


def test_a_refusal_of_all_namespaces_says_so() -> None:
    said = forbidden("muster list", "list pods", None, "no")
    assert said.startswith("muster list may not list pods in all namespaces: ask for that right")


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("torchrun train.py --max-steps 1000", 1000),
        ("torchrun train.py --max_steps=1_000", 1000),
        ("python -m train --train-iters 500 --lr 1", 500),
        ("accelerate launch x.py --max_train_steps=7", 7),
        ("torchrun train.py --save-steps 100", None),
        ("torchrun train.py --max-steps $STEPS", None),
        ("torchrun train.py --max-steps -1", None),
    ],
)
def test_the_last_step_is_read_from_the_launch_line(line: str, steps: int | None) -> None:
    assert steps_asked_for({"containers": [{"command": ["sh", "-c", line]}]}) == steps
    assert (
        steps_asked_for({"containers": [{"command": line.split()[:1], "args": line.split()[1:]}]})
        == steps
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n"),
        (
            "\x1b[1;31mred\x1b[0m \x1b[2K\x1b[3A\x1b[?25l",
            "\x1b[1;31mred\x1b[0m \x1b[2K\x1b[3A\x1b[?25l",
        ),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]52;c;cm0=\x1b\\\\", "\\x1b]52;c;cm0=\\x1b\\\\"),
        ("\x1b[?2004h\x1b[6n", "\\x1b[?2004h\\x1b[6n"),
        ("\x9b31m\x08", "\\x9b31m\\x08"),
    ],
)
def test_a_sidecars_words_do_no_more_to_the_terminal_than_musters(said: str, shown: str) -> None:
    assert harmless(said) == shown


@pytest.mark.parametrize("begun", ["\x1b", "\x1b[", "\x1b[1;3", "\x1b[?2"])
def test_a_sequence_in_two_pieces_stays_one(begun: str) -> None:
    assert cut_sequence(f"text{begun}") == ("text", begun)
    assert cut_sequence("\x1b[0mtext") == ("\x1b[0mtext", "")
