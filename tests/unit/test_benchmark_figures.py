# SPDX-License-Identifier: Apache-2.0
import json
from xml.etree import ElementTree

import pytest

from benchmarks import gather
from benchmarks.figures import Bar, Figure, of_medians, percentile
from benchmarks.picture import draw_figures


@pytest.mark.parametrize(
    ("count", "share", "expected"), [(300, 0.99, 297), (100, 0.07, 7), (3, 0.5, 2), (1, 0.99, 1)]
)
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(
    count: int, share: float, expected: int
) -> None:
    assert percentile([float(n) for n in range(count, 0, -1)], share) == expected


@pytest.mark.parametrize(
    ("bar", "ok"),
    [
        (Bar("value", "<=", 2), True),
        (Bar("value", "<=", 1.9), False),
        (Bar("value", "==", 2), True),
        (Bar("ratio", ">=", 0.5), True),
        (Bar("ratio", ">=", 0.51), False),
        (None, True),
    ],
)
def test_a_bar_judges_the_median_or_its_ratio(bar: Bar | None, ok: bool) -> None:
    assert of_medians("x", "s", bar, [9, 2, 1], [4, 4, 1], "other").ok is ok


def test_a_ratio_without_a_baseline_never_holds() -> None:
    assert not Figure("x", 1, "s", Bar("ratio", ">=", 0.1), (1,)).ok


def test_the_line_has_the_documented_fields() -> None:
    line = json.loads(of_medians("x", "s", Bar("ratio", "<=", 3), [3], [2], "other").line())
    assert line == {
        "name": "x",
        "value": 3.0,
        "unit": "s",
        "baseline": 2.0,
        "ratio": 1.5,
        "bar": "ratio <= 3",
        "ok": True,
    }


def test_the_picture_is_sound_and_says_what_was_missed() -> None:
    missed = of_medians("a < b & c", "s", Bar("value", "<=", 1), [3, 2, 4], [0.0], "other")
    picture = draw_figures("title", [missed, Figure("y", 0.0, "1", None, ())])
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "value &lt;= 1, missed" in picture
    assert picture.count("<circle") == 4


def test_worlds_for_newcomers_and_the_share_of_time_trained() -> None:
    def world(first_s: float, last_s: float) -> dict[str, object]:
        at = [first_s + 0.5 * n for n in range(round((last_s - first_s) / 0.5) + 1)]
        return {"points": [(moment, 1) for moment in at]}

    undisturbed = {"worlds": [world(3, 200)]}
    assert gather.judged(undisturbed) == (0, 1.0)
    joined = {"worlds": [world(3, 60), world(67, 200), {"points": []}]}
    assert gather.judged(joined) == (1, 1 - 7 / gather.JUDGED_S)
    # The last world does not come about.
    lost = {"worlds": [world(3, gather.BEGIN_S + gather.JUDGED_S / 2)]}
    assert gather.judged(lost) == (0, 0.5)
