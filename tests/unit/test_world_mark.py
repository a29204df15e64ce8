# SPDX-License-Identifier: Apache-2.0
"""The mark of the newest world in a directory of checkpoints that have names of a trainer's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muster.resuming import (
    ALONE,
    ROUNDS_PER_LIFE,
    LaterWorld,
    WorldMark,
    is_left_behind,
    mark,
    marked,
    world_tag,
)
from muster.saved_steps import CommittedStep

Make = Callable[..., WorldMark]
EARLIER, LATER = world_tag("job", 3, "a:1"), world_tag("job", 4, "b:1")


@pytest.fixture
def world(tmp_path: Path) -> Make:
    def make(*tags: str, marks: bool = True) -> WorldMark:
        """Each call of ``save_tag()`` gives the next of ``tags``, and then the last of them."""
        left = [*tags]
        tag = lambda: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
        return WorldMark(str(tmp_path / "out"), marks=marks, tag=tag)

    return make


def test_i1_a_world_saves_no_more_once_a_later_one_has_begun(tmp_path: Path, world: Make) -> None:
    earlier, later = world(EARLIER), world(LATER)
    earlier.begin()
    earlier.check()
    later.begin()
    later.check()
    with pytest.raises(LaterWorld, match=f"{LATER}.*{EARLIER}.*cut off"):
        earlier.check()
    with pytest.raises(LaterWorld):
        world(EARLIER, marks=False).check()
    assert marked(str(tmp_path / "out")) == LATER


def test_an_earlier_world_that_begins_late_stops_itself(tmp_path: Path, world: Make) -> None:
    """As its ranks take longer to load: the later world does not stop for it."""
    earlier, later = world(EARLIER), world(LATER)
    later.begin()
    earlier.begin()
    later.check()
    with pytest.raises(LaterWorld):
        earlier.check()


def test_what_another_store_has_left_stops_no_world(tmp_path: Path, world: Make) -> None:
    """Rounds of a store that was emptied count from 0."""
    world(LATER).begin()
    fresh = world(EARLIER)
    fresh.begin()
    fresh.check()
    assert marked(str(tmp_path / "out")) == EARLIER


def test_a_rank_whose_round_is_unknown_neither_marks_nor_stops(tmp_path: Path, world: Make) -> None:
    world(ALONE).begin()
    assert not (tmp_path / "out").exists()
    world(LATER).begin()
    world(ALONE).check()


def test_i1_a_round_that_is_confirmed_late_is_guarded_from_then_on(
    tmp_path: Path, world: Make
) -> None:
    late = world(ALONE, EARLIER)
    late.begin()
    assert not (tmp_path / "out").exists()
    late.check()
    assert marked(str(tmp_path / "out")) == EARLIER
    world(LATER).begin()
    with pytest.raises(LaterWorld, match=f"{LATER}.*{EARLIER}"):
        late.check()


def test_what_cannot_be_marked_can_be_trained(
    tmp_path: Path, world: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file")
    world(LATER).begin()
    world(LATER).check()
    assert "cannot write which world saves to" in caplog.text
    mark(str(tmp_path), "no tag")
    assert marked(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("step", "tag", "behind"),
    [
        (40, EARLIER, False),
        (41, EARLIER, True),
        (41, LATER, False),
        (41, world_tag("job", 5, "c:1"), False),
        (41, "", False),
    ],
)
def test_later_steps_of_an_earlier_world_are_left_behind(step: int, tag: str, behind: bool) -> None:
    assert is_left_behind(step, tag, CommittedStep(40, tag=LATER)) is behind
    assert not is_left_behind(step, tag, CommittedStep(40))
    assert not is_left_behind(step, tag, CommittedStep(40, tag=LATER, of_former_life=True))
    assert not is_left_behind(step, tag, None)


def test_a_tag_of_another_life_leaves_no_checkpoint_behind() -> None:
    """As in a directory that another job has left to this one."""
    this_life = world_tag("job", ROUNDS_PER_LIFE, "b:1")
    assert this_life > EARLIER
    assert not is_left_behind(800, EARLIER, CommittedStep(500, tag=this_life))
