# SPDX-License-Identifier: Apache-2.0
"""A job whose nodes are drained, and the account of its steps: none lost, none trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdzv.records.drain import Drain
from tests.support.training.job import LEAVE_TIMEOUT_S, ROOT, Job, Node, marked
from tests.support.training.step_log import World
from tests.support.training.taken_ports import taken_ports

SCRIPT = Path(__file__).parents[1] / "scripts" / "drain_loop.py"
DRAINED_STATUS = 143
GRACE_S = "90"
"""Where nothing is to expire, also on a machine that stands still for a while."""
SOON_S = 30.0
"""Of such a grace, for a drain that nothing keeps; the rest is for the machine alone."""
END_TIMEOUT_S = 120.0
"""For a drain to be over, and for its container to end."""

RunJob = Callable[..., AbstractContextManager[Job]]


@dataclass(frozen=True)
class Account:
    """What became of every step: how often it was made, and by whom saved."""

    lost: list[int]
    twice: list[int]
    steps: int


@contextmanager
def draining_job(
    run_job: RunJob,
    endpoints: Sequence[str],
    *,
    script_environ: dict[str, str] | None = None,
    sidecar_environ: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Job]:
    """A job that trains ``drain_loop.py``, under ``muster-run`` where not told otherwise."""
    with run_job(
        list(endpoints),
        **{"wrapped": True, "lease_s": 10.0, "script": SCRIPT} | settings,
        script_environ=dict(script_environ or {}),
        sidecar_environ={"MUSTER_GRACE_S": GRACE_S} | (sidecar_environ or {}),
    ) as job:
        # Read when a torchrun is started.
        job.script_environ["CHECKPOINT_DIR"] = str(job.directory / "checkpoints")
        job.script_environ["DRAIN_LOOP_GATE"] = str(job.directory / "gate")
        yield job


@contextmanager
def saves_held(job: Job) -> Iterator[None]:
    """Let every save that begins in the block last until the block is over."""
    gate = job.directory / "gate"
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def account(job: Job) -> Account:
    """Account for every step that any world has made."""
    return account_of(job.steps.directory)


def account_of(steps: Path) -> Account:
    """Account for the step lines in a directory."""
    made: dict[int, set[int]] = defaultdict(set)
    for path in steps.iterdir():
        for line in path.read_text().splitlines():
            _, step, _, _, _, _, world = line.split()
            made[int(step)].add(int(world))
    last = max(made, default=0)
    return Account(
        lost=[step for step in range(1, last + 1) if step not in made],
        twice=sorted(step for step, worlds in made.items() if len(worlds) > 1),
        steps=last,
    )


def saved_steps(job: Job) -> dict[int, set[int]]:
    """The ranks that have saved each step."""
    saved: dict[int, set[int]] = defaultdict(set)
    for path in (job.directory / "saves").iterdir():
        for line in path.read_text().splitlines():
            _, step, rank, *_ = line.split()
            saved[int(step)].add(int(rank))
    return dict(saved)


def drain_of(job: Job, node: Node) -> Drain | None:
    """The newest drain of the node's pod, as the store has it."""
    drains = job.witness.sight.membership.drains.values()
    found = [drain for drain in drains if drain.member == node.name]
    return max(found, key=lambda drain: drain.created_revision, default=None)


def hosts_rank_0(job: Job, world: World) -> Node:
    """The node that hosts rank 0."""
    return job.nodes[world.workers[0].node]


# -- notices, as each way gives them


def terminate(job: Job, node: Node) -> None:
    """End the pod as the kubelet does: the sidecar's preStop hook, and SIGTERM to muster-run."""
    assert node.launcher is not None
    job.tell(f"{node.name}: the pod is deleted")
    prestop = [sys.executable, "-m", "console.main", "notice", "--run-dir", str(node.run_dir)]
    subprocess.run(
        prestop, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60
    )
    node.launcher.send_signal(signal.SIGTERM)


def sigterm(job: Job, node: Node) -> None:
    """SIGTERM to muster-run alone."""
    assert node.launcher is not None
    job.tell(f"{node.name}: SIGTERM to muster-run")
    node.launcher.send_signal(signal.SIGTERM)


def by_hand(job: Job, node: Node, *arguments: str) -> subprocess.Popen[str]:
    """``muster drain NODE``."""
    job.tell(f"{node.name}: muster drain {' '.join(arguments)}")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "console.main", "drain", node.name),
            *("--namespace", job.keys.namespace, "--job", job.name),
            *("--etcd-endpoints", ",".join(job.endpoints), *arguments),
        ],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hold(job: Job, node: Node) -> subprocess.Popen[bytes]:
    """``muster-hold`` as the training container's preStop hook; SIGTERM comes when it returns."""
    job.tell(f"{node.name}: muster-hold")
    program = str(node.run_dir / "bin" / "muster-hold")
    return subprocess.Popen([program], env={**os.environ, "MUSTER_RUN_DIR": str(node.run_dir)})


# -- what must follow


def gone(job: Job, node: Node, timeout_s: float = END_TIMEOUT_S) -> int:
    """Wait until the container has ended; end the rest of the pod; return its status."""
    assert node.launcher is not None
    job.until(lambda: node.launcher and node.launcher.poll() is not None, timeout_s, "it ends")
    status = node.launcher.returncode
    assert node.sidecar is not None
    left = marked(job.token, node.name) - {node.sidecar.pid}
    assert not left, f"{node.name} has ended, its processes {left} have not"
    node.sidecar.terminate()
    assert node.sidecar.wait(LEAVE_TIMEOUT_S) == 0
    del job.nodes[node.name]
    return int(status)


def released(job: Job, node: Node, timeout_s: float = END_TIMEOUT_S) -> Drain:
    """Wait until the drain of ``node`` has an outcome."""
    job.until(
        lambda: (drain := drain_of(job, node)) is not None and drain.outcome,
        timeout_s,
        f"the drain of {node.name} ends",
    )
    drain = drain_of(job, node)
    assert drain is not None
    return drain


def released_soon(job: Job, node: Node) -> Drain:
    """Wait as ``released`` does for a drain that nothing keeps, and assert that it was over soon.

    It counts from when the sidecar that ended it saw it, and while the machine lets anybody run.
    """
    drain = released(job, node)
    now_s = time.monotonic()
    (details,) = (
        entry["details"]
        for entry in history(job)
        if entry["details"].get("pod_uid") == drain.pod_uid
    )
    still_s = job.stood_still_s(now_s - details["took_s"], now_s)
    assert details["took_s"] - still_s < SOON_S, (
        f"the drain of {node.name} took {details['took_s']} s,"
        f" while the machine stood still for {still_s:.1f}: {details}"
    )
    return drain


def nothing_lost(job: Job, restarts: int = 0) -> Account:
    """Assert that every step was made once, in one world, and that no restart was burnt."""
    told = account(job)
    assert told.lost == [], f"steps lost: {told.lost}"
    assert told.twice == [], f"steps trained twice: {told.twice}"
    assert restarts_counted(job) == restarts
    job.never_two_worlds()
    return told


def restarts_counted(job: Job) -> int:
    """Most restarts that torch has counted on one node, less those over a port that was taken.

    Such a port ends the workers of all nodes, and only rank 0 tells of it.
    """
    logs = job.directory.glob("*/torchrun.log")
    taken = taken_ports(log.read_text(errors="replace") for log in logs)
    return max(0, max(world.restarts for world in job.steps.worlds()) - taken)


def all_saved(job: Job, step: int, ranks: Iterable[int]) -> None:
    """Assert that every rank of a world has saved ``step``, and nothing else at that time."""
    assert saved_steps(job)[step] == set(ranks)


def history(job: Job) -> list[dict[str, Any]]:
    """The entries about drains."""
    prefix = job.keys.history
    found = [
        json.loads(kv.value) for key, kv in job.witness.kvs().items() if key.startswith(prefix)
    ]
    return [entry for entry in found if entry["what"] == "drain"]
