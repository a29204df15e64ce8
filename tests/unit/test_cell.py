# SPDX-License-Identifier: Apache-2.0
"""A counter's value, kept up as its addends change, beside the same counted anew."""

from __future__ import annotations

from random import Random

import pytest

from launcher_shim.c10d.values.cell import ABSENT, Cell, Part, read_number, wrap_int64


def counted_anew(cell: Cell) -> tuple[bytes | None, int]:
    there = [part for part in (cell.base, *cell.addends.values()) if part.value is not None]
    revision = max((part.mod_revision for part in there), default=0)
    added = [part.value for part in cell.addends.values() if part.value is not None]
    if not added or b"word" in added or cell.base.value == b"word":
        return cell.base.value, revision
    base = read_number(cell.base.value) if cell.base.value is not None else 0
    return b"%d" % wrap_int64(base + sum(map(read_number, added))), revision


@pytest.mark.parametrize("seed", range(20))
def test_the_value_is_that_of_its_parts_whatever_becomes_of_them(seed: int) -> None:
    random = Random(seed)
    cell = Cell()
    values = [None, b"1", b"-7", b"  12abc", b"9223372036854775807", *([b"word"] * (seed % 2))]
    for revision in range(1, 300):
        part = Part(random.choice(values), revision, revision)
        if random.random() < 0.1:
            cell.base = part
        else:
            cell.put_addend(f"a{random.randrange(8)}", part)
        assert (cell.value(), cell.value_revision()) == counted_anew(cell)
        assert cell.is_sum() == any(one.value is not None for one in cell.addends.values())


def test_a_counter_without_addends_is_absent() -> None:
    cell = Cell()
    cell.put_addend("a", Part(b"1", 5, 5))
    cell.put_addend("a", Part(None, 6, 0))
    assert (cell.value(), cell.value_revision()) == (None, 0)
    assert cell.base is ABSENT
