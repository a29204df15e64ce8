# SPDX-License-Identifier: Apache-2.0
"""Events of a store that is restored from a backup: what it has learnt since is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.departures import drain_patiently
from tests.simulation.network import Backup
from tests.simulation.outages import start_again
from tests.simulation.strays import former_lives

if TYPE_CHECKING:
    from tests.simulation.story import Story


SEEN_S = (0.0, 5.0)
"""Until a sidecar that has seen the restore is started anew."""

SAVED_WITHIN_S = 30.0
"""For so long a save is waited for."""

LOOK_S = 0.05
"""How often it is looked for."""

FORMED_S = 2.0
"""What ranks told each other through the store as they met, they have read after so long. Lost
before, it is told by nobody again, and they wait for as long as torch does."""


def backup_of_former_lives(story: Story) -> None:
    """Let Jobs of this name have been there, and back the store up while theirs is in it."""
    former_lives(story)
    story.later(4.0, lambda: _back_up(story))


def restore(story: Story) -> None:
    """Take the store away from all, and bring it back as it was some time ago."""
    _restore(story, lambda: None)


def restore_and_start_again(story: Story) -> None:
    """Likewise, and start all sidecars anew once they have seen it."""
    _restore(story, lambda: _start_again(story))


def restore_amid_save(story: Story) -> None:
    """Drain a pod with minutes to spare; lose the store, with all that is in it of that save."""
    if story.job.whole:
        backup, life = story.job.engine.backup(), story.job.engine.life
        drain_patiently(story)
        _lose_amid_save(story, backup, life, story.job.loop.time() + SAVED_WITHIN_S)


def _lose_amid_save(story: Story, backup: Backup, life: int, until_s: float) -> None:
    if _saves(story):
        story.say(None, f"a backup is at revision {backup.revision}, from before this save")
        _lose(story, backup, life, lambda: None)
    elif story.job.loop.time() < until_s:
        story.later(LOOK_S, lambda: _lose_amid_save(story, backup, life, until_s))


def _saves(story: Story) -> bool:
    """Whether a rank has saved for the present commit."""
    commit = story.invariants.snapshot.commit
    return commit is not None and any(
        commit.step in steps
        for (round, _), world in story.job.worlds.items()
        for steps in world.saved.values()
        if commit.phase in ("commit", "done") and commit.is_of(*round)
    )


def _restore(story: Story, then: Callable[[], None]) -> None:
    if not story.job.whole:
        return
    backup = story.job.engine.backup()
    if story.backup is not None and story.random.random() < 0.5:
        backup = story.backup
    story.say(None, f"a backup is at revision {backup.revision}")
    life = story.job.engine.life
    story.later(story.random.uniform(0.0, 15.0), lambda: _lose(story, backup, life, then))


def _back_up(story: Story) -> None:
    story.backup = story.job.engine.backup()
    story.say(None, f"the store is backed up at {story.backup.revision}")


def _lose(story: Story, backup: Backup, life: int, then: Callable[[], None]) -> None:
    if not story.job.whole:
        return
    if story.job.engine.life != life and backup is not story.backup:
        # Nobody restores, within seconds of a restore, what was backed up before it.
        story.say(None, f"the backup of revision {backup.revision} is out of date")
        return
    if story.job.loop.time() - story.invariants.rounds.formed_s < FORMED_S or _forms(story):
        story.later(0.5, lambda: _lose(story, backup, life, then))
        return
    story.say(None, f"the store is lost at revision {story.job.engine.revision}")
    story.job.cut_all(refuses=True)
    story.later(story.random.uniform(0.5, 15.0), lambda: _bring_back(story, backup, then))


def _forms(story: Story) -> bool:
    torchruns = [pod.torchrun for pod in story.job.present() if pod.torchrun is not None]
    return any(one.round is not None and one.rank is None for one in torchruns)


def _bring_back(story: Story, backup: Backup, then: Callable[[], None]) -> None:
    if _unknown_to_all(story, backup):
        # docs/operations.md tells people to start no pod then; here some may be on their way.
        story.say(None, "no sidecar has seen what the backup lacks: the store comes back as it was")
    else:
        story.say(None, f"the store is restored to revision {backup.revision}")
        story.job.engine.restore(backup)
        story.invariants.restored()
        story.job.shards.restored()
    story.job.mend_all()
    then()


def _unknown_to_all(story: Story, backup: Backup) -> bool:
    """Whether the backup is from before the first world, and no sidecar has seen that."""
    if not story.invariants.rounds.frozen or any(key.endswith(b"/round") for key in backup.kvs):
        return False
    sidecars = [pod.sidecar for pod in story.job.present() if pod.sidecar is not None]
    return all(sidecar.mirror.revision <= backup.revision for sidecar in sidecars)


def _start_again(story: Story) -> None:
    for pod in story.job.present():
        story.later(story.random.uniform(*SEEN_S), partial(start_again, story, pod))
