# SPDX-License-Identifier: Apache-2.0
"""Uses of the library that would lose or repeat samples without a word: exact, or refused.

Each row says what became of 120 samples before, with a stop after 4 of 10 steps.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from muster.batches import scale_lr
from muster.data import ElasticSampler, shard_stream

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

ROWS, BATCH, STOP = 120, 12, 4


def sampler_of(rank: int = 0, world_size: int = 1) -> ElasticSampler:
    return ElasticSampler(ROWS, 3, global_batch=BATCH, rank=rank, world_size=world_size)


class Stateful:
    """A loader with a state, as torchdata's: it reads ahead, and keeps what each batch's taking
    left of its sampler's iterator."""

    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self.batch_sampler, self._ahead = sampler, ahead
        self._state: Any = None
        self._loaded: Any = None

    def __iter__(self) -> Iterator[list[int]]:
        batches: Any = iter(self.batch_sampler)
        if self._loaded is not None:
            batches.load_state_dict(self._loaded)
        return self._read(batches)

    def _read(self, batches: Any) -> Iterator[list[int]]:
        taken: list[tuple[list[int], Any]] = []
        for batch in batches:
            taken.append((batch, batches.state_dict()))
            if len(taken) > self._ahead:
                first, self._state = taken.pop(0)
                yield first
        for first, self._state in taken:
            yield first

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._loaded = state


def lives(ahead: int, *, cursor: bool, state: bool, stop: int = STOP) -> Counter[int]:
    """Train some steps, then the rest with what is kept."""
    sampler = sampler_of()
    loader, seen = Stateful(sampler, ahead), []
    for step, (batch, _) in enumerate(sampler.follow(loader), 1):
        seen += batch
        if step == stop:
            break
    kept, place = loader.state_dict(), sampler.cursor
    sampler = sampler_of()
    loader = Stateful(sampler, ahead)
    if cursor:
        sampler.go_to(place)
    if state:
        loader.load_state_dict(kept)
    for batch, _ in sampler.follow(loader):
        seen += batch
    return Counter(seen)


@pytest.mark.parametrize(
    ("ahead", "cursor", "state", "before"),
    [
        (0, True, False, "once"),
        (4, True, False, "once"),
        (0, False, True, "once"),
        (4, False, True, "48 twice"),
        (0, True, True, "once"),
        (4, True, True, "48 twice"),
    ],
)
def test_i12_a_loader_with_a_state_is_exact(
    ahead: int, cursor: bool, state: bool, before: str
) -> None:
    assert lives(ahead, cursor=cursor, state=state) == Counter(range(ROWS)), before


def test_a_state_of_the_end_of_an_epoch_begins_the_next_one() -> None:
    """60 of the next epoch's 120 were never trained, and half of the former one again."""
    for cursor in (True, False):
        seen = lives(4, cursor=cursor, state=True, stop=ROWS // BATCH)
        assert seen == Counter(dict.fromkeys(range(ROWS), 2))


def prepared(**given: Any) -> Any:
    from accelerate.data_loader import prepare_data_loader

    sampler = sampler_of(0, 2)
    loader = DataLoader(range(ROWS), batch_sampler=sampler)
    return sampler, prepare_data_loader(
        loader, num_processes=2, process_index=0, rng_types=[], **{"put_on_device": False, **given}
    )


def skipped() -> Any:
    from accelerate import skip_first_batches

    sampler = sampler_of()
    loader = DataLoader(range(ROWS), batch_sampler=sampler)
    return sampler, skip_first_batches(loader, 4)


def of_torch(**given: Any) -> Any:
    sampler = sampler_of()
    given = {name: sampler if value == "it" else value for name, value in given.items()}
    return sampler, DataLoader(range(ROWS), **given)


def sparse() -> Any:
    sampler = sampler_of()
    loader: Any = Stateful(sampler, 0)
    loader.snapshot_every_n_steps = 5
    return sampler, loader


@pytest.mark.parametrize(
    ("make", "said", "before"),
    [
        (prepared, "leave out accelerator.prepare", "60 never; an error after the epoch"),
        (lambda: prepared(even_batches=False), "(BatchSamplerShard)", "60 never"),
        (
            lambda: prepared(dispatch_batches=True, put_on_device=True, device=torch.device("cpu")),
            "the batches of rank 0 (DataLoaderDispatcher)",
            "shares of rank 0's share",
        ),
        (skipped, "(SkipBatchSampler)", "48 never; an error after the epoch"),
        (lambda: of_torch(batch_size=BATCH), "(BatchSampler)", "accepted: other rows"),
        (lambda: of_torch(sampler="it", batch_size=4), "batch_sampler=sampler", "an error late"),
        (
            lambda: of_torch(batch_sampler="it", num_workers=2, in_order=False),
            "leave out in_order",
            "12 never, 12 twice",
        ),
        (sparse, "snapshot_every_n_steps=1", "48 twice"),
    ],
)
def test_a_loader_whose_batches_the_sampler_cannot_count_is_refused(
    make: Callable[[], Any], said: str, before: str
) -> None:
    sampler, loader = make()
    with pytest.raises(ValueError, match=r"sampler.follow\(loader\): ") as caught:
        next(sampler.follow(loader))
    assert said in str(caught.value), before


def test_with_muster_checks_warn_a_wrong_loader_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MUSTER_CHECKS", "warn")
    sampler, loader = of_torch(batch_size=BATCH)
    assert next(sampler.follow(loader))
    assert "(BatchSampler)" in caplog.text
    assert "training goes on" in caplog.text


def test_right_loaders_are_followed() -> None:
    sampler, loader = of_torch(batch_sampler="it", num_workers=0)
    assert sum(len(batch) for batch, _ in sampler.follow(loader)) == ROWS
    stream: Any = shard_stream([60, 60], lambda shard, a, b: range(a, b), 3, global_batch=BATCH)
    batches = list(stream.follow(DataLoader(stream, batch_size=None)))
    assert len(batches) == ROWS // BATCH


def test_batches_that_no_step_counts_are_said_with_the_cursor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``for batch in loader``: each commit recorded the place where the epoch began."""
    sampler, loader = of_torch(batch_sampler="it")
    with caplog.at_level(logging.WARNING):
        assert sampler.cursor["samples"] == 0
        assert caplog.text == ""
        for _ in loader:
            assert sampler.cursor["samples"] == 0
    (said,) = caplog.records
    assert "sampler.follow(loader)" in said.getMessage()


@pytest.mark.parametrize(
    ("environ", "library", "expected"),
    [
        ({}, None, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, (1, 2)),
        ({}, (1, 2), (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2), (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 2), "torch.distributed has rank 1 of 2, and RANK"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, None, "call hvd.init"),
    ],
)
def test_the_world_is_that_of_those_who_know_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], library: Any, expected: Any
) -> None:
    """Under mpirun, srun or horovodrun each rank took itself for rank 0 of 1, and trained all."""
    for name in ("RANK", "WORLD_SIZE", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    group = ModuleType("torch.distributed")
    rank, size = library or (0, 1)
    group.__dict__.update(
        is_initialized=lambda: library is not None,
        get_rank=lambda: rank,
        get_world_size=lambda: size,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            ElasticSampler(ROWS, global_batch=BATCH)
        with pytest.raises(ValueError, match=expected):
            scale_lr(0.1, 1)
        return
    sampler = ElasticSampler(ROWS, global_batch=BATCH)
    assert (sampler.rank, sampler.plan.world_size) == expected
    assert scale_lr(0.1, 1) == pytest.approx(0.1 * expected[1])


def lightning(module: Any, *loaders: Any) -> Any:
    from muster.lightning_loops import check_loaders

    fit_loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=list(loaders)))
    trainer = SimpleNamespace(fit_loop=fit_loop)
    return lambda sampler: check_loaders(trainer, module, sampler)


AUTOMATIC, MANUAL = (SimpleNamespace(automatic_optimization=one) for one in (True, False))


@pytest.mark.parametrize(
    ("module", "loaders", "said", "before"),
    [
        (AUTOMATIC, ["own"], "", "once"),
        (AUTOMATIC, ["own", "stateful"], "", "once"),
        (AUTOMATIC, ["other"], "another batch sampler", "48 never, 48 twice"),
        (AUTOMATIC, ["own", "other"], "training loader 2 of 2 begins", "b: 48 twice"),
        (MANUAL, ["own"], "with manual optimization", "32 never, 32 twice"),
    ],
)
def test_lightning_trains_with_the_sampler_or_is_refused(
    module: Any, loaders: list[str], said: str, before: str
) -> None:
    sampler, own = of_torch(batch_sampler="it")
    _, other = of_torch(batch_size=BATCH)
    made = {"own": own, "other": other, "stateful": Stateful(sampler_of(), 0)}
    check = lightning(module, *[made[name] for name in loaders])
    if not said:
        check(sampler)
        return
    with pytest.raises(ValueError, match=said):
        check(sampler)


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_transformers_with_model_parallel_ranks_is_refused(kind: str) -> None:
    """The ranks of such a group were given different samples."""
    from muster.transformers_data import TrainerData

    trainer = SimpleNamespace(
        args=None,
        train_dataset=range(9),
        get_train_dataloader=None,
        **{f"get_{kind}_size": lambda: 2},
    )
    with pytest.raises(ValueError, match=rf"\({kind} of 2\)"):
        TrainerData(trainer, 8, "short")
