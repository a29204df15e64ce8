# SPDX-License-Identifier: Apache-2.0
"""The process of a torch ``DataLoader`` in which a stream is read: one of its workers, or none.

Needs no torch: a script that has not imported it has no such loader.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any, Iterator, Tuple


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
