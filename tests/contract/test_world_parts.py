# SPDX-License-Identifier: Apache-2.0
"""The parts of a world: what is refused before the first step, and a script without a sidecar."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DistributedSampler

import muster.gate
import muster.progress
from muster.data import ElasticSampler
from muster.world import World
from muster.world.parts import _broadcast, put_together, take_apart

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def no_sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MUSTER_RUN_DIR", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(muster.progress, "_file", None)
    monkeypatch.setattr(muster.progress, "_looked", False)
    monkeypatch.setattr(muster.gate, "_gate", None)
    gc.collect()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), 0.1)


def first_step(parts: dict[str, Any]) -> None:
    with World("gloo", parts) as world, world.next_step():
        pass


def test_a_script_without_a_sidecar_trains() -> None:
    net, optimizer = made()
    saved: list[int] = []
    with World(
        "gloo", {"net": net, "optimizer": optimizer}, step=3, save=saved.append, save_every=2
    ) as world:
        model = world.replicate(net)
        assert model(torch.zeros(1, 2)).shape == (1, 1)  # before there is a world
        with pytest.raises(RuntimeError, match="forms with the first"):
            assert world.size
        while world.step < 8:
            with world.next_step() as step:
                assert step == world.step + 1
                assert (world.rank, world.size) == (0, 1)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert not world.in_place
    assert saved == [4, 6, 8]


def test_an_exception_of_the_script_goes_on() -> None:
    net, optimizer = made()
    world = World("gloo", {"net": net, "optimizer": optimizer})

    def train() -> None:
        with world:
            for error in (None, ZeroDivisionError()):
                with world.next_step():
                    if error is not None:
                        raise error

    with pytest.raises(ZeroDivisionError):
        train()
    assert world.step == 1


def test_an_optimizer_of_another_model_is_refused() -> None:
    net, _ = made()
    _, optimizer = made()
    with pytest.raises(ValueError, match="parameters of a model that is not among the parts"):
        World("gloo", {"net": net, "optimizer": optimizer})


def test_a_part_without_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parts\['net'\] has no state_dict"):
        World("gloo", {"net": 3})


def test_a_net_that_is_replicated_is_a_part() -> None:
    net, optimizer = made()
    world = World("gloo", {"net": net, "optimizer": optimizer})
    with pytest.raises(ValueError, match="the net is not among the parts"):
        world.replicate(nn.Linear(1, 1))


def test_a_sharded_parameter_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import fully_shard

    net = nn.Linear(2, 2)
    fully_shard(net)
    with pytest.raises(ValueError, match="is sharded"):
        World("gloo", {"net": net})
    with pytest.raises(ValueError, match="within DistributedDataParallel"):
        World("gloo", {"net": DistributedDataParallel(nn.Linear(1, 1))})


def test_a_schedule_that_is_no_part_is_refused() -> None:
    net, optimizer = made()
    schedule = StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"a schedule \(StepLR\) changes in training"):
        first_step({"net": net, "optimizer": optimizer})
    first_step({"net": net, "optimizer": optimizer, "schedule": schedule})


def test_an_optimizer_that_is_no_part_is_refused() -> None:
    net, optimizer = made()
    with pytest.raises(ValueError, match=r"an optimizer \(SGD\) changes in training"):
        first_step({"net": net})
    del optimizer


def test_a_distributed_sampler_is_refused() -> None:
    net, optimizer = made()
    sampler = DistributedSampler([1, 2], num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="a DistributedSampler keeps the rank"):
        first_step({"net": net, "optimizer": optimizer})
    del sampler


def test_a_loader_of_another_sampler_is_refused() -> None:
    net, optimizer = made()
    sampler = ElasticSampler(8, global_batch=2, rank=0, world_size=1)
    world = World("gloo", {"net": net, "optimizer": optimizer})
    with pytest.raises(ValueError, match="name the loader's ElasticSampler"):
        world.feed(sampler)


def test_a_sampler_divides_the_rest_of_an_epoch_again() -> None:
    sampler = ElasticSampler(12, global_batch=4, shuffle=False, rank=0, world_size=1)
    assert next(iter(sampler)) == [0, 1, 2, 3]
    sampler.advance()
    sampler.divide(1, 2)
    assert [*sampler] == [[6, 7], [10, 11]]
    with pytest.raises(ValueError, match="no rank 2 in a world of 2"):
        sampler.divide(2, 2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_a_state_goes_through_its_skeleton(dtype: torch.dtype) -> None:
    there: Any = {"a": [torch.ones(2, dtype=dtype), 3], "b": {"c": torch.zeros((), dtype=dtype)}}
    given: list[torch.Tensor] = []
    skeleton = take_apart(there, given)
    taken: list[torch.Tensor] = []
    own: Any = {"a": [torch.zeros(2, dtype=dtype), 4]}
    found = put_together(skeleton, own, taken, torch.device("cpu"))
    assert taken[0].data_ptr() == own["a"][0].data_ptr()
    for one, two in zip(taken, given, strict=True):
        one.copy_(two)
    assert found["a"][1] == 3
    assert torch.equal(found["a"][0], there["a"][0])
    assert torch.equal(found["b"]["c"], there["b"]["c"])


def test_a_large_tensor_goes_in_parts_into_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    given, taken = torch.arange(25, dtype=torch.float32), torch.zeros(25)
    place = taken.data_ptr()
    monkeypatch.setattr("muster.world.parts.BUCKET_BYTES", 32)
    monkeypatch.setattr("muster.world.parts.dist.get_rank", lambda: 0)
    monkeypatch.setattr(
        "muster.world.parts.dist.broadcast", lambda part, src: sent.append(part.clone())
    )
    _broadcast([given], 0, torch.device("cpu"))
    assert [part.numel() for part in sent] == [32, 32, 32, 4]
    monkeypatch.setattr(
        "muster.world.parts.dist.broadcast", lambda part, src: part.copy_(sent.pop(0))
    )
    _broadcast([taken], 1, torch.device("cpu"))
    assert torch.equal(taken, given)
    assert taken.data_ptr() == place
