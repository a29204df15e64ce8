# SPDX-License-Identifier: Apache-2.0
"""What ``muster doctor JOB`` says of a job: why it stands still, and the one thing to do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest

from agent.verdict.decision import cure
from agent.verdict.states import STATES, Check, State
from agent.verdict.view import JobView
from console.doctor.command import the_one_thing
from console.doctor.job import Finding, explain
from launcher_shim.c10d.rounds.records import Round
from rdzv.keys import JobKeys
from rdzv.peers import Unreached
from rdzv.records.drain import Commit, Drain, LastCommit
from rdzv.records.job import HistoryEntry
from rdzv.records.progress import PodSaves
from rdzv.records.quarantine import Quarantine
from rdzv.records.troubles import Bypass
from tests.support.records import member
from tests.support.sources import ROOT
from tests.support.views import ASKS, FAILED, NOW_S, reported, run, view

OF_A_JOB = "The states of a job"
PAGE = (ROOT / "docs" / "stuck.md").read_text(encoding="utf-8")
ASKING = run(Round(3), ASKS)


def found(seen: JobView, check: str) -> list[tuple[str, str, str]]:
    findings = [one for one in explain(seen, NOW_S) if one.check == check]
    return [(one.level, one.sentence, one.remedy) for one in findings]


def of_a_member(name: str, **changes: object) -> tuple[object, ...]:
    return (replace(member(name), **changes),)  # type: ignore[arg-type]


def test_a_job_in_order_has_nothing_to_be_done() -> None:
    seen = view(run(), saves=reported(10, 2), last_commit=LastCommit(10, 3, 0, run="digits"))
    findings = explain(seen, NOW_S)
    assert {one.level for one in findings} == {"ok"}
    assert the_one_thing(findings) is None


def test_a_job_that_starts_or_gathers_has_nothing_to_be_done() -> None:
    for seen in (view(), view(ASKING, least=2)):
        findings = explain(seen, NOW_S)
        assert {one.level for one in findings} == {"note", "ok"}
        assert the_one_thing(findings) is None


def test_a_neighbour_that_no_sidecar_can_watch_is_named() -> None:
    seen = replace(view(run()), unreached={"a": Unreached(("b", "c"))})
    ((level, sentence, remedy),) = found(seen, "peers")
    assert level == "note"
    assert "a cannot reach the sidecar of b, c" in sentence
    assert "9400" in remedy
    assert the_one_thing(explain(seen, NOW_S)) is None


def test_a_fault_or_a_warning_always_has_a_remedy() -> None:
    states = (view(run(), saves=reported(1, 301)), view(least=3), failing("", "x"), view(names=""))
    for seen in states:
        for one in explain(seen, NOW_S):
            assert one.remedy or one.level in ("ok", "note"), one


def test_a_job_that_the_store_does_not_have_is_named() -> None:
    ((level, sentence, remedy),) = found(view(names=""), "members")
    assert (level, sentence) == ("warning", "the store has no job digits in namespace team")
    assert remedy == "see whether its pods have started, and have the sidecar"
    (finding,) = explain(view(names=""), NOW_S, [JobKeys("team", "digit")])
    assert finding.remedy == "did you mean digit?"


ECC = replace(FAILED, kind="RuntimeError", text="CUDA error: uncorrectable ECC error", count=7)


def failing(kind: str, text: str, *names: str) -> JobView:
    one = replace(FAILED, kind=kind, text=text, count=7)
    failures = {name: replace(one, member=name) for name in names or "b"}
    return view(ASKING, failures=failures, members=of_a_member("b", node="gpu-17"))


def test_a_node_of_this_machine_has_no_image() -> None:
    one = replace(FAILED, kind="ModuleNotFoundError", text="No module named 'x'")
    failures = {name: replace(one, member=name) for name in "ab"}
    here = [member for name in "ab" for member in of_a_member(name, node=name)]
    do = cure(view(ASKING, failures=failures, members=here), one)
    assert do == "the nodes' environment lacks it, or has another version: use the right one"


@pytest.mark.parametrize(
    ("seen", "do"),
    [
        (
            failing("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
            "replace the GPU of b on gpu-17: kubectl cordon its node, then muster drain b --job",
        ),
        (failing("OutOfMemoryError", "CUDA out of memory"), "use a smaller batch"),
        (
            failing("ModuleNotFoundError", "No module named 'apex'"),
            "b's image or environment lacks it",
        ),
        (
            failing("ModuleNotFoundError", "No module named 'x'", "a", "b"),
            "the pods' image or environment lacks",
        ),
        (
            failing("FileNotFoundError", "No such file or directory: '/data'"),
            "see that b's volumes are mounted at the paths that the script opens, and may be read:"
            " kubectl describe pod b",
        ),
        (
            failing("ImportError", "x"),
            "b's image or environment lacks it, or has another version: use the right one:"
            " kubectl describe pod b",
        ),
        (failing("OSError", "[Errno 28] No space left on device"), "make room on the volume"),
        (
            failing("RuntimeError", "ifa != nullptr. Unable to find address for: eth9"),
            "see that ranks reach each other from b: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        ),
        (
            failing("", "a worker ended and reported no Python error"),
            "see whether memory ran out (OOMKilled, exit code 137): kubectl describe pod b; then",
        ),
        (failing("ValueError", "bad shape"), "read the log of b's training container; if its mach"),
        (failing("ValueError", "bad shape", "a", "b"), "read the log of"),
        (view(least=3), "see why pods are missing: kubectl get pods; to train"),
        (view(run(), paused=True), "muster resume --job digits"),
        (view(run(), saves=reported(1204, 301)), "see where each rank hangs: py-spy dump"),
        (
            view(bypasses={"a": Bypass("unseen", "nothing is known of a torchrun")}),
            "see whether its training container runs, and if not why (image, volumes): kubectl",
        ),
        (
            view(ASKING, least=2, bypasses={"b": Bypass("absent", "it has started none")}),
            "read the log of b's training container; its command has to start torchrun",
        ),
    ],
)
def test_the_one_thing_to_do_is_the_cure_with_kubectl_in_a_cluster_alone(
    seen: JobView, do: str
) -> None:
    first = the_one_thing(explain(seen, NOW_S))
    assert first is not None
    assert first[: len(do)] == do
    members = {name: replace(one, node=name) for name, one in seen.snapshot.members.items()}
    on_this_machine = replace(seen, snapshot=replace(seen.snapshot, members=members))
    here = the_one_thing(explain(on_this_machine, NOW_S))
    assert here is not None
    assert "kubectl" not in here
    assert "{" not in first + here


def test_a_failure_that_all_share_is_no_machines() -> None:
    (first, *_) = explain(failing("ValueError", "bad shape", "a", "b"), NOW_S)
    assert "2 pods fail alike" in first.remedy
    assert "muster drain" not in first.remedy


def test_a_save_that_does_not_fit_the_grace_is_a_warning() -> None:
    slow = PodSaves("b", "uid-b", "digits", 3, save_s=40.0, grace_s=30.0, reserve_s=5.0)
    ((level, sentence, remedy),) = found(view(run(), saves={"b": slow}), "saves")
    assert level == "warning"
    assert sentence.startswith("saves take 40 s, and b has 25 s in a drain (grace 30 s - 5 s res")
    assert remedy.startswith("set terminationGracePeriodSeconds and MUSTER_GRACE_S to ")


def test_an_expired_drain_and_steps_that_are_not_saved_are_warnings() -> None:
    late = HistoryEntry("drain", "b", "", NOW_S - 9, {"outcome": "expired"})
    seen = view(run(), history=(late,), saves=reported(38, 2))
    sentences = [sentence for _, sentence, _ in found(seen, "saves")]
    assert sentences[0].startswith("the last drain, of b, expired")
    assert sentences[1] == "no save is complete: 38 steps are at risk"


@pytest.mark.parametrize(
    ("ago_s", "b_steps", "said"),
    [
        (5.0, (), ""),
        (31.0, (), "step 40 is not saved by all ranks: b missing"),
        (5.0, (20,), ""),
        (5.0, (10,), "step 40 is not saved by all ranks: b missing"),
    ],
)
def test_when_a_save_is_late(ago_s: float, b_steps: tuple[int, ...], said: str) -> None:
    """A member is late if it has not reported the save before the newest either."""
    at = NOW_S - ago_s
    saves = {"a": PodSaves("a", "uid-a", "digits", 3, (40, 20), 40, 44, at)}
    if b_steps:
        saves["b"] = PodSaves("b", "uid-b", "digits", 3, b_steps, b_steps[0], 44, at)
    else:
        saves["a"] = replace(saves["a"], steps=(40,))
    seen = view(run(), saves=saves, last_commit=LastCommit(10, 3, 0, run="digits"))
    assert seen.last_save is not None
    assert seen.last_save.late(NOW_S) == said


def test_quarantines_and_drains_are_named() -> None:
    out = Quarantine("b", "uid-b", 3, "n", out=True)
    seen = view(run(), quarantines={"b": out})
    ((level, sentence, remedy),) = found(seen, "quarantine")
    assert level == "warning"
    assert sentence.startswith("b is quarantined: its torchrun has died 3 times")
    assert remedy.endswith("muster admit b --job digits")
    drain = Drain("uid-b", "b", "spot", "hand", 30.0)
    held = Commit(1, "digits", 3, "void", leaving=("uid-b",), reason="b waits: too few others")
    ((level, sentence, _),) = found(view(run(), drains={"uid-b": drain}), "drains")
    assert (level, sentence) == (
        "note",
        "b drains (it had 30 s): b is delisted, and no save has begun",
    )
    ((level, _, remedy),) = found(view(run(), drains={"uid-b": drain}, commit=held), "drains")
    assert level == "warning"
    assert remedy == "start another pod, or: muster drain b --job digits --cancel"


def table(heading: str) -> list[list[str]]:
    """The rows of the table below a heading of the page."""
    part = re.split(r"^## ", PAGE.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_page_has_the_states_and_the_questions_of_the_code() -> None:
    states = [(row[0].strip("`"), *row[1:3], row[3].strip("`")) for row in table(OF_A_JOB)]
    assert states == [(name, one.meaning, one.level, one.event) for name, one in STATES.items()]
    assert set(STATES) == set(get_args(State))
    assert [row[0].strip("`") for row in table("Ten questions")] == list(get_args(Check))


def entry(revision: int, member: str, at_unix_s: float) -> HistoryEntry:
    return HistoryEntry("join", member, "", at_unix_s, revision=revision)


def clocks(*history: HistoryEntry, **nodes: str) -> Finding | None:
    """What is found of the clocks."""
    members = tuple(replace(member(name), node=node) for name, node in nodes.items())
    seen = replace(view(members=members), history=history)
    findings = explain(seen, 1000.0)
    return next((finding for finding in findings if finding.check == "clocks"), None)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({1: 900.0, 2: 960.0, 3: 920.0}, "of b on host is 40 s or more ahead of that of a: "),
        ({1: 1030.0}, "of a on host is 30 s or more ahead of that of this machine: "),
        ({1: 1030.0, 2: 1031.0}, "of this machine is 31 s or more behind most others: "),
        ({1: 900.0, 2: 4510.0, 3: 920.0, 4: 930.0, 5: 940.0}, ""),
        ({1: 900.0, 2: 899.0, 3: 1001.0}, ""),
    ],
    ids=["two that differ", "one alone", "this machine's", "one that was set", "all agree"],
)
def test_a_clock_that_is_wrong_is_named(times: dict[int, float], said: str) -> None:
    """Members a and b write in turn."""
    finding = clocks(*(entry(at, "ba"[at % 2], unix_s) for at, unix_s in times.items()))
    assert (finding is not None) is bool(said)
    assert finding is None or f"the clock {said}" in finding.sentence


def test_clocks_an_hour_off_are_named_with_their_machines() -> None:
    history = [entry(1, "a", 800.0), entry(2, "b", 4410.0), entry(3, "c", -2780.0)]
    finding = clocks(*history, entry(4, "a", 900.0), a="vm-1", b="vm-2", c="c")
    assert finding is not None
    assert finding.level == "warning"
    assert finding.sentence.startswith(
        "the clock of c is 3,580 s or more behind most others;"
        " the clock of b on vm-2 is 3,510 s or more ahead of most others: "
    )
    assert "set the clock" in finding.remedy


def test_an_entry_by_an_unknown_clock_says_nothing() -> None:
    lost = HistoryEntry("lost", "b", "", 4500.0, revision=2)
    assert clocks(entry(1, "a", 900.0), lost, entry(3, "b", 920.0), entry(4, "a", 930.0)) is None
