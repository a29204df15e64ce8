# SPDX-License-Identifier: Apache-2.0
"""The configuration of torch's launcher beside a sidecar, whatever has made it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher_shim.pod.torchrun import overruled

HERE = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
    "PET_RDZV_CONF": "is_host=0,read_timeout=300",
    "PET_NNODES": "1:3",
    "PET_LOCAL_ADDR": "10.1.0.7",
    "PET_MAX_RESTARTS": "10",
}
AS_DELIVERED = {
    "min_nodes": 1,
    "max_nodes": 3,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:29400",
    "run_id": "digits",
    "rdzv_configs": {"is_host": "0", "read_timeout": "300", "timeout": 900},
    "local_addr": "10.1.0.7",
    "max_restarts": 10,
}
STATIC = {
    "min_nodes": 2,
    "max_nodes": 2,
    "rdzv_backend": "static",
    "rdzv_endpoint": "head:29500",
    "run_id": "none",
    "rdzv_configs": {"rank": 1, "timeout": 900},
    "local_addr": None,
    "max_restarts": 0,
}


def after(change: dict[str, Any], *words: str) -> tuple[dict[str, Any], list[str]]:
    own = {**STATIC, **change}
    changes, said = overruled(own, HERE, words)
    return {**own, **changes}, said


def test_a_static_rendezvous_becomes_the_sidecars() -> None:
    assert after({}) == (
        AS_DELIVERED,
        [
            "nnodes: 2:2 is overruled by 1:3",
            "rdzv_backend: static is overruled by c10d",
            "rdzv_endpoint: head:29500 is overruled by localhost:29400",
        ],
    )


def test_what_torchrun_has_read_from_the_variables_stays_without_a_word() -> None:
    assert overruled(AS_DELIVERED, HERE, ()) == (
        {
            name: value
            for name, value in AS_DELIVERED.items()
            if name not in ("max_restarts", "local_addr")
        },
        [],
    )


@pytest.mark.parametrize(
    ("change", "words", "expected", "said"),
    [
        ({"max_restarts": 2}, (), {"max_restarts": 2}, 3),
        ({}, ("--max_restarts", "0"), {"max_restarts": 0}, 3),
        ({}, ("--max-r=0",), {"max_restarts": 0}, 3),
        ({}, ("--m", "--mixed_precision", "--main_process_port=1"), {"max_restarts": 10}, 3),
        ({"local_addr": "10.2.0.7"}, (), {"local_addr": "10.2.0.7"}, 3),
        ({"run_id": "7"}, (), {"run_id": "digits"}, 4),
        (
            {"rdzv_configs": {"join_timeout": 9, "read_timeout": 5, "is_host": False}},
            (),
            {"rdzv_configs": {"is_host": "0", "read_timeout": "300", "join_timeout": 9}},
            4,
        ),
    ],
)
def test_what_the_sidecar_does_not_set_is_kept(
    change: dict[str, Any], words: tuple[str, ...], expected: dict[str, Any], said: int
) -> None:
    config, sentences = after(change, *words)
    assert {name: config[name] for name in expected} == expected
    assert len(sentences) == said


def test_a_torch_without_such_a_field_is_not_guessed_at() -> None:
    with pytest.raises(KeyError):
        overruled({"min_nodes": 1, "max_nodes": 1}, HERE, ())
    with pytest.raises(ValueError, match="PET_NNODES is 'many'"):
        overruled(STATIC, {**HERE, "PET_NNODES": "many"}, ())
