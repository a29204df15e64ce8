# SPDX-License-Identifier: Apache-2.0
"""The screen of ``muster top``: tables made of what ``muster status --json`` says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.verdict.states import Level
from console.job.output import Grid, Toned
from console.job.rows import JobLine, PodFacts, PodLine, StatusObject, job_line
from rdzv.sentences import counted, duration

EVENTS_SHOWN = 5
"""The events on the screen: the last ones."""

CHOSEN = ">"
"""The mark of the pod that a key is for."""

_LEVELS: dict[str, Level] = {"failed": "fault", "lost": "fault", "quarantine": "warning"}


@dataclass(frozen=True, slots=True)
class TopScene:
    """The state of a job at one moment, as its sidecar or its store and its pods have it.

    ``pods``: those that the API server lists; None without one. ``trouble``: why no state is
    known, or no new one.
    """

    namespace: str
    job: str
    status: StatusObject | None
    pods: Sequence[PodFacts] | None = ()
    trouble: str = ""

    def line(self, now_unix_s: float) -> JobLine:
        """Return the job and its pods."""
        return job_line(
            self.namespace, self.job, self.status, self.pods or (), now_unix_s, trouble=self.trouble
        )

    def choices(self, line: JobLine) -> list[str]:
        """Return the pods that a key may be for, in the order of ``line``.

        Of a cluster they are those that the API server lists: a sidecar may make names up.
        """
        names = dict.fromkeys(pod.name for pod in line.pods)
        listed = None if self.pods is None else {pod.name for pod in self.pods}
        return [name for name in names if listed is None or name in listed]


def top_grids(
    scene: TopScene, now_unix_s: float, *, chosen: str | None = None, keys: str = ""
) -> list[Grid]:
    """Return the tables of the screen; ``chosen``: the pod that a key is for."""
    line = scene.line(now_unix_s)
    grids = [_headline(line, now_unix_s), _figures(line)]
    if line.do:
        grids.append(Grid(f"→ {line.do}", (), (), line.level))
    if line.pods:
        grids.append(_pods(line.pods, chosen))
    status = scene.status or {}
    said = [str(status.get(name) or "") for name in ("slow_save", "straggler")]
    grids += [Grid(one, (), (), "warning") for one in said if one]
    if events := list(status.get("events") or [])[-EVENTS_SHOWN:]:
        rows = tuple(_event(one, now_unix_s) for one in events)
        grids.append(Grid("", ("AGO", "EVENT", "POD", "WHY"), rows, key=2))
    return [*grids, *([Grid(keys, (), (), "note")] if keys else [])]


def _headline(line: JobLine, now_unix_s: float) -> Grid:
    lasts = ""
    if line.since_unix_s:
        lasts = f" for {duration(max(0.0, now_unix_s - line.since_unix_s))}"
    why = f": {line.why}" if line.why else ""
    return Grid(f"{line.namespace}/{line.name} {line.phase}{lasts}{why}", (), (), line.level)


def _figures(line: JobLine) -> Grid:
    """Return the figures of the job, in one line; those that are unknown are left out."""
    found = []
    if line.nodes is not None:
        found.append(f"{counted(line.nodes, 'node')} ({line.least}-{line.most})")
    if line.step is not None:
        found.append(f"step {line.step:,}")
    if line.rate:
        found.append(f"{line.rate:.3g} steps/s, {1 / line.rate:.3g} s a step")
    if line.eta_s is not None:
        found.append(f"done in {duration(line.eta_s)}")
    if line.saved_step is not None:
        ago = "" if line.saved_s is None else f" {duration(line.saved_s)} ago"
        found.append(f"step {line.saved_step:,} saved{ago}")
    elif line.step is not None:
        found.append("nothing saved by all ranks yet")
    return Grid(" · ".join(found) or "no figures yet", (), ())


def _pods(pods: Sequence[PodLine], chosen: str | None) -> Grid:
    rows = []
    for pod in pods:
        waits = "-" if pod.waits is None else f"{pod.waits:.0%}{' slow' if pod.slow else ''}"
        name = pod.name if chosen is None else f"{CHOSEN if pod.name == chosen else ' '} {pod.name}"
        rows.append(
            (
                name,
                Toned(pod.state, pod.level),
                pod.ranks or "-",
                "-" if pod.step is None else f"{pod.step:,}",
                Toned(waits, "warning" if pod.slow else None),
                pod.node or "-",
                "-" if pod.age_s is None else duration(pod.age_s),
                pod.why,
            )
        )
    return Grid("", ("POD", "STATE", "RANKS", "STEP", "WAITS", "NODE", "AGE", "WHY"), tuple(rows))


def _event(one: StatusObject, now_unix_s: float) -> tuple[str, ...]:
    ago_s = max(0.0, now_unix_s - float(one.get("at_unix_s") or now_unix_s))
    what = str(one.get("what") or "")
    who, why = str(one.get("member") or ""), str(one.get("why") or "")
    return (duration(ago_s), Toned(what, _LEVELS.get(what)), who, why)
