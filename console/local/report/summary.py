# SPDX-License-Identifier: Apache-2.0
"""The last lines of a run: a summary of the whole. Pure."""

from __future__ import annotations

from console.counting import counted
from console.local.report.timeline import Timeline

_HOW_TO_SEE_STEPS = (
    "No step was found in the script's output, so what a change costs is unknown. Print them, as in"
    ' print(f"step {step}"), or give --step REGEX, or call muster.report_step(step); to lose none,'
    " see docs/training.md#a-loop-of-your-own."
)


def closing_lines(timeline: Timeline, *, finished: bool) -> list[str]:
    """Return lines with the number of rounds and steps, and the events that did nothing.

    It is known that no step is lost only if the job has ``finished``: one that was ended may have
    made steps that no checkpoint contains.
    """
    lines = [""]
    rounds = sum(moment.what == "round" for moment in timeline.moments)
    worlds = timeline.worlds.all
    facts = [f"{timeline.moments[-1].at_s:.1f} s", counted(rounds, "round")]
    if timeline.worlds.fault:
        lines.append(f"warning: {timeline.worlds.fault}.")
    elif worlds:
        facts.append(f"{worlds[-1].last_step} steps in {counted(len(worlds), 'world')}")
        again = timeline.worlds.steps_trained_again
        exact = timeline.worlds.exact
        if again:
            facts.append(f"{'' if exact else 'about '}{counted(again, 'step')} trained again")
        elif finished:
            facts.append("no step lost" if exact else "no printed step trained again")
    lines.insert(1, "; ".join(facts))
    if rounds and not worlds and all(moment.what != "error" for moment in timeline.moments):
        lines.append(_HOW_TO_SEE_STEPS)
    events = [moment for moment in timeline.moments if moment.kind == "event"]
    if idle := timeline.events_without_effect:
        lines.append(f"warning: {len(idle)} of {counted(len(events), 'event')} did nothing:")
        lines += [f"  {f'{moment.what} {moment.who}'.rstrip()}: {moment.detail}" for moment in idle]
    return lines
