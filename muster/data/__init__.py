# SPDX-License-Identifier: Apache-2.0
"""The place of training in its data, and going on from it in a world of any size: docs/data.md.

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
