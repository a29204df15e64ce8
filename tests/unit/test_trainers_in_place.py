# SPDX-License-Identifier: Apache-2.0
"""A trainer of transformers that cannot live through a change of its world is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from muster.transformers_wiring import fault_in_place


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
