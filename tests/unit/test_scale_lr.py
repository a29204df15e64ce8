# SPDX-License-Identifier: Apache-2.0
"""The learning rate of an elastic world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.data import scale_lr

SIZES = st.integers(1, 4096)


def test_it_follows_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scale_lr(0.1, 8, world_size=16) == pytest.approx(0.2)
    assert scale_lr(0.1, 8, world_size=2) == pytest.approx(0.025)
    assert scale_lr(0.1, 8, world_size=32, rule="sqrt") == pytest.approx(0.2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert scale_lr(0.1, 8) == pytest.approx(0.05)
    monkeypatch.delenv("WORLD_SIZE")
    assert scale_lr(0.1, 1) == 0.1


def test_it_warms_up_from_the_former_world() -> None:
    rates = [
        scale_lr(0.1, 8, world_size=16, former_world_size=4, step=step, warmup_steps=3)
        for step in range(5)
    ]
    assert rates == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    assert scale_lr(0.1, 8, world_size=16, warmup_steps=3) == pytest.approx(0.1)


@given(
    SIZES, SIZES, SIZES, st.integers(0, 50), st.integers(0, 50), st.sampled_from(["linear", "sqrt"])
)
def test_it_never_leaves_what_lies_between_the_two_worlds(
    base: int, size: int, former: int, step: int, warmup: int, rule: str
) -> None:
    rate = scale_lr(
        1.0,
        base,
        world_size=size,
        former_world_size=former,
        step=step,
        warmup_steps=warmup,
        rule=rule,
    )
    ends = [scale_lr(1.0, base, world_size=end, rule=rule) for end in (former, size)]
    assert min(ends) * (1 - 1e-9) <= rate <= max(ends) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"base_world_size": 0}, "world sizes are at least 1"),
        ({"world_size": 0}, "world_size=0"),
        ({"former_world_size": -1}, "former_world_size=-1"),
        ({"rule": "cubic"}, "'cubic'"),
        ({"step": -1}, "step=-1"),
        ({"warmup_steps": -2}, "warmup_steps=-2"),
    ],
)
def test_mistakes_are_said(arguments: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        scale_lr(**{"base_lr": 0.1, "base_world_size": 8, **arguments})  # type: ignore[arg-type]
