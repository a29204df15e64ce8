# SPDX-License-Identifier: Apache-2.0
"""Seeds of random numbers that do not depend on the world."""

from __future__ import annotations

import hashlib
import random
import sys


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return a seed, below 2**63, for the random numbers of one sample in one epoch.

    ``random.Random(sample_seed(...))`` in ``__getitem__`` augments a sample alike in every world,
    whichever rank's loader reads it, in whichever worker.
    """
    return _digest("sample:%d:%d:%d" % (seed, epoch, sample))


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed random, numpy and torch (if they are imported) for the optimizer step after ``step``.

    With the same ``rank`` everywhere, numbers drawn once for the whole batch are the same on all
    ranks of any world. With each rank's own, ranks draw different numbers: those of a sample then
    depend on the rank that has it, so dropout masks differ between worlds.
    """
    drawn = _digest("step:%d:%d:%d" % (seed, step, rank))
    random.seed(drawn)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(drawn % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(drawn)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
