# SPDX-License-Identifier: Apache-2.0
"""Faults of the parts of a world, found before the first step: the rest is not handed over.

Python's own list of objects shows optimizers, schedules and samplers that the script has made and
has not named.
"""

from __future__ import annotations

import gc
from typing import Any, Iterable, Mapping, Set

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

from muster.data import ElasticSampler, ElasticStream


def fault(parts: Mapping[str, Any], replicated: Iterable[nn.Module]) -> str:
    """Return why a world of these parts cannot change in place, and what to write; or ""."""
    for name, one in parts.items():
        wrong = _fault_of(name, one)
        if wrong:
            return wrong
    own = _parameters_of(parts.values())
    for name, one in parts.items():
        if isinstance(one, Optimizer):
            trained = {id(it) for group in one.param_groups for it in group["params"]}
            if not trained <= own:
                return (
                    "parts[%r] trains parameters of a model that is not among the parts: name that"
                    " model, too" % name
                )
    for net in replicated:
        if not _tensors_of([net]) <= _tensors_of(parts.values()):
            return "world.replicate(net): the net is not among the parts: name it in World(...)"
    return ""


def _fault_of(name: str, part: Any) -> str:
    if isinstance(part, ElasticSampler):
        return ""
    if isinstance(part, ElasticStream):
        return (
            "parts[%r] is a stream that each rank reads in its own files: worlds that change in"
            " place need rows by number, as ElasticSampler gives them" % name
        )
    if not all(hasattr(part, verb) for verb in ("state_dict", "load_state_dict")):
        return "parts[%r] has no state_dict() and load_state_dict()" % name
    if isinstance(part, DistributedDataParallel):
        return (
            "parts[%r] is within DistributedDataParallel: name the net itself, and train with"
            " world.replicate(net)" % name
        )
    if isinstance(part, nn.Module):
        for key, one in [*part.named_parameters(), *part.named_buffers()]:
            if isinstance(one, DTensor) or isinstance(part, FullyShardedDataParallel):
                return (
                    "parts[%r] is sharded (%s): a lost rank takes its shard along, so use"
                    " muster.train or muster.drain, which start from the last commit" % (name, key)
                )
            if one.is_sparse or one.device.type == "meta":
                return "parts[%r]: %s has no bytes to hand over (%s)" % (name, key, one.device)
    return ""


def _parameters_of(parts: Iterable[Any]) -> Set[int]:
    modules = (one for one in parts if isinstance(one, nn.Module))
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _tensors_of(parts: Iterable[Any]) -> Set[int]:
    modules = [one for one in parts if isinstance(one, nn.Module)]
    return _parameters_of(modules) | {id(it) for one in modules for it in one.buffers()}


CURE = "name it in World(...)"


def unnamed(parts: Mapping[str, Any], cure: str = CURE) -> str:
    """Return what the script has made that changes in training and is no part; or "".

    ``cure``: what to do about it.
    """
    named = {id(one) for one in parts.values()}
    for one in parts.values():
        named |= {id(inner) for inner in getattr(one, "_schedulers", ())}
        named.add(id(getattr(one, "optimizer", None)) if isinstance(one, Optimizer) else 0)
    own = _parameters_of(parts.values())
    for one in gc.get_objects():
        kind = type(one)
        if id(one) in named or not isinstance(kind, type):
            continue
        wrong = _wrong(one, kind, named, own, cure)
        if wrong:
            return wrong
    return ""


def _wrong(one: Any, kind: type, named: Set[int], own: Set[int], cure: str) -> str:
    if issubclass(kind, DistributedSampler):
        return (
            "a DistributedSampler keeps the rank and the world size of its start: divide each batch"
            " by world.rank and world.size, or use muster.data.ElasticSampler"
        )
    missing = ""
    if issubclass(kind, Optimizer):
        trained = {id(it) for group in one.param_groups for it in group["params"]}
        missing = "an optimizer" if trained & own else ""
    elif issubclass(kind, LRScheduler):
        missing = "a schedule" if id(getattr(one, "optimizer", None)) in named else ""
    elif issubclass(kind, torch.amp.GradScaler):
        missing = "a scaler" if one.is_enabled() else ""
    elif issubclass(kind, AveragedModel):
        missing = "an averaged model"
    elif issubclass(kind, ElasticSampler):
        missing = "a sampler" if one.counted or one.placed else ""
    if not missing:
        return ""
    return "%s (%s) changes in training and is not among the parts: %s" % (
        missing,
        kind.__name__,
        cure,
    )
