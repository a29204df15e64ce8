# SPDX-License-Identifier: Apache-2.0
"""Where in the data training is, and how a world of any size goes on from there: docs/data.md.

Needs neither torch nor numpy; with numpy it is fast.
"""

from muster.batch_plan import BatchPlan, MicroBatch, batch_plan
from muster.data.sampler import ElasticSampler
from muster.data.seeds import sample_seed, seed_step
from muster.data.stream import ShardStream, shard_stream

__all__ = [
    "BatchPlan",
    "ElasticSampler",
    "MicroBatch",
    "ShardStream",
    "batch_plan",
    "sample_seed",
    "seed_step",
    "shard_stream",
]
