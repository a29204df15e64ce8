# SPDX-License-Identifier: Apache-2.0
"""The state of a job in a word, why it is not getting on, and what to do, with the cures: pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent.verdict.clocks import skews
from agent.verdict.last_save import LastSave
from agent.verdict.runs import NAMED_MAX, RunView
from agent.verdict.states import State
from agent.verdict.view import JobView
from launcher_shim.pod.launchers import CENTRAL
from rdzv.dataclass import dataclass
from rdzv.records.troubles import REMARKS, Bypass, Failure, Kind
from rdzv.sentences import counted, duration

if TYPE_CHECKING:
    from launcher_shim.c10d.rounds.decision import BackOff

CURE_BY_LOG = "read the log of {member}'s training container"

_CURES = (
    (
        r"uncorrectable ECC|\bXid\b|fallen off the bus|no CUDA-capable device|NVML"
        r"|devices? (is |are )?(busy or )?unavailable|hardware error",
        "replace the GPU of {place}:{cordon} muster drain {member} --job {job}{delete}",
    ),
    (
        r"OutOfMemoryError|out of memory",
        "use a smaller batch, or see what else holds memory on {place}: nvidia-smi",
    ),
    (
        r"ModuleNotFoundError|ImportError|undefined symbol|shared object file|no kernel image"
        r"|driver version is insufficient|has no attribute '__version__'",
        "{whose} {image}environment lacks it, or has another version: use the right one{describe}",
    ),
    (
        r"SOCKET_IFNAME|[Ii]nterface|find address for|connectFullMesh|No route to host"
        r"|Network is unreachable|Connection (timed out|refused)|failed to connect"
        r"|ncclSystemError|ncclRemoteError",
        "see that ranks reach each other from {member}: set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME to the interface of the pods' network (ip addr shows it), and allow"
        " the pods' traffic in NetworkPolicies",
    ),
    (
        r"No space left|ENOSPC|quota exceeded",
        "make room on the volume that {member} writes to: df -h, in its training container",
    ),
    (
        r"FileNotFoundError|NotADirectoryError|No such file|Stale file handle|Input/output error"
        r"|Transport endpoint|PermissionError|Permission denied|Read-only file system",
        "see that {whose} volumes are mounted at the paths that the script opens, and may be"
        " read{describe}",
    ),
    (
        r"Address already in use",
        "see what else listens there on {place}: ss -ltnp; one pod of a job fits on a node with"
        " hostNetwork",
    ),
    (
        r"reported no Python error",
        f"see whether memory ran out (OOMKilled, exit code 137){{describe}}; then {CURE_BY_LOG}",
    ),
)
"""Signs in an error, with what to do; the first match counts."""

_LAUNCHERS: Mapping[Kind, str] = {
    "unseen": "see whether its training container runs, and if not why (image,"
    " volumes){describe}; its command has to begin with muster-run",
    "absent": f"{CURE_BY_LOG}; its command has to start torchrun",
    "elsewhere": "remove that option from its command, and MUSTER_KEEP_FLAGS from its variables",
    "run_id": "remove --rdzv-id from its command",
    "nnodes": "remove --nnodes from its command",
}

STUCK_S = 300.0
"""Time without a step after which a world is stuck, in seconds: longer than most evaluations and
saves take. A shorter one takes these for faults."""


def cure(view: JobView, failure: Failure) -> str:
    """Return what to do about the failure that ends the job's worlds."""
    name, node = failure.member, view.nodes.get(failure.member, "")
    alike = [
        one
        for one in view.failures.values()
        if (one.run, one.kind) == (failure.run, failure.kind) and one.round >= failure.round - 1
    ]
    common = len(alike) > 1
    words = {
        "member": name,
        "job": view.name,
        "place": f"{name} on {node}" if node not in ("", name) else name,
        "whose": f"the {'pods' if view.in_cluster else 'nodes'}'" if common else f"{name}'s",
        **_by_kubectl(view, name),
    }
    for sign, sentence in _CURES:
        if re.search(sign, failure.error):
            return sentence.format(**words)
    log = CURE_BY_LOG.format(**words)
    if common:
        return f"{log}; {len(alike)} pods fail alike, so the script, its data or the image is wrong"
    return f"{log}; if its machine is at fault: muster drain {name} --job {view.name}"


def _by_kubectl(view: JobView, name: str) -> dict[str, str]:
    """Return the parts of sentences that only a cluster has; empty texts without one."""
    parts = {
        "cordon": " kubectl cordon its node, then",
        "delete": f", and delete the pod {name}",
        "describe": f": kubectl describe pod {name}",
        "image": "image or ",
    }
    return parts if view.in_cluster else dict.fromkeys(parts, "")


def launcher_cure(view: JobView, member: str, fault: Bypass) -> str:
    """Return what to do about the launcher of a member; empty if nothing has to be done."""
    return _LAUNCHERS.get(fault.kind, "").format(member=member, **_by_kubectl(view, member))


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """A job's state; ``why`` it is in it, and what to ``do``: sentences, empty for none.

    ``since_unix_s`` is by a writer's wall clock, 0.0 if unknown. ``causes``: the ranks, each with
    its pod, that keep the others waiting.
    """

    state: State
    why: str = ""
    do: str = ""
    since_unix_s: float = 0.0
    causes: tuple[tuple[int, str], ...] = ()

    def lines(self, job: str, now_unix_s: float) -> list[str]:
        """Return what to print: the verdict, and what to do on a line of its own."""
        first = f"{job} is {self.state}"
        if self.since_unix_s:
            took = duration(max(0.0, now_unix_s - self.since_unix_s))
            first = f"{job} has been {self.state} for {took}"
            if self.state == "done":
                first = f"{job} was done {took} ago"
        line = f"{first}: {self.why}" if self.why else first
        return [line, f"→ {self.do}"] if self.do else [line]

    def as_json(self) -> dict[str, object]:
        """Return it for ``--json``."""
        since = self.since_unix_s or None
        return {"state": self.state, "why": self.why, "do": self.do, "since_unix_s": since}


def verdict(view: JobView, now_unix_s: float) -> JobVerdict:
    """Decide on the state of a job as it is stored."""
    rules, run = view.snapshot.rules, view.newest_run
    if rules is None:
        do = "check that its pods run and have the sidecar"
        return JobVerdict("starting", "no sidecar has registered yet", do)
    if view.pause:
        why = view.pause.removeprefix("paused").lstrip(" ,")
        return JobVerdict("paused", why, f"muster resume --job {view.name}")
    if run is None:
        return _without_run(view, rules.policy.smallest, now_unix_s)
    if run.state == "forming" and len(view.listing.listed) < rules.policy.smallest:
        # Survivors have failed, too, as their world ended: that is no cause.
        return _too_few(view, len(view.listing.listed), rules.policy.smallest)
    wait, at_once = view.back_off(run), f"to try at once: muster resume {view.name}"
    waits = _waits(view, wait, run.round.number, now_unix_s)
    if wait is not None and wait.alike and (failed := view.failures.get(wait.member)) is not None:
        return JobVerdict("failing", waits, f"{cure(view, failed)}; {at_once}")
    if (failing := view.failing(now_unix_s)) is not None:
        do = cure(view, failing)
        if waits:
            return JobVerdict("failing", waits, f"{do}; {at_once}")
        return JobVerdict("failing", view.failed(failing, now_unix_s), do)
    if run.state == "forming":
        return _forming(view, run, now_unix_s)
    if run.round.finishing:
        return JobVerdict("finishing", "first ranks have ended well, and nothing is left to save")
    return _training(view, run, now_unix_s)


def _waits(view: JobView, wait: BackOff | None, number: int, now_unix_s: float) -> str:
    """Return why the next world waits, with the time left if it is on record; empty if not."""
    if wait is None:
        return ""
    begun = [
        one.at_unix_s
        for one in view.history
        if one.what == "wait" and one.details.get("round") == number
    ]
    left_s = wait.wait_s - (now_unix_s - begun[0]) if begun else 0.0
    return wait.left(left_s) if 0 < left_s <= wait.wait_s else wait.reason


def _without_run(view: JobView, least: int, now_unix_s: float) -> JobVerdict:
    closed = [run for run in view.runs if run.round.closed]
    if any(run.round.closed == "success" for run in closed):
        return JobVerdict("done", "", "", _last(view, "closed"))
    if closed:
        why = "every torchrun has ended by a failure, and none asks for another world"
        if not (failed := sorted(view.failures.values(), key=lambda one: one.at_unix_s)):
            return JobVerdict("failing", why, "read the logs of the training containers")
        why = f"{failed[-1].member}: {failed[-1].brief}; {why}"
        return JobVerdict("failing", why, cure(view, failed[-1]))
    here = len(view.listing.listed)
    if here < least:
        return _too_few(view, here, least)
    if any(member.role == "launcher" for member in view.snapshot.members.values()):
        return _of_central(view, now_unix_s)
    why, do = "no torchrun has asked for a world yet", ""
    if faults := _faults(view):
        name, fault = faults[0]
        why, do = f"{name}: {fault.sentence}", launcher_cure(view, name, fault)
    return JobVerdict("starting", why, do, _last(view, "join"))


def _of_central(view: JobView, now_unix_s: float) -> JobVerdict:
    """Decide by what its ranks report: the launcher does not say what it does with the hosts."""
    last_save = view.last_save
    if last_save is None:
        return JobVerdict("starting", f"no rank that {CENTRAL.name} starts has reported yet")
    world = f"{CENTRAL.name} trains on {counted(len(view.reports), 'node')}"
    if last_save.seen_step is None:
        return JobVerdict("training", f"{world}; its ranks report no step")
    world += f" at step {last_save.seen_step:,}"
    return _silent(view, last_save, world, now_unix_s) or JobVerdict("training", world)


def _silent(view: JobView, last_save: LastSave, world: str, now_unix_s: float) -> JobVerdict | None:
    """Return the verdict on a world whose ranks report no step any more; None if they do."""
    if not last_save.seen_at_unix_s:
        return None
    silent_s = now_unix_s - last_save.seen_at_unix_s
    if silent_s < STUCK_S or silent_s - _wrong_s(view, now_unix_s) < STUCK_S:
        return None
    why = f"{world}, and no rank has reported a step for {duration(silent_s)}"
    do = "see where each rank hangs: py-spy dump --pid PID, in its container"
    return JobVerdict("stuck", why, do, last_save.seen_at_unix_s)


def _too_few(view: JobView, here: int, least: int) -> JobVerdict:
    out = [f"{m.name} ({state})" for m, state, _ in view.members() if state != "listed"]
    others = f"; not counted: {', '.join(out[:3])}" if out else ""
    missing = (
        "see why pods are missing: kubectl get pods" if view.in_cluster else "start more nodes"
    )
    do = f"{missing}; to train with fewer: muster set {view.name} --min {max(1, here)}"
    return JobVerdict("below min", f"{here} of at least {least} pods can train{others}", do)


def _forming(view: JobView, run: RunView, now_unix_s: float) -> JobVerdict:
    why, asking = view.awaited(run, now_unix_s), run.places.asking
    faults = [(name, one) for name, one in _faults(view) if name not in asking]
    if not faults:
        return JobVerdict("gathering", why)
    name, fault = faults[0]
    return JobVerdict(
        "gathering", f"{why}; {name}: {fault.sentence}", launcher_cure(view, name, fault)
    )


def _faults(view: JobView) -> list[tuple[str, Bypass]]:
    """Return the launchers that do not take part, by member."""
    return [one for one in sorted(view.bypasses.items()) if one[1].kind not in REMARKS]


def _training(view: JobView, run: RunView, now_unix_s: float) -> JobVerdict:
    commit, last_save = view.snapshot.commit, view.last_save
    since_s = _last(view, "round")
    nodes = len(run.round.frozen)
    world = f"a world of {counted(nodes, 'node')}"
    step = last_save.seen_step if last_save is not None else None
    if step is not None:
        world += f" at step {step:,}"
    if commit is not None and commit.is_of(run.run_id, run.round.number):
        if commit.phase in ("hold", "commit", "done") and commit.leaving:
            held, do = _held(view) if commit.phase == "done" else ("", "")
            return JobVerdict("draining", f"{world}; {commit.reason}{held}", do)
        if commit.phase in ("hold", "commit", "done"):
            return JobVerdict("saving", f"{world}; {commit.reason}")
    if (still := view.standstill) is not None:
        silent_s = max(0.0, now_unix_s - still.since_unix_s)
        why = f"{world}, and no rank has moved for {duration(silent_s)}: {still.why}"
        causes = tuple((one.rank, pod) for pod, one in still.causes[:NAMED_MAX])
        return JobVerdict("stuck", why, still.do(view.name), still.since_unix_s, causes)
    if step is not None and last_save is not None:
        stuck = _silent(view, last_save, world, now_unix_s)
        if stuck is not None:
            return stuck
    late = [one for one in view.failures.values() if now_unix_s - one.at_unix_s < STUCK_S]
    if step is None and late:
        newest = max(late, key=lambda one: one.at_unix_s)
        world += f", no step is reported yet; {view.failed(newest, now_unix_s)}"
    return JobVerdict("training", world, "", since_s)


def _held(view: JobView) -> tuple[str, str]:
    """Return that ``min`` holds the pods that drain, and what to do; empty texts if it does not."""
    rules, here = view.snapshot.rules, len(view.listing.listed)
    least = rules.policy.smallest if rules is not None else 0
    names = [member.name for member, state, _ in view.members() if state == "draining"]
    if here >= least or not names:
        return "", ""
    held = f"; {names[0]} stays until its deadline, as fewer than min ({least}) would be left"
    more = "start another pod" if view.in_cluster else "start another node"
    return held, f"{more}, or: muster drain {names[0]} --job {view.name} --cancel"


def _wrong_s(view: JobView, now_unix_s: float) -> float:
    """Return how far a clock is known to be wrong, in seconds: a silence may be as much shorter."""
    return max((abs(one.least_s) for one in skews(view.history, now_unix_s)), default=0.0)


def _last(view: JobView, what: str) -> float:
    return max((one.at_unix_s for one in view.history if one.what == what), default=0.0)
