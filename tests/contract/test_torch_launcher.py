# SPDX-License-Identifier: Apache-2.0
"""What the configuration of torch's launcher has to have, of the torch that is installed."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from launcher_shim.pod.torchrun import overruled
from launcher_shim.pod.torchrun_options import VARIABLES

pytest.importorskip("torch.distributed.launcher.api")
from torch.distributed.launcher import api

HERE = {VARIABLES["nnodes"]: "1:3", VARIABLES["local-addr"]: "10.1.0.7"} | {
    VARIABLES[name]: name for name in ("rdzv-backend", "rdzv-endpoint", "rdzv-id")
}


def test_the_configuration_has_each_field_that_changes() -> None:
    config = api.LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1)
    changes, _ = overruled(vars(config), HERE, ())
    assert changes.keys() <= {field.name for field in fields(config)}
    assert changes["local_addr"] == "10.1.0.7"


def test_the_launcher_calls_the_function_by_its_name_in_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = list(inspect.signature(api.launch_agent).parameters)
    assert parameters[:3] == ["config", "entrypoint", "args"]
    monkeypatch.setattr(api, "launch_agent", lambda *given, **_: given)
    config = api.LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1)
    assert api.elastic_launch(config, "python")("t.py") == (config, "python", ["t.py"])
