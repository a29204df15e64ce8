# SPDX-License-Identifier: Apache-2.0
"""Data beside its sampler: one pass of a loader, its faults and workers, and steps counted.

A loader takes batches ahead of training, so a step of which none was taken is certainly not
trained. Needs no torch: a script that has not imported it has no such loader.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from muster import saved_steps

RIGHT = "make it with DataLoader(data, batch_sampler=sampler)"

NOWHERE: Place = (-1, 0)
"""A place before all others."""


def iterable_kind(of: type) -> Any:
    """Return ``of``, or a subclass that torch takes for an ``IterableDataset`` if it is there."""
    if "torch" not in sys.modules:
        return of
    from torch.utils.data import IterableDataset

    return type(of.__name__, (of, IterableDataset), {})


def worker() -> Tuple[int, int]:
    """Return the number of this process among the loader's workers, and how many there are."""
    info = _info()
    return (0, 1) if info is None else (info.id, info.num_workers)


@contextmanager
def hidden() -> Iterator[None]:
    """Hide the worker from the code inside, which would divide its data among workers once more.

    Raises ``RuntimeError`` if this torch keeps it elsewhere.
    """
    info = _info()
    if info is None:
        yield
        return
    from torch.utils.data._utils import worker as of_torch

    of_torch._worker_info = None
    try:
        if _info() is not None:
            raise RuntimeError("this torch hides no worker from a data set: give num_workers=0")
        yield
    finally:
        of_torch._worker_info = info


def _info() -> Any:
    if "torch" not in sys.modules:
        return None
    from torch.utils.data import get_worker_info

    return get_worker_info()


def fault_of_loader(loader: Any, sampler: Any) -> str:
    """Return why ``sampler`` cannot count the batches of ``loader``, and what to write; or "".

    Nothing is known of an iterable that is no ``DataLoader`` of torch's, as the sampler itself, and
    of a loader that makes no batches, as that of a stream.
    """
    if not hasattr(loader, "batch_sampler"):
        return ""
    found, kind = loader.batch_sampler, type(loader)
    if found is not sampler and found is not None:
        if type(found).__module__.startswith("accelerate."):
            return (
                "accelerate divides or skips the loader's batches once more (%s): leave out"
                " accelerator.prepare(loader) and skip_first_batches" % type(found).__name__
            )
        if getattr(loader, "sampler", None) is sampler:
            return "the loader has it as sampler=, and it yields batches: " + RIGHT
        return "the loader has another batch sampler (%s): %s" % (type(found).__name__, RIGHT)
    if kind.__module__.startswith("accelerate.") and "Dispatcher" in kind.__name__:
        return (
            "accelerate gives all ranks the batches of rank 0 (%s): leave out"
            " accelerator.prepare(loader)" % kind.__name__
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return (
            "the loader yields batches as its workers finish them (in_order=False), and the cursor"
            " counts them in order: leave out in_order"
        )
    every = getattr(loader, "snapshot_every_n_steps", 1)
    if every != 1:
        return (
            "the loader keeps its place at each %s-th batch alone: give it"
            " snapshot_every_n_steps=1" % every
        )
    return ""


Place = Tuple[int, int]
"""An epoch, and a number of its samples."""


class CountedSteps:
    """The steps of one sampler since its place was last set.

    A sampler knows which batches were taken of it, and the process how many boundaries it has
    come to.
    """

    def __init__(self) -> None:
        self._taken = NOWHERE
        self._boundaries = 0
        self._count = 0

    def take(self, end: Place) -> None:
        """Note that batches were taken of the global batch which ends there."""
        if self._taken == NOWHERE:
            self._boundaries = saved_steps.boundaries
        self._taken = max(self._taken, end)

    def count(self, begin: Place) -> bool:
        """Count the step of the global batch that begins there; return whether it can be trained.

        Nothing is known if no batch was taken here: a loader's workers may have taken them.
        """
        self._count += 1
        return self._taken == NOWHERE or begin < self._taken

    def fault(self, *, followed: bool) -> str:
        """Return why steps were trained that were not counted; or "".

        ``followed``: steps are counted, by ``follow`` or by the script. A boundary may come after
        several steps, and a loop that follows counts all of them.
        """
        if self._taken == NOWHERE:
            return ""
        if not followed:
            return "batches were taken without sampler.follow(loader)"
        passed = saved_steps.boundaries - self._boundaries
        if not 0 < self._count < passed:
            return ""
        return "sampler.advance() was not called after each step"


def not_streamable(dataset: Any) -> str:
    """Return what a data set lacks to be streamed from any position; or ""."""
    count = getattr(dataset, "num_shards", None)
    if not isinstance(count, int) or not callable(getattr(dataset, "shard", None)):
        return (
            "it has no shards (num_shards, shard(num_shards, index)), as a streamed data set of"
            " Hugging Face's datasets has: for rows by number use ElasticSampler"
        )
    if count < 1:
        return "it has no shards (num_shards=%d)" % count
    part = dataset.shard(count, 0)
    if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
        return (
            "its shards keep no place (state_dict, load_state_dict): load it with streaming=True,"
            " or use ElasticSampler for rows by number"
        )
    state = part.state_dict()
    try:
        kept = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        return "the state of a shard is no JSON: %s" % error
    return "" if kept == state else "the state of a shard is another one as JSON"


def inexact(dataset: Any) -> str:
    """Return why going on from a state would lose or repeat samples, as far as can be seen."""
    if getattr(dataset, "_distributed", None) is not None:
        return "the data set is divided by node already: leave out split_dataset_by_node"
    stages = [getattr(dataset, "_ex_iterable", None)]
    while stages:
        stage = stages.pop()
        if "Shuffled" in type(stage).__name__:
            return (
                "shuffle() reads samples into a buffer which no state contains, so they would be"
                " lost: leave it out, and mix by seed= and lanes="
            )
        if stage is not None:
            stages.append(getattr(stage, "ex_iterable", None))
            stages.extend(getattr(stage, "ex_iterables", ()))
    return ""


class Batches:
    """One pass over a rank's micro batches, from the sampler's cursor on.

    A loader that has a state, as torchdata's, keeps the place up to which batches were *taken* from
    here. The sampler's cursor is the place up to which they were *trained*, and it counts: a state
    sets the place of a sampler only if nothing else has.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self._epoch, self._samples = self._sampler.epoch, self._sampler.samples
        self._taken = 0
        self._batches: Optional[Iterator[List[Any]]] = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> List[Any]:
        if self._batches is None:
            self._begin()
            self._batches = self._sampler.batches()
        batch = next(self._batches)
        self._taken += 1
        return batch

    def state_dict(self) -> Dict[str, Any]:
        """Return the cursor after the last whole step whose batches were taken."""
        plan = self._sampler.plan
        samples = self._samples + self._taken // plan.accumulation * plan.global_batch
        place: Dict[str, Any] = self._sampler.place_of(
            self._epoch, min(samples, self._sampler.size)
        )
        return place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a cursor, unless the sampler has a place; raises as ``go_to`` does."""
        if not self._sampler.placed:
            self._sampler.go_to(state)
        self._begin()
