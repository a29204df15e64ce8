# SPDX-License-Identifier: Apache-2.0
"""docs/launchers.md says what came of each launch line when it last ran."""

from __future__ import annotations

import pytest

from tests.support.launchers.life import COLUMNS
from tests.support.launchers.page import PAGE, recorded, render
from tests.support.launchers.refused import notes
from tests.support.launchers.rows import ROWS, Row


def test_the_page_is_what_is_on_record() -> None:
    assert PAGE.read_text() == render(), "run scripts/launchers-table"


def test_no_cell_of_a_row_that_ran_fails_or_is_left_out() -> None:
    for name, found in recorded()["rows"].items():
        assert set(found) == set(COLUMNS), name
        assert not [came for came in found.values() if came.startswith("fails")], name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_inject_takes_the_line(row: Row) -> None:
    notes(row.line)
