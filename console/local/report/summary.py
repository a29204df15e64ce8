# SPDX-License-Identifier: Apache-2.0
"""The last lines of a run: a summary of the whole. Pure."""

from __future__ import annotations

from console.local.report.timeline import Timeline
from rdzv.sentences import counted

_HOW_TO_SEE_STEPS = (
    "No step was found in the script's output, so what a change costs is unknown. Print them, as in"
    ' print(f"step {step}"), or give --step REGEX, or call muster.report_step(step); to lose none,'
    " see docs/training.md#a-loop-of-your-own."
)


def facts(timeline: Timeline, *, finished: bool) -> str:
    """Return the duration, and the number of rounds and steps.

    It is known that no step is lost only if the job has ``finished``: one that was ended may have
    made steps that no checkpoint contains.
    """
    rounds, worlds = _rounds(timeline), timeline.worlds
    found = [f"{timeline.moments[-1].at_s:.1f} s", *([counted(rounds, "round")] if rounds else [])]
    if worlds.all and not worlds.fault:
        found.append(f"{worlds.all[-1].last_step} steps in {counted(len(worlds.all), 'world')}")
        again = worlds.steps_trained_again
        if again:
            about = "" if worlds.exact else "about "
            found.append(f"{about}{counted(again, 'step')} trained again")
        elif finished:
            found.append("no step lost" if worlds.exact else "no printed step trained again")
    return "; ".join(found)


def closing_lines(timeline: Timeline) -> list[str]:
    """Return lines with what is not known of the steps, and the events that did nothing."""
    lines = []
    worlds = timeline.worlds
    if worlds.fault:
        lines.append(f"warning: {worlds.fault}.")
    failed = any(moment.what == "error" for moment in timeline.moments)
    if _rounds(timeline) and not worlds.all and not failed:
        lines.append(_HOW_TO_SEE_STEPS)
    events = [moment for moment in timeline.moments if moment.kind == "event"]
    if idle := timeline.events_without_effect:
        lines.append(f"warning: {len(idle)} of {counted(len(events), 'event')} did nothing:")
        lines += [f"  {f'{moment.what} {moment.who}'.rstrip()}: {moment.detail}" for moment in idle]
    return lines


def _rounds(timeline: Timeline) -> int:
    return sum(moment.what == "round" for moment in timeline.moments)
