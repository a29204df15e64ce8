# SPDX-License-Identifier: Apache-2.0
"""Which stage a container's torchruns are of."""

from __future__ import annotations

import pytest

from launcher_shim.c10d.rounds.stages import (
    Stages,
    container_of,
    split_stage,
    stage_name,
    torch_run_id,
)
from rdzv.errors import RecordError

HERE, AGAIN = "a" * 16, "b" * 16


@pytest.mark.parametrize("run_id", ["digits", "a (stage x)", "a (stage 1)", "a (stage 02)", "a\nb"])
@pytest.mark.parametrize("stage", [1, 2, 10])
def test_a_stage_is_named_after_its_run(run_id: str, stage: int) -> None:
    name = stage_name(run_id, stage)
    assert split_stage(name) == (run_id, stage)
    assert torch_run_id(name) == run_id


def test_one_that_has_ended_well_leads_to_the_next_stage_of_its_run() -> None:
    stages = Stages()
    assert stages.next(HERE, "digits") == "digits"
    assert stages.finish(HERE, "digits")
    assert stages.next(HERE, "digits") == "digits (stage 2)"
    assert stages.next(HERE, "faces") == "faces"
    assert stages.finish(HERE, "digits (stage 2)")
    assert stages.next(HERE, "digits") == "digits (stage 3)"


def test_a_stage_counts_once() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    stages.finish(HERE, "digits (stage 2)")
    assert not stages.finish(HERE, "digits")
    assert stages.next(HERE, "digits") == "digits (stage 3)"


def test_a_container_that_is_started_again_begins_at_its_first_stage() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    assert stages.next(AGAIN, "digits") == "digits"
    stages.finish(AGAIN, "faces")
    assert stages.next(AGAIN, "digits") == "digits"


def test_where_nobody_tells_of_containers_there_is_one_stage() -> None:
    stages = Stages()
    assert not stages.finish("", "digits")
    assert stages.next("", "digits") == "digits"
    assert container_of(None) == container_of("0123456789abcdef") == ""
    assert container_of(HERE + "c" * 16) == HERE


def test_what_is_known_is_kept() -> None:
    stages = Stages()
    stages.finish(HERE, "digits")
    stages.passed_by = "c" * 32
    assert Stages.from_json(stages.to_json()) == stages


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"schema": 1}', b'{"schema": 1, "container": "", "finished": {"a": ""}}'],
)
def test_i8_what_is_no_record_is_said(content: bytes) -> None:
    with pytest.raises(RecordError):
        Stages.from_json(content)
