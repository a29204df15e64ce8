# SPDX-License-Identifier: Apache-2.0
"""Events of pods and of the torchruns in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.pods import Pod
    from tests.simulation.story import Story


def die(story: Story) -> None:
    """Lose one pod for good; one of the same name may come."""
    pod = story.any()
    if pod is None or len(story.job.present()) <= 1:
        return
    pod.die()
    story.later(story.random.uniform(0.5, 15.0), lambda: story.replace(pod))


def end_torchrun(story: Story) -> None:
    """Kill one training container; it is started again."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        pod.end_container()
        story.later(story.random.uniform(0.5, 4.0), pod.start_container)


SEEN_S = 5.0
"""Within so long a death has been counted, or not."""


def end_torchrun_after_progress(story: Story) -> None:
    """Kill one whose ranks have made enough steps: that is never counted."""
    pod, steps = story.any(), story.job.shape.quarantine.steps
    torchrun = pod.torchrun if pod is not None else None
    rank = torchrun.rank if torchrun is not None else None
    if pod is None or rank is None or pod.launcher != "steady":
        return
    if rank.world.trained.get(pod.name, 0) <= rank.world.start + steps:
        return
    story.say(pod, "it has made progress")
    before = _deaths(story, pod)
    pod.end_container()
    story.later(story.random.uniform(0.5, 4.0), pod.start_container)

    def check() -> None:
        if _deaths(story, pod) > before:
            story.invariants.break_(f"I11: {pod.name} has made progress, and its death counts")

    story.later(SEEN_S, check)


def _deaths(story: Story, pod: Pod) -> int:
    record = story.invariants.snapshot.quarantines.get(pod.name)
    return record.deaths if record is not None and record.pod_uid == pod.pod_uid else 0


SLOW_S = (5.0, 60.0)
FOR_EVER_S = (200.0, 400.0)


def stick(story: Story) -> None:
    """Let one pod's workers not end when its torchrun stops them: for moments, or for very long."""
    world = [seat.member for seat in story.invariants.rounds.round.frozen]
    pod = story.any()
    torchrun = pod.torchrun if pod is not None else None
    if pod is None or torchrun is None or torchrun.round is None or len(world) < 2:
        return
    if any(other.torchrun is not None and other.torchrun.sticks for other in story.job.present()):
        return  # where all of a world do, nobody can tell that it does not train on
    story.say(pod, "its workers will not end")
    story.job.sticks = torchrun.sticks = True

    def let_go() -> None:
        story.say(pod, "its workers end after all")
        torchrun.sticks = False

    story.later(story.random.uniform(*story.random.choice((SLOW_S, FOR_EVER_S))), let_go)


STANDS_S = (40.0, 90.0)


def stand_still(story: Story) -> None:
    """Stop one agent for longer than it takes to be given up; its workers train on."""
    pod = story.any()
    torchrun = pod.torchrun if pod is not None else None
    rank = torchrun.rank if torchrun is not None else None
    if pod is None or torchrun is None or rank is None or pod.name not in rank.world.trained:
        return
    agents = [other.torchrun for other in story.job.present() if other.torchrun is not None]
    if not all(agent.runs.is_set() for agent in agents):
        return
    story.say(pod, "its torchrun is stopped")
    story.job.disks_fail = False  # a save that fails is not waited for once more
    torchrun.runs.clear()
    world = rank.world

    def go_on() -> None:
        story.say(pod, "its torchrun goes on")
        torchrun.runs.set()
        saved = set.intersection(*(world.saved.get(name, set()) for name in world.ranks))
        step = max(world.trained.values())
        if story.invariants.rounds.round.number != world.round[1] and step not in saved:
            story.invariants.break_(f"{pod.name} is given up, and step {step} is not saved")

    story.later(story.random.uniform(*STANDS_S), go_on)


def fail_workers(story: Story) -> None:
    """Let one pod's workers fail; its agent has restarts left."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        story.say(pod, "its workers are to fail")
        pod.torchrun.order("rejoin")


def close(story: Story) -> None:
    """Let one pod's workers fail for the last time: its agent wants the run closed."""
    pod = story.any()
    if pod is not None and pod.torchrun is not None:
        story.say(pod, "its workers are to fail for the last time")
        story.invariants.rounds.may_close = True
        pod.torchrun.order("fail")


FAILS_S = (15.0, 90.0)
"""How long pods fail that are well afterwards."""

BACK_OFF_S = 20.0


def all_fail_at_first(story: Story) -> None:
    """Let all pods fail alike in each world for a while, as while shared storage is away."""
    _fail_at_first(story, "abcdefgh")
    story.job.back_off_s = BACK_OFF_S


VAIN_S = (30.0, 500.0)
"""How long workers cannot start, as while a package or a data volume is missing."""

SOON_AFTER_S = (1.0, 60.0)


def none_starts_at_first(story: Story) -> None:
    """Let the workers of all pods fail alike before their first step, for a while."""
    launchers = story.job.launchers
    launchers.update(dict.fromkeys("abcdefgh", "broken"))

    def recover() -> None:
        story.say(None, "workers can start from now on")
        launchers.update(dict.fromkeys("abcdefgh", "steady"))
        story.later(story.random.uniform(*SOON_AFTER_S), lambda: story.tell(come_fresh))

    story.later(story.random.uniform(*VAIN_S), recover)


def one_fails_at_first(story: Story) -> None:
    """Let the first pod fail in each world for a while, or to the end."""
    _fail_at_first(story, "a", for_ever=0.5)


def _fail_at_first(story: Story, names: str, for_ever: float = 0.0) -> None:
    launchers = story.job.launchers
    launchers.update(dict.fromkeys(names, "failing"))

    def recover() -> None:
        story.say(None, "what has made launchers fail is over")
        launchers.update(dict.fromkeys(names, "steady"))

    if story.random.random() >= for_ever:
        story.later(story.random.uniform(*FAILS_S), recover)


def come_fresh(story: Story) -> None:
    """Let a pod come under a name that nobody had."""
    name = next((name for name in "abcdefgh" if name not in story.job.pods), None)
    if name is not None and len(story.job.pods) < story.job.shape.most:
        story.say(None, f"{name} comes")
        story.come(name)
