# SPDX-License-Identifier: Apache-2.0
"""Rows of ``muster list`` and ``muster get``: a job, and a pod of it. Pure.

They are made of what ``muster status --json`` says, here or in a sidecar of the job, and of what
the API server says of its pods, if there is one. Pods that do not run are beside a view that a
sidecar draws: its store does not know them, so they come with the command, as a variable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from agent.verdict.states import STATES, Level
from console.job.output import Toned
from console.job.status_json import LEVELS
from injection.kinds import job_label
from rdzv.sentences import counted, duration

StatusObject = Mapping[str, Any]
"""One object of ``muster status --json``. Those of older sidecars have fewer fields."""

UNKNOWN = "unknown"
"""The phase of a job whose sidecars do not answer."""

UNREADABLE = "what its sidecar says cannot be read"

WHY = "WHY"

NOT_RUNNING = "MUSTER_NOT_RUNNING"
"""The variable: JSON, with an object a pod."""

SENT_MOST = 20
"""The most pods that are sent: a command has room for 128 KiB."""

WHY_MOST = 500
"""Longest reason that is sent, in characters."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The state of one pod by the API server.

    ``phase``: Kubernetes' own. ``why``: why it does not run. ``spot``: whether its node may be
    taken back at any time; None if unknown. ``runs``: its sidecar does. ``steps``: how many its
    launch line asks for; None if it does not.
    """

    name: str
    phase: str
    node: str = ""
    why: str = ""
    spot: bool | None = None
    runs: bool = True
    created_unix_s: float = 0.0
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod of a job; None and empty for what is unknown.

    ``waits``: the share of its time that its slowest rank waits for others; ``slow``: whether the
    others wait for it.
    """

    name: str
    state: str
    level: Level | None = None
    ranks: str = ""
    node: str = ""
    spot: bool | None = None
    step: int | None = None
    age_s: float | None = None
    why: str = ""
    version: str = ""
    address: str = ""
    waits: float | None = None
    slow: bool = False

    def cells(self, *, wide: bool) -> tuple[str, ...]:
        """Return the cells of a table, in the order of ``pod_headings``."""
        more = (self.address or "-", self.version or "-") if wide else ()
        return (
            self.name,
            Toned(self.state, self.level),
            self.ranks or "-",
            self.node or "-",
            "-" if self.spot is None else "spot" if self.spot else "no",
            _number(self.step),
            _age(self.age_s),
            *more,
            self.why,
        )

    def as_json(self) -> dict[str, object]:
        """Return it for ``-o json``."""
        return {name: value for name, value in asdict(self).items() if name != "level"}


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job; None for what is unknown.

    ``nodes``: how many may train; ``least`` and ``most``: its bounds. ``step``: the furthest that
    its world has reported, at ``rate`` steps a second; ``last_step``: the one that it ends with.
    ``saved_s``: the age of the last save of all ranks; ``last_save``: that of ``muster status
    --json``. ``pending``: how many pods do not run yet.
    """

    namespace: str
    name: str
    phase: str
    level: Level | None = None
    why: str = ""
    do: str = ""
    nodes: int | None = None
    least: int | None = None
    most: int | None = None
    step: int | None = None
    rate: float | None = None
    last_step: int | None = None
    saved_step: int | None = None
    saved_s: float | None = None
    age_s: float | None = None
    since_unix_s: float | None = None
    last_save: StatusObject | None = None
    pending: int = 0
    pods: tuple[PodLine, ...] = field(default=())

    @property
    def eta_s(self) -> float | None:
        """The time to its last step, in seconds; None if the step or the rate is unknown."""
        if self.last_step is None or self.step is None or not self.rate:
            return None
        return max(0, self.last_step - self.step) / self.rate

    def cells(self, *, wide: bool, everywhere: bool) -> tuple[str, ...]:
        """Return the cells of a table, in the order of ``job_headings``."""
        bounds = "" if self.least is None else f" ({self.least}-{self.most})"
        saved = "-"
        if self.saved_s is not None:
            saved = f"{duration(self.saved_s)} ago"
        elif self.saved_step is None and self.step is not None:
            saved = "not yet"
        more = (_number(self.saved_step), str(len(self.pods)), str(self.pending)) if wide else ()
        return (
            *((self.namespace,) if everywhere else ()),
            self.name,
            Toned(self.phase, self.level),
            "-" if self.nodes is None else f"{self.nodes}{bounds}",
            _number(self.step),
            "-" if self.rate is None else f"{self.rate:.3g}/s",
            "-" if self.eta_s is None else duration(self.eta_s),
            saved,
            _age(self.age_s),
            *more,
            self.why,
        )

    def as_json(self) -> dict[str, object]:
        """Return it for ``-o json``."""
        return {
            "namespace": self.namespace,
            "job": self.name,
            "state": self.phase,
            "why": self.why,
            "do": self.do,
            "since_unix_s": self.since_unix_s,
            "nodes": self.nodes,
            "min": self.least,
            "max": self.most,
            "step": self.step,
            "steps_per_s": self.rate,
            "last_step": self.last_step,
            "eta_s": self.eta_s,
            "last_save": self.last_save,
            "age_s": self.age_s,
            "pod_count": len(self.pods),
            "pending": self.pending,
        }


def job_line(
    namespace: str,
    name: str,
    status: StatusObject | None,
    pods: Sequence[PodFacts],
    now_unix_s: float,
    *,
    trouble: str = "",
) -> JobLine:
    """Return the row of a job. ``trouble``: why ``status`` is None, or is the newest no more.

    What a sidecar says is no more to be trusted than its pod: it must not end a table of all jobs.
    """
    try:
        line = _line_of(namespace, name, status, pods, now_unix_s, trouble)
        line.cells(wide=True, everywhere=True)
        for pod in line.pods:
            pod.cells(wide=True)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return _line_of(namespace, name, None, pods, now_unix_s, UNREADABLE)
    return line


def _line_of(
    namespace: str,
    name: str,
    status: StatusObject | None,
    pods: Sequence[PodFacts],
    now_unix_s: float,
    trouble: str,
) -> JobLine:
    lines = tuple(pod_lines(status, pods, now_unix_s))
    pending = [one for one in pods if one.phase == "Pending"]
    ages = [line.age_s for line in lines if line.age_s is not None]
    base = JobLine(
        namespace,
        name,
        UNKNOWN,
        age_s=max(ages, default=None),
        last_step=next((one.steps for one in pods if one.steps), None),
        pending=len(pending),
        pods=lines,
    )
    if status is None:
        return _without_word(base, pods, trouble)
    found = status.get("verdict") or {}
    state = str(found.get("state") or UNKNOWN)
    meaning = STATES.get(state)  # type: ignore[call-overload]
    level: Level | None = meaning.level if meaning is not None else None
    saved = status.get("last_save") or {}
    now = status.get("at_unix_s") or now_unix_s
    saved_at = saved.get("step_of_all_ranks_at_unix_s") or saved.get("at_unix_s")
    whys = [
        "" if level == "ok" else str(found.get("why") or ""),
        _why_pending(pending, len(pods)),
        trouble and f"not up to date: {trouble}",
    ]
    listed = [one for one in status.get("members") or [] if one.get("state") == "listed"]
    return JobLine(
        namespace=namespace,
        name=_named(status, name),
        phase=state,
        level="warning" if trouble and level == "ok" else level,
        why="; ".join(filter(None, whys)),
        do=str(found.get("do") or ""),
        nodes=len(listed),
        least=status.get("min"),
        most=status.get("max"),
        step=saved.get("seen_step"),
        rate=status.get("steps_per_s"),
        last_step=base.last_step,
        saved_step=saved.get("step_of_all_ranks"),
        saved_s=max(0.0, now - saved_at) if saved_at else None,
        age_s=base.age_s,
        since_unix_s=found.get("since_unix_s"),
        last_save=status.get("last_save"),
        pending=len(pending),
        pods=lines,
    )


def _named(status: StatusObject, name: str) -> str:
    """Return the job's whole name if a sidecar says it; ``name`` may be a label, which is short.

    A sidecar may not take another job's name.
    """
    whole = str(status.get("job") or name)
    return whole if job_label(whole) == job_label(name) else name


def pod_lines(
    status: StatusObject | None, pods: Sequence[PodFacts], now_unix_s: float
) -> list[PodLine]:
    """Return a row for each pod: by rank, then those without a rank, then those that do not run."""
    facts = {one.name: one for one in pods}
    members = [] if status is None else list(status.get("members") or [])
    known = {str(one.get("name")) for one in members}
    now = now_unix_s if status is None else status.get("at_unix_s") or now_unix_s
    lines = [_member(one, facts.get(str(one.get("name"))), now_unix_s, now) for one in members]
    lines.sort(key=lambda line: (not line.ranks, _first_rank(line.ranks)))
    others = (_pod(one, now_unix_s, status) for one in pods if one.name not in known)
    return [*lines, *others]


def _member(
    one: StatusObject, fact: PodFacts | None, now_unix_s: float, said_at_unix_s: float
) -> PodLine:
    doing = str(one.get("doing") or one.get("state") or UNKNOWN)
    age_s = None
    if fact is not None and fact.created_unix_s:
        age_s = max(0.0, now_unix_s - fact.created_unix_s)
    elif joined := one.get("joined_unix_s"):
        age_s = max(0.0, said_at_unix_s - joined)
    why = str(one.get("why") or "")
    if fact is not None and not fact.runs:
        why = "; ".join(filter(None, (why, fact.why)))
    waits = one.get("waits")
    return PodLine(
        name=str(one.get("name")),
        state=doing,
        level=LEVELS.get(doing),
        ranks=str(one.get("ranks") or ""),
        node=str(one.get("node") or "") or (fact.node if fact is not None else ""),
        spot=None if fact is None else fact.spot,
        step=one.get("step"),
        age_s=age_s,
        why=why,
        version=str(one.get("version") or ""),
        address=str(one.get("address") or ""),
        waits=waits if type(waits) in (int, float) else None,
        slow=bool(one.get("slow")),
    )


def _pod(fact: PodFacts, now_unix_s: float, status: StatusObject | None) -> PodLine:
    """Return the row of a pod that is no member: in Kubernetes' words."""
    level: Level | None = {"Pending": "warning", "Failed": "fault"}.get(fact.phase)  # type: ignore[assignment]
    missing = status is not None and fact.phase == "Running" and fact.runs
    why = fact.why or ("not registered yet" if missing else "")
    age_s = max(0.0, now_unix_s - fact.created_unix_s) if fact.created_unix_s else None
    return PodLine(fact.name, fact.phase.lower(), level, "", fact.node, fact.spot, None, age_s, why)


def _without_word(base: JobLine, pods: Sequence[PodFacts], trouble: str) -> JobLine:
    """Return the row of a job by its pods alone, in the words of the table of states."""
    phases = {one.phase for one in pods}
    pending = [one for one in pods if one.phase == "Pending"]
    if phases == {"Succeeded"}:
        return replace(base, phase="done", level=STATES["done"].level)
    if phases and phases <= {"Succeeded", "Failed"}:
        failed = [one.name for one in pods if one.phase == "Failed"]
        why = f"no pod runs, and {counted(len(failed), 'pod')} failed: {', '.join(failed[:3])}"
        return replace(base, phase="failing", level=STATES["failing"].level, why=why)
    if pending and not any(one.phase == "Running" for one in pods):
        why = f"no pod runs; {_why_pending(pending, len(pods))}"
        return replace(base, phase="below min", level=STATES["below min"].level, why=why)
    return replace(base, level="warning", why=trouble)


def _why_pending(pending: Sequence[PodFacts], pods: int) -> str:
    if not pending:
        return ""
    are = "is" if len(pending) == 1 else "are"
    first = pending[0]
    return f"{len(pending)} of {counted(pods, 'pod')} {are} pending: {first.name}: {first.why}"


def _first_rank(ranks: str) -> int:
    first = ranks.partition("-")[0]
    return int(first) if first.isdecimal() else 0


def _number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _age(age_s: float | None) -> str:
    return "-" if age_s is None else duration(age_s)


_KNOWN = {one.name for one in fields(PodFacts)}


def beside(pods: Iterable[PodFacts]) -> dict[str, str]:
    """Return the variable for those of a job's pods whose sidecar does not run: pure."""
    idle = [one for one in pods if not one.runs]
    sent = [{**asdict(one), "why": one.why[:WHY_MOST]} for one in idle[:SENT_MOST]]
    if len(idle) > SENT_MOST:
        more = f"and {counted(len(idle) - SENT_MOST, 'more pod')}"
        sent.append(asdict(PodFacts(more, "Pending", runs=False)))
    return {NOT_RUNNING: json.dumps(sent)} if sent else {}


def not_running(environ: Mapping[str, str], now_unix_s: float) -> list[PodLine]:
    """Return the rows of those pods; none if a newer version sends what cannot be read: pure."""
    try:
        sent = json.loads(environ.get(NOT_RUNNING) or "[]")
        pods = [PodFacts(**{key: one[key] for key in _KNOWN & one.keys()}) for one in sent]
        return pod_lines(None, pods, now_unix_s)
    except (AttributeError, TypeError, ValueError):
        return []
