# SPDX-License-Identifier: Apache-2.0
"""The names that scripts import: few, typed, and those of 0.1.0 for one release."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import muster
import muster.data
from console.local.command import SCRIPT as SCRIPT_OF_DEMO
from muster import FORMER
from tests.support.sources import ROOT

SCRIPT = """\
import os
from typing import Optional

import torch
from torch import nn

import muster
import muster.data
import muster.horovod

model, rows = nn.Linear(1, 1), [torch.zeros(1)] * 8
optimizer = torch.optim.SGD(model.parameters(), 0.1)
training: muster.Training = muster.train(
    model, optimizer, rows, global_batch=4, directory="out", micro_batch=2, epochs=2, max_steps=7,
    save_every=100, keep=2, seed=1, last="drop", shuffle=False, num_workers=0,
)
with training:
    for batch in training:
        done: bool = training.step(model(batch).mean())
        if training.backward(model(batch).mean()):
            break

last: Optional[muster.CommittedStep] = muster.last_commit()
sampler: muster.data.ElasticSampler = muster.data.ElasticSampler(8, 0, global_batch=4)
if last is not None:
    tag: str = last.tag
    sampler.go_to(last.cursor)
data = torch.utils.data.TensorDataset(torch.zeros(8))
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
with muster.drain(start=0, where="out") as drain:
    in_block: muster.Drain = drain
    for batch, part in sampler.follow(loader):
        micro: muster.data.MicroBatch = part
        if drain.commit_due(1):
            drain.committed(1, cursor=sampler.cursor)
plan: muster.data.BatchPlan = muster.data.batch_plan(64)
rate: float = muster.data.scale_lr(0.1, base_world_size=2)
stream: muster.data.ShardStream = muster.data.shard_stream(
    [8], lambda shard, begin, end: range(begin, end), 0, global_batch=4
)
unsized: muster.data.ElasticStream = muster.data.elastic_stream(data, batch_size=4, lanes=2)
unsized.load(None)
place: dict[str, object] = unsized.save("out", 1)
handed: muster.data.Shards = muster.data.shards(8, name="rows", shard_size=2)
due: bool = muster.horovod.commit_due(1)
muster.horovod.committed(1)
name: str = muster.save_tag()
wrong: int = muster.save_tag()
"""
LAST = f"script.py:{len(SCRIPT.splitlines())}"
"""The one line that is wrong: what is ``Any`` would not be."""


TYPED = Path(os.environ.get("MUSTER_CACHE") or Path.home() / ".cache/muster") / "mypy-names"
"""The types of torch and the others, kept: to read them all takes a minute and a half."""


def test_a_script_of_all_calls_is_typed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(TYPED)},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert [line.partition(": error: ")[0] for line in wrong] == [LAST], checked.stdout


def test_no_script_of_ours_uses_a_name_of_0_1_0() -> None:
    scripts = [*(ROOT / "examples").glob("*.py"), SCRIPT_OF_DEMO]
    former = re.compile(rf"\bmuster\.({'|'.join(FORMER)})\b")
    assert [one.name for one in scripts if former.search(one.read_text(encoding="utf-8"))] == []


def test_what_is_exported_can_be_had() -> None:
    for module in (muster, muster.data):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(module.__all__) <= 14


@pytest.mark.parametrize("name", FORMER)
def test_a_name_of_0_1_0_works_and_says_what_to_write(name: str) -> None:
    _, instead = FORMER[name]
    with pytest.warns(DeprecationWarning, match="goes with the next release") as warned:
        former = getattr(muster, name)
    assert callable(former)
    (warning,) = warned
    assert str(warning.message).endswith(f"write {instead}")
    assert warning.filename == __file__


def test_to_import_muster_imports_what_a_drain_needs() -> None:
    script = "import sys, muster; print(*sorted(sys.modules))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    loaded = {name for name in ended.stdout.split() if name.startswith("muster.")}
    costly = {"batches", "data", "horovod", "learning_rate", "sharding", "torch_parts", "training"}
    assert "muster.draining" in loaded
    assert loaded.isdisjoint(f"muster.{name}" for name in costly)
    assert {"numpy", "torch"}.isdisjoint(ended.stdout.split())


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'muster' has no attribute 'trian'"):
        getattr(muster, "tri" + "an")
