# SPDX-License-Identifier: Apache-2.0
"""A trainer that cannot live through a change of its world is refused; which rank stands alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.world.conduct import comes_later
from muster.world.reentry import fault_in_place


def trainer(args: dict[str, Any], **given: Any) -> Any:
    usual = {
        "optim": "adamw_torch",
        "n_gpu": 1,
        "torch_compile": False,
        "auto_find_batch_size": False,
        "use_liger_kernel": False,
        "debug": [],
    }
    own = {"model_init": None, "neftune_noise_alpha": None}
    accelerator = SimpleNamespace(scaler=given.pop("scaler", None))
    return SimpleNamespace(
        args=SimpleNamespace(**{**usual, **args}), accelerator=accelerator, **{**own, **given}
    )


def test_plain_ddp_is_not_refused() -> None:
    assert fault_in_place(trainer({})) == ""


@pytest.mark.parametrize(
    ("args", "given", "named"),
    [
        ({}, {"is_deepspeed_enabled": True}, "a whole model on each rank"),
        ({}, {"is_fsdp_enabled": True}, "a whole model on each rank"),
        ({}, {"is_distributed_loading_by_transformers": True}, "a whole model on each rank"),
        ({"n_gpu": 2}, {}, "a whole model on each rank"),
        ({}, {"scaler": object()}, "fp16=True"),
        ({}, {"model_init": list}, "model_init"),
        ({}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, {}, "torch_compile"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"use_liger_kernel": True}, {}, "use_liger_kernel"),
        ({"debug": ["underflow_overflow"]}, {}, "debug"),
        ({"optim": "galore_adamw_layerwise"}, {}, "optim='galore_adamw_layerwise'"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    args: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    assert named in fault_in_place(trainer(args, **given))


@pytest.mark.parametrize(
    ("order", "alone"),
    [
        (None, False),
        ({"phase": "idle", "number": -1}, False),  # the first world: its launcher's ranks are there
        ({"phase": "idle", "number": 1}, True),
        ({"phase": "broken", "number": 3}, True),  # a rank that its launcher has started again
        ({"phase": "fall-back", "number": 3}, False),
    ],
)
def test_a_rank_that_comes_into_a_world_that_trains_waits_for_no_others(
    tmp_path: Path, order: dict[str, Any] | None, alone: bool
) -> None:
    if order is not None:
        (tmp_path / "world").write_text(json.dumps({"epoch": 4, **order}))
    environ = {"MUSTER_RUN_DIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "job"}
    assert comes_later(environ) is alone
    assert not comes_later({"MUSTER_RUN_DIR": str(tmp_path)})
