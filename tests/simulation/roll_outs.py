# SPDX-License-Identifier: Apache-2.0
"""Events that change the job's bounds: roll-outs, forwards and back, and values set by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rdzv.records.job import HistoryEntry, entry_operations
from rdzv.store import Compare, Put
from rdzv.store.memory.client import transact
from tests.simulation.nodes import KEYS, JobShape
from tests.support.records import by_policy

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story

NEXT_S = (1.0, 10.0)
"""Between two pods of a roll-out: Kubernetes waits until the newest one is ready."""


def roll_out(story: Story) -> None:
    """Replace all pods, one by one, by such with other bounds: new ones, or those of before."""
    job = story.job
    if any(pod.shape != job.template for pod in job.present()):
        return  # the one before still goes on
    former = job.template
    surges = story.random.random() < 0.5
    _begin(story, story.random.choice([*job.shapes, *[_drawn(story)] * 3]), surges=surges)
    if story.random.random() < 0.5:
        # Taken back, half-way through or when it is over.
        back_s = story.random.uniform(5.0, 40.0)
        story.later(back_s, lambda: _begin(story, former, surges=surges))


def _drawn(story: Story) -> JobShape:
    """Draw bounds with which the pods that are there can train, even without one of them."""
    pods = len(story.job.present())
    most = story.random.randint(1, pods + 1)
    least = story.random.randint(1, min(most, max(1, pods - 1)))
    return replace(story.job.template, least=least, most=most)


def _begin(story: Story, target: JobShape, *, surges: bool) -> None:
    job = story.job
    if target != job.template:
        job.template = target
        job.go_by(target)
    story.say(None, f"{'surging ' if surges else ''}roll-out of {target.bounds}")
    _replace_next(story, target, surges=surges)


def _replace_next(story: Story, target: JobShape, *, surges: bool) -> None:
    """Replace a pod of another template, until there is none, or another roll-out has begun."""
    old = [pod for pod in story.job.present() if pod.shape != target and not pod.terminating]
    if not old or target != story.job.template:
        return
    pod = old[-1]
    if surges:
        story.come(f"n{len(story.job.pods)}")
        story.later(story.random.uniform(*NEXT_S), lambda: _end(story, pod, target, surges=True))
    else:
        _end(story, pod, target, surges=False)


def _end(story: Story, pod: Pod, target: JobShape, *, surges: bool) -> None:
    if not pod.gone and not pod.terminating:
        pod.terminate(story.random.choice((10.0, 20.0)), "sigterm")
        if not surges:
            story.later(0.5, lambda: story.replace(pod))
    next_s = story.random.uniform(*NEXT_S)
    story.later(next_s, lambda: _replace_next(story, target, surges=surges))


def straggler(story: Story) -> None:
    """Lose a pod that a roll-out has not come to; one like it comes in its place."""
    late = [pod for pod in story.job.present() if pod.shape != story.job.template]
    late = [pod for pod in late if not pod.terminating]
    if not late or len(story.job.present()) <= 1:
        return
    pod = story.random.choice(late)
    pod.die()
    story.later(story.random.uniform(0.5, 5.0), lambda: _come_as_before(story, pod))


def _come_as_before(story: Story, pod: Pod) -> None:
    if story.job.pods[pod.name] is not pod:
        return
    newest, story.job.template = story.job.template, pod.shape
    story.come(pod.name)
    story.job.template = newest
    next_s = story.random.uniform(*NEXT_S)
    story.later(next_s, lambda: _replace_next(story, story.job.template, surges=False))


def set_bounds(story: Story) -> None:
    """Do as ``muster set`` does, over a cable of its own that always works."""
    job, stored = story.job, story.invariants.snapshot.job
    old = [pod for pod in job.present() if pod.shape != job.template]
    if stored is None or old or not _goes_by(stored.template_in_force, job.template):
        return  # what comes next may replace it
    wanted = _drawn(story)
    if wanted.bounds == (stored.policy.min_nodes, stored.policy.max_nodes):
        return
    job.go_by(wanted)
    story.say(None, f"{wanted.bounds} are set by hand")
    record = by_policy(stored, min_nodes=wanted.least, max_nodes=wanted.most)
    entry = HistoryEntry("set", "somebody@somewhere", "min and max are others", 0)
    history = entry_operations(KEYS, entry, story.invariants.snapshot.revision, ())
    here = Compare(KEYS.job, "mod", "=", stored.mod_revision)
    transact(job.engine, [here], [Put(KEYS.job, record.to_json()), *history])


def _goes_by(text: str, shape: JobShape) -> bool:
    return text == f"min={shape.least} max={shape.most}"
