# SPDX-License-Identifier: Apache-2.0
"""The rank that keeps a world from going on is named by what its ranks do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

import agent.stuck
import agent.verdict.runs
from agent.stuck import stance
from agent.verdict.decision import verdict
from agent.verdict.runs import standstill
from console.job.status_json import pods_of
from launcher_shim.c10d.rounds.records import Seat
from launcher_shim.rundir.rank_reports import StackFrame, frames_of_faulthandler, frames_of_py_spy
from rdzv.keys import JobKeys
from rdzv.records.progress import PodSaves, StillRank
from rdzv.store import KeyValue
from tests.support.views import NOW_S, TRAINS, committing, run, view

SITE = "/usr/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
PYTHONS = "/usr/lib/python3.11"
MAIN = StackFrame("/app/train.py", 80, "main")
BACKWARD = (
    StackFrame(f"{TORCH}/autograd/graph.py", 1113, "_engine_run_backward"),
    StackFrame(f"{TORCH}/autograd/__init__.py", 395, "backward"),
    StackFrame(f"{TORCH}/_tensor.py", 623, "backward"),
    MAIN,
)
REDUCES = (
    StackFrame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"),
    StackFrame(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
    StackFrame("/app/train.py", 81, "main"),
)
LOADS = (
    StackFrame(f"{PYTHONS}/selectors.py", 415, "select"),
    StackFrame(f"{PYTHONS}/multiprocessing/connection.py", 930, "wait"),
    StackFrame(f"{TORCH}/utils/data/dataloader.py", 1200, "_try_get_data"),
    StackFrame("/app/train.py", 70, "main"),
)
READS = (
    StackFrame("/app/rows.py", 12, "__getitem__"),
    StackFrame(f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch"),
    StackFrame(f"{TORCH}/utils/data/dataloader.py", 700, "_next_data"),
    StackFrame("/app/train.py", 70, "main"),
)
SPINS = (StackFrame("/app/train.py", 30, "augment"), StackFrame("/app/train.py", 75, "main"))
SAVES = (
    StackFrame(f"{TORCH}/serialization.py", 900, "_save"),
    StackFrame("/app/train.py", 90, "write_model"),
    MAIN,
)
SAVES_PARTS = (
    *REDUCES[:2],
    StackFrame(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 4, "save"),
    MAIN,
)
EVALUATES = (StackFrame("/app/train.py", 40, "evaluate"), MAIN)
EVALUATES_DEEP = (
    StackFrame(f"{TORCH}/nn/modules/linear.py", 125, "forward"),
    StackFrame(f"{SITE}/transformers/trainer.py", 4000, "evaluation_loop"),
    MAIN,
)
COMPILES = (
    StackFrame(f"{TORCH}/_inductor/scheduler.py", 1, "codegen"),
    StackFrame(f"{TORCH}/_dynamo/convert_frame.py", 1200, "compile_inner"),
    MAIN,
)
COMPILED = (
    *BACKWARD[:3],
    StackFrame(f"{TORCH}/_dynamo/eval_frame.py", 700, "compile_wrapper"),
    MAIN,
)
HELD = (StackFrame("/run/muster/python/muster/draining.py", 300, "_pause"), MAIN)
FORWARD = (
    StackFrame("/app/model.py", 9, "forward"),
    StackFrame(f"{TORCH}/nn/parallel/distributed.py", 1600, "_run_ddp_forward"),
    MAIN,
)
MEANS = (*REDUCES[:2], StackFrame("/app/train.py", 60, "mean"))
OF_LOSS, OF_COUNT = (
    (*MEANS, StackFrame("/app/train.py", line, "train"), MAIN) for line in (83, 84)
)
ITEM = (StackFrame("/app/train.py", 82, "main"),)


@pytest.mark.parametrize(
    ("frames", "doing", "call", "where"),
    [
        (BACKWARD, "collective", "the backward pass", "train.py:80"),
        (COMPILED, "collective", "the backward pass", "train.py:80"),
        (REDUCES, "collective", "all_reduce", "train.py:81"),
        (LOADS, "loader", "", "train.py:70"),
        (READS, "loader", "", "rows.py:12"),
        (SPINS, "script", "", "train.py:30"),
        (FORWARD, "script", "", "model.py:9"),
        (SAVES, "saves", "", "train.py:90"),
        (EVALUATES, "evaluates", "", "train.py:40"),
        (EVALUATES_DEEP, "evaluates", "", "train.py:80"),
        (COMPILES, "compiles", "", "train.py:80"),
        (HELD, "muster", "", "train.py:80"),
        ((StackFrame("/app/latest.py", 1, "get_latest"),), "script", "", "latest.py:1"),
        ((), "unknown", "", ""),
    ],
)
def test_a_stack_says_what_a_rank_does(
    frames: Sequence[StackFrame], doing: str, call: str, where: str
) -> None:
    found = replace(stance(2, "S", frames), via="")
    assert found == StillRank(2, doing, call, where)  # type: ignore[arg-type]


def test_a_stopped_process_needs_no_stack() -> None:
    assert stance(2, "T", ()).doing == "stopped"
    assert stance(2, "X", ()).doing == "ended"


def test_the_main_thread_is_the_last_of_faulthandler() -> None:
    text = (
        'Thread 0x00007f (most recent call first):\n  File "/app/other.py", line 1 in run\n\n'
        'Current thread 0x00007e [main] (most recent call first):\n  File "/a b.py", line 7 in f\n'
        '  File "<string>", line ??? in <module>\n'
    )
    assert frames_of_faulthandler(text) == [
        StackFrame("/a b.py", 7, "f"),
        StackFrame("<string>", 0, "<module>"),
    ]
    spied = (
        'Thread 9 (idle): "MainThread"\n    f (/app/a.py:7)\nThread 8 (active): "x"\n  g (b:1)\n'
    )
    assert frames_of_py_spy(spied) == [StackFrame("/app/a.py", 7, "f")]


def world(*stacks: Sequence[StackFrame] | str) -> str:
    """Whom the verdict names in a world of a rank a pod; ``busy`` if it may be at work."""
    told = []
    for rank, frames in enumerate(stacks):
        state = frames if isinstance(frames, str) else "S"
        still = stance(rank, state, () if isinstance(frames, str) else frames)
        told.append(PodSaves(f"n{rank}", "", "digits", 3, still=(still,)))
    found = agent.verdict.runs.standstill([one.member for one in told], told)
    if found is None:
        return "busy"
    return ",".join(str(one.rank) for _, one in found.causes)


WORLDS: list[tuple[tuple[Sequence[StackFrame] | str, ...], str]] = [
    ((BACKWARD, SPINS, BACKWARD, BACKWARD), "1"),
    ((BACKWARD, BACKWARD, BACKWARD, "T"), "3"),
    ((SPINS, "T", BACKWARD), "1"),
    ((LOADS, BACKWARD, BACKWARD, BACKWARD), "0"),
    ((BACKWARD, BACKWARD, REDUCES, BACKWARD), "2"),
    ((BACKWARD, BACKWARD, (), BACKWARD), "2"),
    ((OF_LOSS, OF_COUNT, OF_LOSS, OF_LOSS), "1"),
    ((OF_LOSS, OF_LOSS), ""),
    ((BACKWARD, REDUCES), "0,1"),
    ((BACKWARD, BACKWARD), ""),
    ((ITEM, ITEM, LOADS), "2"),
    ((ITEM, ITEM, ITEM), "busy"),
    ((ITEM, ITEM, ()), "busy"),
    ((SPINS, LOADS), "busy"),
    ((BACKWARD, SAVES, BACKWARD), "busy"),
    ((SAVES_PARTS, SAVES_PARTS, SAVES), "busy"),
    ((EVALUATES, BACKWARD), "busy"),
    ((EVALUATES, EVALUATES), "busy"),
    ((COMPILES, BACKWARD), "busy"),
    ((HELD, BACKWARD), "busy"),
]


@pytest.mark.parametrize(("stacks", "named"), WORLDS)
def test_the_rank_that_is_not_where_the_others_wait_is_named(
    stacks: tuple[Sequence[StackFrame] | str, ...], named: str
) -> None:
    assert world(*stacks) == named


NEVER = re.compile(r"(?!)")
PLANTED: dict[str, tuple[str, object]] = {
    "a save is as any other call": ("agent.stuck._SAVERS", NEVER),
    "an evaluation is as any other call": ("agent.stuck._EVALUATING", NEVER),
    "a compilation is as any other call": ("agent.stuck._COMPILERS", NEVER),
    "a wait at the gate is as any other": ("agent.stuck._MUSTER", NEVER),
    "no call waits for others": ("agent.stuck._COLLECTIVES", NEVER),
    "what takes minutes counts": ("agent.verdict.runs.BUSY", ()),
    "those in another operation are not looked for": (
        "agent.verdict.runs._minority",
        lambda ranks: [],
    ),
    "the way to a call does not count": ("agent.stuck._lines", lambda frames: ["train.py:1"]),
    "a stopped process is as any other": (
        "agent.stuck.StillRank",
        lambda rank, doing, *more: StillRank(
            rank, "script" if doing == "stopped" else doing, *more
        ),
    ),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_bug_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[rule])
    assert [one for one in WORLDS if world(*one[0]) != one[1]]


def still(*ranks: StillRank, since_ago_s: float = 45.0) -> dict[str, PodSaves]:
    return {
        name: PodSaves(
            *(name, f"uid-{name}", "digits", 3),
            step=40,
            at_unix_s=NOW_S - 9,
            still=(one,),
            still_since_unix_s=NOW_S - since_ago_s,
        )
        for name, one in zip("ab", ranks, strict=False)
    }


WAITS = StillRank(0, "collective", "all_reduce", "train.py:31")
STOPPED = StillRank(1, "stopped")


def test_the_verdict_names_the_rank_and_what_to_do() -> None:
    found = verdict(view(run(), saves=still(WAITS, STOPPED)), NOW_S)
    assert (found.state, found.since_unix_s) == ("stuck", NOW_S - 45)
    assert found.causes == ((1, "b"),)
    assert found.why == (
        "a world of 2 nodes at step 40, and no rank has moved for 45 s: rank 1 (b) is stopped, as"
        " by SIGSTOP or a debugger; the others wait in all_reduce (train.py:31)"
    )
    assert found.do == "let it go on (kill -CONT, in b), or muster drain b --job digits"


def test_the_verdict_says_how_a_rank_came_to_the_line_where_the_others_wait() -> None:
    stacks = (OF_LOSS, OF_COUNT, OF_LOSS)
    ranks = [(f"n{rank}", stance(rank, "S", frames)) for rank, frames in enumerate(stacks)]
    told = [PodSaves(pod, "", "digits", 3, still=(one,)) for pod, one in ranks]
    found = agent.verdict.runs.standstill([pod for pod, _ in ranks], told)
    assert found is not None
    assert found.why == (
        "rank 1 (n1) waits in all_reduce (train.py:60), called from train.py:84, train.py:80;"
        " the others wait in all_reduce (train.py:60)"
    )


def test_a_sidecar_that_does_not_report_the_way_is_not_taken_for_a_rank_apart() -> None:
    ranks = [stance(rank, "S", OF_LOSS) for rank in range(3)]
    ranks[2] = replace(ranks[2], via="")
    told = [PodSaves(f"n{one.rank}", "", "digits", 3, still=(one,)) for one in ranks]
    found = agent.verdict.runs.standstill([one.member for one in told], told)
    assert found is not None
    assert found.causes == ()


def test_status_marks_the_pod_that_is_to_blame() -> None:
    seen = view(run(), saves=still(WAITS, STOPPED))
    assert {pod.name: pod.doing for pod in pods_of(seen, NOW_S)} == {"a": "training", "b": "stuck"}
    whys = {member.name: why for member, _, why in seen.members()}
    assert whys["b"].endswith("rank 1 is stopped, as by SIGSTOP or a debugger")
    assert "rank" not in whys["a"]


def test_a_world_is_stuck_only_if_each_of_its_pods_says_so() -> None:
    assert verdict(view(run(), saves=still(WAITS)), NOW_S).state == "training"
    assert standstill((), ()) is None


@pytest.mark.parametrize("phase", ["hold", "commit", "done"])
def test_a_world_that_saves_for_a_drain_is_not_stuck(phase: str) -> None:
    seen = view(run(), saves=still(WAITS, STOPPED), commit=committing(phase, "uid-b"))
    assert verdict(seen, NOW_S).state == "draining"


def test_a_world_that_finishes_or_forms_is_not_stuck() -> None:
    told = still(WAITS, STOPPED)
    assert verdict(view(run(replace(TRAINS, finishing=True)), saves=told), NOW_S).state != "stuck"
    other = replace(TRAINS, number=4, frozen=(Seat("a", "n", 1), Seat("b", "n", 1)))
    assert verdict(view(run(other), saves=told), NOW_S).state == "training"


def test_the_record_keeps_what_the_ranks_do() -> None:
    one = still(WAITS, STOPPED)["b"]
    key = JobKeys("team", "digits").in_generation(1).pod_saves("b")
    kv = KeyValue(key, one.to_json(), 1, 7, 1, 0)
    assert PodSaves.from_kv(kv) == replace(one, mod_revision=7)
