# SPDX-License-Identifier: Apache-2.0
"""Commands that a sidecar of a job runs: what goes to it, of which pods, and what comes back."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import click
import pytest

from console.job.drain_command import nothing_on, who_leaves, worst
from console.main import TASKS
from console.remote.node_drain import jobs_on
from console.remote.passing import Passed, passed_on
from console.remote.pods import JobPod, forbidden, job_pod, steps_asked_for
from console.remote.sidecar import LINE_MAX, Lines, StatusNews, cut_sequence, harmless, last_object
from controller.cluster.executed import Execution, Ran
from tests.support.containers import status_of

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
        ("torchrun train.py --max-steps " + "9" * 5000, None),
        ("torchrun train.py --max-steps=\u0664\u0662", None),
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


def message(channel: int, content: bytes) -> bytes:
    return bytes([channel]) + content


def taken(*messages: bytes) -> Ran | str:
    execution = Execution()
    for one in messages:
        execution.take(one)
    return execution.ended()


def status(ended: Ran | str) -> bytes:
    return message(3, json.dumps(status_of(ended)).encode())


def test_output_goes_to_its_reader_as_it_comes() -> None:
    heard: list[tuple[bool, str]] = []
    execution = Execution(lambda is_stderr, text: heard.append((is_stderr, text)))
    execution.take(message(1, b"now"))
    execution.take(message(2, b"why"))
    assert heard == [(False, "now"), (True, "why")]
    execution.take(status(Ran(1, "", "")))
    assert execution.ended() == Ran(1, "", "")


@pytest.mark.parametrize("channel", [1, 2, 3])
def test_a_pod_that_writes_without_end_takes_no_memory_without_end(channel: int) -> None:
    execution, piece = Execution(), message(channel, b"x" * 2**20)
    for _ in range(64):
        execution.take(piece)
    with pytest.raises(ValueError, match="more than 64 MiB"):
        execution.take(piece)


WELL = status(Ran(0, "", ""))


@pytest.mark.parametrize(
    ("messages", "ended"),
    [
        (
            (message(1, b"a\n"), message(2, b"warn\n"), message(1, b"b\n"), WELL),
            Ran(0, "a\nb\n", "warn\n"),
        ),
        ((status(Ran(66, "", "")),), Ran(66, "", "")),
        # A character that is split between messages, and bytes that are no text.
        ((message(1, b"\xe2\x86"), message(1, b"\x92"), WELL), Ran(0, "→", "")),
        ((message(1, b"\xff\xe2"), WELL), Ran(0, "\ufffd\ufffd", "")),
        ((message(1, b"a"),), "the connection ended before the command did"),
        ((status("no such container"),), "no such container"),
        ((message(3, b"{"),), "its status cannot be read: {"),
        ((message(3, b"[]"),), "its status cannot be read: []"),
        ((b"", message(9, b"new"), message(3, b"{}")), "it failed without a reason"),
    ],
)
def test_a_command_ends_with_output_and_status_or_with_a_reason(
    messages: tuple[bytes, ...], ended: Ran | str
) -> None:
    assert taken(*messages) == ended


RUNS: dict[str, Any] = {"state": {"running": {}}}


def pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "team",
            "name": "digits-0",
            "uid": "u",
            "labels": {"muster.dev/job": "digits"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "StatefulSet",
                    "name": "digits",
                    "uid": "s",
                    "controller": True,
                }
            ],
        },
        "spec": {
            "nodeName": "node-a",
            "initContainers": [{"name": "muster", "env": []}],
            "containers": [{"name": "trainer", "args": ["--max-steps=9"]}],
        },
        "status": status,
    }


def waiting(reason: str, **more: str) -> list[Any]:
    return [{"name": "trainer", "state": {"waiting": {"reason": reason, **more}}}]


def test_a_pod_that_trains() -> None:
    found = job_pod(
        pod(
            phase="Running",
            conditions=[{"type": "Ready", "status": "True"}],
            initContainerStatuses=[{"name": "muster", **RUNS}],
        ),
        frozenset({"node-a"}),
    )
    assert (found.job, found.name, found.node, found.phase) == (
        *("digits", "digits-0", "node-a", "Running"),
    )
    assert (found.ready, found.sidecar_runs, found.spot) == (True, True, True)
    assert (found.sidecar, found.containers, found.why_pending) == ("muster", ("trainer",), "")
    assert (found.maker, found.steps) == (("StatefulSet", "digits"), 9)
    assert found.owner is not None
    assert found.created_unix_s == 1767225600.0


def test_a_user_without_rights_to_nodes_knows_no_spot() -> None:
    assert job_pod(pod(phase="Running")).spot is None
    assert job_pod(pod(phase="Running"), frozenset()).spot is False


@pytest.mark.parametrize(
    ("phase", "status", "why"),
    [
        ("Running", {}, ""),
        (
            "Running",
            {"containerStatuses": waiting("CrashLoopBackOff", message="back-off 40s")},
            "CrashLoopBackOff: back-off 40s",
        ),
        (
            "Pending",
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no GPU"}]},
            "no GPU",
        ),
        (
            "Pending",
            {
                "initContainerStatuses": [{"name": "muster", **RUNS}],
                "containerStatuses": waiting("ImagePullBackOff", message="no tag"),
            },
            "ImagePullBackOff: no tag",
        ),
        ("Pending", {"containerStatuses": waiting("PodInitializing")}, "its containers start"),
    ],
)
def test_a_pod_says_why_it_does_not_run(phase: str, status: dict[str, Any], why: str) -> None:
    assert job_pod(pod(phase=phase, **status)).why_pending == why


def node_pod(name: str, node: str, *, runs: bool = True, phase: str = "Running") -> JobPod:
    return JobPod("team", name, f"uid-{name}", node=node, phase=phase, sidecar_runs=runs)


def test_pods_that_stay_are_asked_first() -> None:
    pods = [
        node_pod("d-0", "north"),
        node_pod("d-1", "south"),
        node_pod("d-2", "north"),
        node_pod("d-3", "east"),
    ]
    (job,) = jobs_on("north", [("digits", pods)])
    assert job.leave == ("d-0", "d-2")
    assert [one.name for one in job.pods] == ["d-1", "d-3", "d-0", "d-2"]


def test_a_pod_without_a_running_sidecar_is_told_apart() -> None:
    (job,) = jobs_on(
        "north", [("digits", [node_pod("d-0", "north"), node_pod("d-1", "north", runs=False)])]
    )
    assert (job.leave, job.rest) == (("d-0",), ("d-1",))


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_has_nothing_to_save(phase: str) -> None:
    assert jobs_on("north", [("digits", [node_pod("d-0", "north", runs=False, phase=phase)])]) == []


def test_jobs_come_by_name() -> None:
    here = [(name, [node_pod(f"{name}-0", "north")]) for name in ("letters", "digits")]
    elsewhere = ("words", [node_pod("words-0", "south")])
    assert [one.name for one in jobs_on("north", [*here, elsewhere])] == ["digits", "letters"]


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([], 0), ([0, 0], 0), ([0, 6], 6), ([6, 4], 4), ([4, 3, 0], 3), ([3, 5, 6], 5), ([5, 69], 69)],
)
def test_the_worst_end_counts(statuses: list[int], status: int) -> None:
    assert worst(statuses) == status


def test_who_leaves_is_one_sentence() -> None:
    assert who_leaves("d", ["a"], "north", 3) == "job d: a leaves node north; 2 of 3 stay"
    assert who_leaves("d", ["a", "b"], "north", 2) == "job d: a, b leave node north; 0 of 2 stay"


def test_an_empty_node_names_those_that_have_pods() -> None:
    said = nothing_on("nroth", "namespace team", ["south", "north", "north", ""])
    assert said == (
        "nothing to drain: namespace team has no pod on node nroth: they are on north, south"
    )
    assert nothing_on("north", "job d", []) == "nothing to drain: job d has no pod on node north"


FOLLOWED_RUNS = JobPod("team", "a", "uid-a", phase="Running", sidecar="muster", sidecar_runs=True)


def test_lines_are_whole() -> None:
    lines = Lines()
    pieces = ("a", "b\nc", "\n", "\nd", "e\nf")
    assert [lines.take(piece) for piece in pieces] == [[], ["ab"], ["c"], [""], ["de"]]


@pytest.mark.parametrize("before", ["", "whole\n", "x" * (LINE_MAX // 2)])
def test_a_line_that_is_too_long_is_refused(before: str) -> None:
    lines = Lines()
    lines.take(before)
    with pytest.raises(ValueError, match="a line of more than 1 MiB"):
        lines.take("x" * (LINE_MAX + 1))
    with pytest.raises(ValueError, match="a line of more than 1 MiB"):
        Lines().take("x" * (LINE_MAX + 1) + "\n")


def test_many_lines_may_come_at_once() -> None:
    assert len(Lines().take("y" * 1000 + ("\n" + "x" * 1000) * 3000)) == 3000


def test_news_are_whole_objects() -> None:
    news = StatusNews([FOLLOWED_RUNS])
    news.take('{"job": "digits"}')
    news.take("muster: a remark")
    assert news.status == {"job": "digits"}
    assert news.trouble == "what its sidecar says cannot be read"
    news.fail("its pod went")
    assert (news.status, news.trouble) == ({"job": "digits"}, "its pod went")
    news.take('{"job": "again"}')
    assert (news.status, news.trouble) == ({"job": "again"}, "")


def test_nothing_is_known_of_a_job_whose_sidecars_have_ended() -> None:
    news = StatusNews([FOLLOWED_RUNS])
    news.take('{"job": "digits"}')
    news.pods = []
    news.fail("no pod has a running sidecar")
    assert news.status is None


def test_the_last_object_of_a_text() -> None:
    assert last_object('{"a": 1}\n{"b": 2}\nmuster: a remark\n') == {"b": 2}
    assert last_object("[]\n" + "[" * 100_000) is None
