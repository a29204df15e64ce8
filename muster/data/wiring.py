# SPDX-License-Identifier: Apache-2.0
"""Faults of a loader whose batches a sampler is to count: pure."""

from __future__ import annotations

from typing import Any

RIGHT = "make it with DataLoader(data, batch_sampler=sampler)"


def fault(loader: Any, sampler: Any) -> str:
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
