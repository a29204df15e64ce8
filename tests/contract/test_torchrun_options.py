# SPDX-License-Identifier: Apache-2.0
"""The table of torchrun's options beside torch's own parser."""

from __future__ import annotations

import argparse

import pytest

from launcher_shim.pod.torchrun_options import OPTIONS, VARIABLES

pytest.importorskip("torch.distributed.run")
from torch.distributed.run import get_args_parser

TABLE = {option.name: option for option in OPTIONS}


def actions() -> list[argparse.Action]:
    return [action for action in get_args_parser()._actions if action.option_strings]


def long_name(action: argparse.Action) -> str:
    return action.option_strings[-1].lstrip("-").replace("_", "-")


def test_every_option_of_torchrun_is_in_the_table() -> None:
    assert {long_name(action) for action in actions()} <= {*TABLE}


@pytest.mark.parametrize("action", actions(), ids=long_name)
def test_an_option_takes_a_value_in_the_table_as_in_torchrun(action: argparse.Action) -> None:
    option = TABLE[long_name(action)]
    assert option.switch == (action.nargs == 0)
    shorts = {name[1:] for name in action.option_strings if not name.startswith("--")}
    assert shorts == ({option.short} if option.short else set())


@pytest.mark.parametrize("name", ["nnodes", "rdzv-endpoint", "rdzv-id", "max-restarts"])
def test_an_option_has_the_variable_that_torchrun_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[name], "7")
    default = next(action.default for action in actions() if long_name(action) == name)
    assert str(default) == "7"
