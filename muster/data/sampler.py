# SPDX-License-Identifier: Apache-2.0
"""The samples that this rank trains next, in a world of any size, and a cursor common to all ranks.

    sampler = ElasticSampler(len(data), seed=7, global_batch=64, micro_batch=16)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=4)
    for batch, part in sampler.follow(loader): ...

One order for each seed and epoch is cut into global batches, and each batch into the ranks' shares.
The order and the global batches do not depend on the world, so a world of another size goes on
where the one before has stopped: at the cursor. It counts samples, and moves with optimizer steps.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar

from muster.batches import MicroBatch, batch_plan
from muster.data.loader import Batches, CountedSteps, fault_of_loader
from muster.orders import KINDS, RowOrder, difference, other_data, places
from muster.process import own_world, refuse
from muster.saved_steps import UNKEPT

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")

LAST = ("short", "drop", "pad")
CHUNK = 32768
"""Maximum number of samples computed at once; more take more memory. The first chunk is smaller."""
FIRST_CHUNK = 256
"""Samples in the first chunk; each further one doubles. With more, the first batch is later."""


class ElasticSampler:
    """A batch sampler for ``torch.utils.data.DataLoader``.

    Iterating yields this rank's micro batches from the cursor to the end of the epoch. torch is not
    needed; numpy makes it fast.
    """

    def __init__(
        self,
        dataset_size: int,
        seed: int = 0,
        *,
        global_batch: int,
        micro_batch: Optional[int] = None,
        last: str = "short",
        shuffle: bool = True,
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        weights: Optional[Sequence[int]] = None,
        grows: bool = False,
    ) -> None:
        """Begin with the first sample of epoch 0.

        ``global_batch``: samples of an optimizer step, of all ranks together; with ``micro_batch``,
        ``weights`` and ``world_size`` as in ``batch_plan()``. ``rank`` and ``world_size`` are
        those of torch's process group or the launcher unless given. ``last``: the treatment of
        an epoch's last samples if they are fewer than a batch: ``"short"``, they are a smaller
        batch; ``"drop"``, they are left out, other ones in each shuffled epoch; ``"pad"``, they are
        filled up with the first samples of the epoch, which are then trained twice. ``grows``: a
        cursor of fewer samples is one of the same data before it grew, as in ``extend``.

        Raises ``ValueError`` if ``last`` is anything else, an epoch has no batch, ``rank`` is not
        in the world, or the environment says another world than the library does.
        """
        if last not in LAST:
            raise ValueError('ElasticSampler: last is "short", "drop" or "pad", not %r' % (last,))
        if dataset_size < 1 or (last == "drop" and dataset_size < global_batch):
            raise ValueError(
                "ElasticSampler: %d samples make no batch of %d" % (dataset_size, global_batch)
            )
        if rank is None or world_size is None:
            own, size = own_world("ElasticSampler")
            rank = own if rank is None else rank
            world_size = size if world_size is None else world_size
        self._global_batch, self._micro_batch, self._weights = global_batch, micro_batch, weights
        self._share(rank, world_size)
        self.size = dataset_size
        """The number of samples."""
        self.seed = seed
        self.epoch = 0
        self.samples = 0
        """Samples of this epoch that all ranks together have trained."""
        self.placed = False
        """Whether the place was set or has moved: a loader's state then does not change it."""
        self.counted = False
        """Whether steps are counted here, by ``follow`` or ``advance``."""
        self.grows = grows
        self._warned = ""
        self._unkept = ""
        self._last = last
        self._moves = 0
        """The number of times that the place was set by anything but ``follow``."""
        self._steps = CountedSteps()
        self.order: Any = RowOrder((dataset_size,), seed, shuffle)
        """The order of the samples of each epoch; ``shard_stream`` sets another."""

    def _share(self, rank: int, world_size: int) -> None:
        """Set this rank's share of each batch."""
        self.rank = rank
        self.plan = batch_plan(
            self._global_batch, self._micro_batch, world_size=world_size, weights=self._weights
        )
        if not 0 <= rank < world_size:
            raise ValueError(
                "ElasticSampler: there is no rank %d in a world of %d" % (rank, world_size)
            )
        self._parts = {self._global_batch: self.plan.parts(rank)}

    def divide(self, rank: int, world_size: int) -> None:
        """Divide the batches from the cursor on among the ranks of another world.

        A loop that follows a loader has to begin again. Raises ``ValueError`` if the ranks'
        weights are those of a world of another size.
        """
        self._share(rank, world_size)
        self._moves += 1

    @property
    def moves(self) -> int:
        """The number of times that the place or the division was set by anything but ``follow``."""
        return self._moves

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, of all ranks together."""
        return self.plan.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, in a world of any size."""
        return self._steps_from(0)

    @property
    def cursor(self) -> Dict[str, Any]:
        """The place where training goes on, for ``drain.committed`` and the checkpoint.

        Logs a warning if steps were not counted though batches were taken.
        """
        place = self.place_of(self.epoch, self.samples)
        why = self._steps.fault(followed=self.counted)
        if not why:
            return place
        if why != self._warned:
            self._warned = why
            log.warning(
                "%s, so the cursor of this ElasticSampler is behind: iterate by `for batch, part in"
                " sampler.follow(loader)`, or call sampler.advance() after each optimizer step,"
                " before drain.commit_due",
                why,
            )
        return {**place, UNKEPT: why}

    def place_of(self, epoch: int, samples: int) -> Dict[str, Any]:
        """Return the cursor of a place in this data: the place, and what its order follows from."""
        grown = self._sizes[1:] if samples and epoch == self.epoch else ()
        return {
            "epoch": epoch,
            "samples": samples,
            "of": self._sizes[0] if grown else self.size,
            **({"grown": list(grown)} if grown else {}),
            "seed": self.seed,
            **self.order.facts,
            **({UNKEPT: self._unkept} if self._unkept else {}),
        }

    @property
    def _sizes(self) -> Tuple[int, ...]:
        """The size with which the epoch has begun, and those that it has grown to since."""
        return self.order.sizes if isinstance(self.order, RowOrder) else (self.size,)

    def _resize(self, sizes: Sequence[int]) -> None:
        if tuple(sizes) != self._sizes:
            self.order, self.size = self.order.of_sizes(sizes), sizes[-1]

    def go_to(self, cursor: Optional[Mapping[str, Any]]) -> None:
        """Go on from a cursor; do nothing if it is None.

        Raises ``ValueError`` if it is no cursor, or of another order: of other data, another seed,
        or other options that the order follows from. An epoch that has not begun may have another
        order of the same data. A cursor that does not say its order is accepted.
        """
        if cursor is None:
            return
        try:
            epoch, samples = int(cursor["epoch"]), int(cursor["samples"])
            sizes = [int(cursor["of"]), *map(int, cursor.get("grown", ()))]
            seed = int(cursor["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("%r is no cursor of an ElasticSampler" % (cursor,)) from error
        wrong = other_data(sizes, seed, self.size, self.seed, self.grows)
        if wrong:
            raise ValueError(wrong)
        rows = isinstance(self.order, RowOrder)
        if epoch < 0 or not 0 <= samples <= sizes[-1] or (len(sizes) > 1 and not rows):
            raise ValueError("%r is no place in the data" % (cursor,))
        differs = difference(cursor, self.order.facts) if samples else ""
        if differs:
            raise ValueError(differs + ": give what the epoch has begun with")
        ended = samples == sizes[-1]
        if ended or not samples:
            sizes = [self.size]
        elif sizes[-1] < self.size:
            sizes.append(self.size)
        self.epoch, self.samples = (epoch + 1, 0) if ended else (epoch, samples)
        self._unkept = "" if ended else str(cursor.get(UNKEPT) or "")
        self._resize(sizes)
        self._pass_end()
        self._move()

    def extend(self, size: int) -> None:
        """Go on with data that has grown to ``size`` samples: the new ones stand behind the others.

        An epoch that has begun is trained to its end in its order, and then has the new samples in
        an order of their own; the next epoch is one order of all. Every rank calls it after the
        same step, outside of ``follow``, and makes its loader of the new data. That the samples so
        far are the ones of before cannot be seen here. Raises ``ValueError`` if ``size`` is
        smaller, or the order is one of shards.
        """
        if size < self.size or not isinstance(self.order, RowOrder):
            raise ValueError(
                "sampler.extend(%d): these are %d samples of %s: rows may be added, behind those"
                " there are" % (size, self.size, next(map(KINDS.get, self.order.facts)))
            )
        sizes = self._sizes if size == self.size else (*self._sizes, size)
        self._resize(sizes if self.samples else (size,))
        self._move()

    def _move(self) -> None:
        self.placed = True
        self._moves += 1
        self._steps = CountedSteps()

    def go_to_step(self, step: int) -> None:
        """Go to the place in the data after ``step`` optimizer steps, each of this global batch.

        Nothing shows that they were: to the end of that epoch, no save counts as keeping samples.
        """
        self._unkept = "the place follows from the number of steps" if step else ""
        self.samples = 0
        self._resize((self.size,))
        self.epoch, done = divmod(step, self.steps_per_epoch)
        self.samples = done * self.global_batch
        self._move()

    def advance(self) -> None:
        """Count the next global batch as trained; ``follow`` calls this itself.

        It comes once after each optimizer step, not after each batch: raises ``RuntimeError`` if no
        batch of the next one was taken.
        """
        if not self._steps.count((self.epoch, self.samples)):
            refuse(
                RuntimeError(
                    "sampler.advance() was called for a step that no batch was taken of: call it"
                    " once after each optimizer step, here of %d batches of the loader"
                    % self.plan.accumulation
                )
            )
        self._moves += 1
        self._count()

    def _count(self) -> None:
        self.samples += self.global_batch
        self.placed = self.counted = True
        self._pass_end()

    def _pass_end(self) -> None:
        """Begin the next epoch at the end of one: what was wrong with that one is over."""
        if not self._steps_from(self.samples):
            self.epoch, self.samples, self._unkept = self.epoch + 1, 0, ""
            self._resize((self.size,))

    def epochs(self, count: int) -> Iterator[int]:
        """Yield each of ``count`` epochs that is not trained yet; the first may be half done.

        An epoch whose loop is left early comes again, and goes on where it was left. Raises
        ``RuntimeError`` if the body has counted no step: the epoch would never end.
        """
        while self.epoch < count:
            at = self.epoch, self.samples
            yield self.epoch
            if (self.epoch, self.samples) == at:
                raise RuntimeError(
                    "no step was counted in epoch %d: iterate over sampler.follow(loader) in it"
                    % self.epoch
                )

    def follow(self, loader: Iterable[Batch]) -> Iterator[Tuple[Batch, MicroBatch]]:
        """Yield each batch of ``loader`` to the end of the epoch, with its micro batch.

        The cursor moves when the last micro batch of a step is yielded: a commit after its
        optimizer step goes on after it. ``loader`` must use this sampler. Raises ``ValueError`` if
        it does not, and ``RuntimeError`` if it ends before the epoch.
        """
        wrong = fault_of_loader(loader, self)
        if wrong:
            refuse(ValueError("sampler.follow(loader): " + wrong))
        self.counted = True
        batches, moves = iter(loader), self._moves
        for parts in self._plans():
            for part in parts:
                if moves != self._moves:
                    raise RuntimeError(
                        "sampler.follow(loader): the sampler was moved, by advance, go_to or"
                        " extend, while a loop followed it, which counts the steps itself"
                    )
                try:
                    batch = next(batches)
                except StopIteration:
                    raise RuntimeError(
                        "the loader has ended before the epoch: make it with"
                        " DataLoader(data, batch_sampler=sampler), of the sampler that follows it"
                    ) from None
                if part.ends_step:
                    self._count()
                yield batch, part

    def __len__(self) -> int:
        """Return the number of micro batches in a whole epoch, by which trainers count epochs.

        Iterating yields fewer in an epoch that this world has begun in the middle of.
        """
        return self.steps_per_epoch * self.plan.accumulation

    @property
    def steps_left(self) -> int:
        """The number of global batches from the cursor to the end of the epoch."""
        return self._steps_from(self.samples)

    @property
    def parts(self) -> Tuple[MicroBatch, ...]:
        """The micro batches of this rank in the next step, which begins at the cursor."""
        return self._parts_at(self.samples)

    def __iter__(self) -> Iterator[List[Any]]:
        """Yield this rank's micro batches from the cursor to the end of the epoch."""
        return Batches(self)

    def batches(self) -> Iterator[List[Any]]:
        """Generate this rank's micro batches from the cursor to the end of the epoch."""
        epoch, samples, steps = self.epoch, self.samples, self._steps
        for numbers, parts, first in self._shares():
            begin = parts[0].start
            width = parts[-1].stop - begin
            for at in range(0, max(len(numbers), 1), max(width, 1)):
                samples += self.global_batch
                steps.take((epoch, samples))
                for part in parts:
                    one = numbers[at + part.start - begin : at + part.stop - begin]
                    yield one or first

    def ids(self) -> Iterator[Any]:
        """Iterate over this rank's samples, one by one, from the cursor to the end of the epoch."""
        self._steps.take((self.epoch, self.size))
        return chain.from_iterable(numbers for numbers, _, _ in self._shares())

    def _plans(self) -> Iterator[Tuple[MicroBatch, ...]]:
        """Yield this rank's parts of each step that is left of this epoch."""
        samples = self.samples
        while self._steps_from(samples):
            yield self._parts_at(samples)
            samples += self.global_batch

    def _shares(self) -> Iterator[Tuple[List[Any], Tuple[MicroBatch, ...], List[Any]]]:
        """Yield this rank's samples of many batches, their parts, a sample for empty parts."""
        order, batch, samples = self.order.of_epoch(self.epoch), self.global_batch, self.samples
        parts = self._parts[batch]
        width = parts[-1].stop - parts[0].start
        chunk = FIRST_CHUNK
        whole = (self.size - samples) // batch
        while whole > 0 and width:
            count = min(max(1, chunk // width), whole)
            chunk = min(CHUNK, chunk * 2)
            of = places(samples, batch, count, parts[0].start, parts[-1].stop)
            yield order.at(of), parts, order.at([samples]) if self.plan.accumulation > width else []
            samples += count * batch
            whole -= count
        while self._steps_from(samples):
            parts = self._parts_at(samples)
            of = range(samples + parts[0].start, samples + parts[-1].stop)
            yield order.at([place % self.size for place in of]), parts, order.at([samples])
            samples += batch

    def _parts_at(self, samples: int) -> Tuple[MicroBatch, ...]:
        """Return this rank's parts of the global batch that begins at ``samples``."""
        whole, left = self.global_batch, self.size - samples
        total = whole if self._last == "pad" else min(whole, left)
        if total not in self._parts:
            self._parts = {whole: self._parts[whole], total: self.plan.parts(self.rank, total)}
        return self._parts[total]

    def _steps_from(self, samples: int) -> int:
        left = max(0, self.size - samples)
        return left // self.global_batch if self._last == "drop" else -(-left // self.global_batch)
