# SPDX-License-Identifier: Apache-2.0
"""The place of training in its data, and going on from it in a world of any size: docs/data.md.

Needs neither torch nor numpy; with numpy it is fast.
"""

from muster.batches import BatchPlan, MicroBatch, batch_plan, scale_lr
from muster.data.sampler import ElasticSampler
from muster.data.stream import ShardStream, shard_stream
from muster.data.unsized_stream import ElasticStream, elastic_stream
from muster.orders import sample_seed, seed_step
from muster.sharding import Shards, ShardsLost, shards

__all__ = [
    "BatchPlan",
    "ElasticSampler",
    "ElasticStream",
    "MicroBatch",
    "ShardStream",
    "Shards",
    "ShardsLost",
    "batch_plan",
    "elastic_stream",
    "sample_seed",
    "scale_lr",
    "seed_step",
    "shard_stream",
    "shards",
]
