# SPDX-License-Identifier: Apache-2.0
"""The parts of a world: their faults, and their state, which one rank hands to all others.

Python's own list of objects shows parts that the script has made and has not named. The state is
handed over bit for bit: one small object says what there is; the tensors follow as bytes. Buffers
are always among them: each rank has moved its own running statistics.
"""

from __future__ import annotations

import gc
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

from muster.data import ElasticSampler, ElasticStream

BUCKET_BYTES = 16 * 1024 * 1024
"""Tensors are sent together up to this size; larger ones without a copy, in parts of it: Gloo takes
longer for one large broadcast than for many of this size."""

CURE = "name it in World(...)"


class Slot(NamedTuple):
    """The place of a tensor in a state."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


class Parts:
    """All that changes in training, by name.

    ``before_step`` is called before an optimizer changes anything, and raises ``RuntimeError`` if
    gradients may be those of a collective that was cut.
    """

    def __init__(self, parts: Mapping[str, Any], before_step: Callable[[], None]) -> None:
        self._parts = dict(parts)
        self._before_step = before_step
        self.samplers = {
            name: one for name, one in self._parts.items() if isinstance(one, ElasticSampler)
        }
        self.modules = [one for one in self._parts.values() if isinstance(one, nn.Module)]
        self.optimizers = [one for one in self._parts.values() if isinstance(one, Optimizer)]
        self._places = self._cursors()
        self.stepped = False
        """Whether an optimizer has begun to change the state since ``keep``."""
        for optimizer in self.optimizers:
            inner: Any = getattr(optimizer, "optimizer", optimizer)  # of accelerate's
            inner.register_step_pre_hook(self._begin_step)

    def _begin_step(self, *_: Any) -> None:
        self._before_step()
        self.stepped = True

    def _cursors(self) -> Dict[str, Any]:
        return {name: sampler.cursor for name, sampler in self.samplers.items()}

    def keep(self) -> None:
        """Note that the state is whole, and the place in the data that belongs to it."""
        self.stepped = False
        if self.samplers:
            self._places = self._cursors()

    def undo(self) -> None:
        """Drop what a broken step has left: gradients, a scaler's notes, batches taken."""
        for module in self.modules:
            for parameter in module.parameters():
                parameter.grad = None
        for one in self._parts.values():
            noted = getattr(one, "_per_optimizer_states", None)  # of a GradScaler
            if isinstance(noted, dict):
                noted.clear()
        for name, sampler in self.samplers.items():
            sampler.go_to(self._places[name])

    def divide(self, rank: int, world_size: int) -> None:
        """Let the samplers divide their batches among the ranks of another world."""
        for sampler in self.samplers.values():
            sampler.divide(rank, world_size)

    def hand_over(self, source: int, device: torch.device, told: Dict[str, Any]) -> Dict[str, Any]:
        """Give all ranks the state of ``source``; return what that one gave with it.

        Raises ``RuntimeError`` if the others' parts are not of the same kind.
        """
        given = dist.get_rank() == source
        tensors: List[torch.Tensor] = []
        box: List[Any] = [None]
        if given:
            states = {name: self._take(name, one, tensors) for name, one in self._parts.items()}
            box = [{"told": told, "states": states}]
        dist.broadcast_object_list(box, src=source, device=device)
        found: Dict[str, Any] = box[0]
        if list(found["states"]) != list(self._parts):
            raise RuntimeError(
                "the parts of this rank are %s, and those of the training world %s"
                % (list(self._parts), list(found["states"]))
            )
        later = []
        if not given:
            for name, one in self._parts.items():
                made = self._make(name, one, found["states"][name], tensors)
                later.append((name, one, made))
        with torch.no_grad():
            _broadcast(tensors, source, device)
        for name, one, made in later:
            self._put(name, one, made)
        told_by: Dict[str, Any] = found["told"]
        return told_by

    def _take(self, name: str, part: Any, tensors: List[torch.Tensor]) -> Any:
        if name in self.samplers:
            return self._places[name]
        if isinstance(part, nn.Module):
            extra = {key: value for key, value in part.state_dict().items() if _is_extra(key)}
            named = _tensors_of(part)
            return [(key, take_apart(one, tensors)) for key, one in named], extra
        if isinstance(part, Optimizer):
            groups = [
                {key: value for key, value in group.items() if key != "params"}
                for group in part.param_groups
            ]
            by_number = {
                number: part.state[parameter]
                for number, parameter in enumerate(_parameters(part))
                if parameter in part.state
            }
            return take_apart([groups, by_number], tensors)
        return take_apart(part.state_dict(), tensors)

    def _make(self, name: str, part: Any, state: Any, tensors: List[torch.Tensor]) -> Any:
        """Return the state with tensors to be filled: those that are there, if they fit."""
        if name in self.samplers:
            return state
        if isinstance(part, nn.Module):
            own = _tensors_of(part)
            mine = [(key, tuple(one.shape), one.dtype) for key, one in own]
            theirs = [(key, slot.shape, slot.dtype) for key, slot in state[0]]
            if mine != theirs:
                raise RuntimeError("%r is another model than that of the training world" % name)
            tensors.extend(one.detach() for _, one in own)
            return state[1]
        if isinstance(part, Optimizer):
            parameters = _parameters(part)
            groups, by_number = state
            if len(groups) != len(part.param_groups) or max(by_number, default=-1) >= len(
                parameters
            ):
                raise RuntimeError("%r is another optimizer than the training world's" % name)
            own_groups = put_together(groups, part.param_groups, tensors, torch.device("cpu"))
            own_states = {
                number: put_together(
                    one, part.state.get(parameters[number]), tensors, parameters[number].device
                )
                for number, one in by_number.items()
            }
            return own_groups, own_states
        return put_together(state, part.state_dict(), tensors, torch.device("cpu"))

    def _put(self, name: str, part: Any, made: Any) -> None:
        if name in self.samplers:
            part.go_to(made)
            self._places[name] = made
        elif isinstance(part, nn.Module):
            if made:
                part.load_state_dict(made, strict=False)
        elif isinstance(part, Optimizer):
            # Not by load_state_dict, which casts a moment to the type of its parameter.
            parameters = _parameters(part)
            part.state.clear()
            part.state.update({parameters[number]: one for number, one in made[1].items()})
            for at, options in enumerate(made[0]):
                part.param_groups[at].update(options)
        else:
            part.load_state_dict(made)


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"


def _tensors_of(module: nn.Module) -> List[Tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _parameters(optimizer: Optimizer) -> List[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def take_apart(value: Any, tensors: List[torch.Tensor]) -> Any:
    """Return ``value`` with a slot for each tensor in it, and append those to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return Slot(tuple(value.shape), value.dtype, value.device.type == "cpu")
    if isinstance(value, dict):
        return {key: take_apart(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)([take_apart(one, tensors) for one in value])
    return value


def put_together(skeleton: Any, own: Any, tensors: List[torch.Tensor], device: torch.device) -> Any:
    """Return the value of a skeleton, with tensors of ``own`` where they fit, and append them."""
    if isinstance(skeleton, Slot):
        wanted = torch.device("cpu") if skeleton.on_host else device
        fits = isinstance(own, torch.Tensor) and own.dtype == skeleton.dtype
        if not fits or tuple(own.shape) != skeleton.shape or own.device != wanted:
            own = torch.empty(skeleton.shape, dtype=skeleton.dtype, device=wanted)
        tensors.append(own.detach())
        return own
    if isinstance(skeleton, dict):
        inside = own if isinstance(own, dict) else {}
        return {
            key: put_together(one, inside.get(key), tensors, device)
            for key, one in skeleton.items()
        }
    if isinstance(skeleton, (list, tuple)) and not hasattr(skeleton, "_fields"):
        ones = own if isinstance(own, (list, tuple)) and len(own) == len(skeleton) else None
        return type(skeleton)(
            [
                put_together(one, None if ones is None else ones[at], tensors, device)
                for at, one in enumerate(skeleton)
            ]
        )
    return skeleton


def _broadcast(tensors: Sequence[torch.Tensor], source: int, device: torch.device) -> None:
    given = dist.get_rank() == source
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device.type == device.type:
            for part in _bytes_of(bucket[0]).split(BUCKET_BYTES):
                dist.broadcast(part, src=source)
            continue
        sizes = [one.numel() * one.element_size() for one in bucket]
        if given:
            sent = torch.cat([_bytes_of(one.contiguous()).to(device) for one in bucket])
        else:
            sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(sent, src=source)
        if not given:
            parts = sent.split(sizes)
            for at, one in enumerate(bucket):
                # A part may begin at any byte, and a view of a type only at a multiple.
                one.copy_(parts[at].clone().view(one.dtype).view(one.shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[List[torch.Tensor]]:
    bucket: List[torch.Tensor] = []
    size = 0
    for one in tensors:
        own = one.numel() * one.element_size()
        if not own:
            continue
        if bucket and size + own > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += own
    if bucket:
        yield bucket


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
        if not _tensors_named([net]) <= _tensors_named(parts.values()):
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


def _tensors_named(parts: Iterable[Any]) -> Set[int]:
    modules = [one for one in parts if isinstance(one, nn.Module)]
    return _parameters_of(modules) | {id(it) for one in modules for it in one.buffers()}


def unnamed(parts: Mapping[str, Any], cure: str = CURE) -> str:
    """Return what the script has made that changes in training and is no part; or "".

    ``cure``: what to do about it.

    Python's own list of objects shows optimizers, schedules and samplers that the script has
    made and has not named.
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
