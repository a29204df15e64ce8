# SPDX-License-Identifier: Apache-2.0
"""Findings about a job: why it is not getting on, or may lose work; a pure function of its keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from agent.verdict.clocks import sentence, skews
from agent.verdict.decision import launcher_cure, verdict
from agent.verdict.states import STATES, Level
from agent.verdict.view import JobView
from console.job.reading import meant_job, missing_job
from rdzv.drain.standing import phase_of
from rdzv.keys import JobKeys
from rdzv.records.job import shown_round
from rdzv.sentences import counted

WORST_FIRST: Sequence[Level] = ("fault", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding with, unless it is in order, its remedy."""

    check: str
    level: Level
    sentence: str
    remedy: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by level; those of one level stay in order."""
    return sorted(findings, key=lambda finding: WORST_FIRST.index(finding.level))


def explain(view: JobView, now_unix_s: float, others: Collection[JobKeys] = ()) -> list[Finding]:
    """Return the findings about a job, in the order of ``docs/stuck.md``.

    ``others``: the jobs that the store has, if it does not have this one.
    """
    if view.job is None:
        wanted = JobKeys(view.namespace, view.name)
        return [Finding("members", "warning", missing_job(wanted), meant_job(wanted, others))]
    found = verdict(view, now_unix_s)
    meaning = STATES[found.state]
    why = f": {found.why}" if found.why else ""
    state = Finding(meaning.check, meaning.level, f"{view.name} is {found.state}{why}", found.do)
    findings = [
        *_members(view),
        *_launchers(view),
        *_failures(view, found.why),
        *_saves(view, now_unix_s),
        *_quarantines(view),
        *_unreached(view),
        *_drains(view),
        *_clocks(view, now_unix_s),
    ]
    # The verdict has the first fault of its check already.
    rest = [one for one in findings if one.check != meaning.check or one.sentence not in found.why]
    return [state, *rest]


def _members(view: JobView) -> Iterator[Finding]:
    rules = view.snapshot.rules
    if rules is None:
        return
    here, sizes = len(view.listing.listed), rules.policy
    standby = f", {len(view.listing.standby)} on standby" if view.listing.standby else ""
    if here >= sizes.smallest:
        bounds = f"min {rules.policy.min_nodes}, max {rules.policy.max_nodes}"
        yield Finding("members", "ok", f"{counted(here, 'pod')} can train{standby} ({bounds})")


def _launchers(view: JobView) -> Iterator[Finding]:
    for name, fault in sorted(view.bypasses.items()):
        remedy = launcher_cure(view, name, fault)
        level: Level = "warning" if remedy else "note"
        yield Finding("launchers", level, f"{name}: {fault.sentence}", remedy)
    if not view.bypasses and view.newest_run is not None:
        yield Finding("launchers", "ok", "every torchrun that was seen takes part")


def _failures(view: JobView, verdict_why: str) -> Iterator[Finding]:
    others = {name: one for name, one in view.failures.items() if one.sentence not in verdict_why}
    for name, failure in sorted(others.items()):
        yield Finding(
            "rounds",
            "note",
            f"{name} failed in round {shown_round(failure.round)}: {failure.sentence}",
        )


def _saves(view: JobView, now_unix_s: float) -> Iterator[Finding]:
    if view.slow_save:
        slow, _, remedy = view.slow_save.partition("; set ")
        yield Finding("saves", "warning", slow, f"set {remedy}")
    expired = [one for one in view.history if one.what == "drain"][-1:]
    for one in expired:
        if one.details.get("outcome") == "expired":
            yield Finding(
                "saves",
                "warning",
                f"the last drain, of {one.member}, expired before all ranks had saved",
                "set terminationGracePeriodSeconds and MUSTER_GRACE_S above the time of a save, or"
                " see docs/drain.md if it waited for min",
            )
    if (last := view.last_save) is None:
        return
    if last.step is None and last.steps_at_risk:
        yield Finding(
            "saves",
            "warning",
            f"no save is complete: {last.steps_at_risk:,} steps are at risk",
            "let the script save, and report it on every rank: docs/training.md",
        )
    elif late := last.late(now_unix_s):
        yield Finding("saves", "warning", late, "see that every rank reports its saves")
    if view.mute:
        yield Finding("saves", "warning", view.mute, "see the log of that pod's sidecar")


def _unreached(view: JobView) -> Iterator[Finding]:
    """Say whose machine would be missed late only, as another sidecar cannot watch it."""
    for name, found in sorted(view.unreached.items()):
        yield Finding(
            "peers",
            "note",
            f"{name} cannot reach the sidecar of {', '.join(found.members)}: that its machine is"
            " lost is seen when its lease ends",
            "let the pods of the job reach each other's HTTP port (9400): a NetworkPolicy may stop"
            " them",
        )


def _quarantines(view: JobView) -> Iterator[Finding]:
    for name in sorted(view.listing.quarantined):
        record = view.snapshot.quarantines[name]
        yield Finding(
            "quarantine",
            "warning",
            f"{name} is {record.sentence}",
            f"replace its machine, or mend it and let it in: muster admit {name} --job {view.name}",
        )


def _drains(view: JobView) -> Iterator[Finding]:
    for drain in sorted(view.snapshot.drains.values(), key=lambda one: one.member):
        if drain.outcome or drain.member not in view.snapshot.members:
            continue
        phase = phase_of(view.snapshot, drain, finishing=view.finishes(drain.member))
        had = "" if drain.seconds_left is None else f" (it had {drain.seconds_left:.0f} s)"
        held = "too few others" in phase.sentence
        yield Finding(
            "drains",
            "warning" if held else "note",
            f"{drain.member} drains{had}: {phase.sentence}",
            f"start another pod, or: muster drain {drain.member} --job {view.name} --cancel"
            if held
            else "",
        )


def _clocks(view: JobView, now_unix_s: float) -> Iterator[Finding]:
    if found := skews(view.history, now_unix_s):
        yield Finding(
            "clocks",
            "warning",
            f"{sentence(found, view.nodes)}: the ages in muster status and the times in muster"
            " history are wrong by as much, and certificates may seem out of date",
            "set the clock there, and see that it is kept (chronyc tracking, timedatectl); Muster"
            " itself compares no clocks",
        )
