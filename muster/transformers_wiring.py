# SPDX-License-Identifier: Apache-2.0
"""Faults of a trainer of transformers whose samples the callback is to choose: pure.

The callback takes the place of the trainer's own order of data. What of it the user has chosen is
kept, or refused.
"""

from __future__ import annotations

from typing import Any

ORDERS = ("random", "sequential", "group_by_length")
"""The values of ``train_sampling_strategy`` whose order the callback keeps."""

HOOKS = ("_get_train_sampler", "get_train_dataloader", "get_batch_samples")
"""Methods of a trainer that choose samples, and that the callback replaces."""

SHORT = (
    "MusterCallback() without the trainer keeps steps, and not samples: a world of another size"
    " would train some of them twice and others never. Write MusterCallback(trainer,"
    " global_batch=%d), which is the batch of all ranks here, or MusterCallback(steps_only=True)"
)

MODEL_ALONE = (
    "save_only_model=True saves no optimizer, schedule and random numbers, so training could not go"
    " on from a commit: leave it out"
)

LATER = (
    "this rank was started beside a world that trains and changes in place, and can come into it by"
    " muster.transformers.train(..., in_place=True) alone: give every rank the same call"
)

BEGUN = (
    "the checkpoint of step %d was saved without MusterCallback(trainer, ...), in the middle of an"
    " epoch: its samples were in another order, so some would be trained twice and others never."
    " Train that epoch to its end without the callback, or insist by replace=True"
)

MEAN = (
    "the loss of %s is a mean, and does not use num_items_in_batch: the trainer adds up the means"
    " of all micro batches and ranks, so the optimizer's step differs between worlds. %s"
)

MEAN_OF_MODEL = (
    "Write trainer.model_accepts_loss_kwargs = False before train(): the step is then that of the"
    " mean over the global batch, in every world"
)

MEAN_OF_FUNCTION = "Let compute_loss_func divide a sum by num_items_in_batch"


def fault(trainer: Any, *, replace: bool) -> str:
    """Return what of the trainer the callback would pass over, and what to write; or ""."""
    hook = vars(trainer).get("get_train_dataloader")
    if type(getattr(hook, "__self__", None)).__module__.startswith("muster."):
        return "this trainer has such a callback already: make one"
    for name in ("tp", "cp", "sp"):
        many = getattr(trainer, "get_%s_size" % name, lambda: 1)()
        if many > 1:
            return (
                "ranks of a model-parallel group (%s of %d) train the same samples, and it would"
                " give each rank others: use MusterCallback(steps_only=True)" % (name, many)
            )
    if replace:
        return ""
    for name in HOOKS:
        owner = _owner(trainer, name)
        if owner:
            return (
                "%s.%s chooses samples, and the callback would not call it: leave it out, or insist"
                " on the callback's own order by replace=True, or keep steps alone by"
                " MusterCallback(steps_only=True)" % (owner, name)
            )
    wanted = order(trainer.args)
    if wanted not in ORDERS:
        return (
            "it does not know train_sampling_strategy=%r: give one of %s, or insist on a random"
            " order by replace=True" % (wanted, ", ".join(ORDERS))
        )
    return ""


def fault_in_place(trainer: Any) -> str:
    """Return why a trainer cannot train on in another world of the same process; or ""."""
    args, accelerator = trainer.args, trainer.accelerator
    optimizer = str(getattr(args.optim, "value", args.optim))
    sharded = (
        getattr(trainer, "is_deepspeed_enabled", False)
        or getattr(trainer, "is_fsdp_enabled", False)
        or getattr(trainer, "is_fsdp_xla_enabled", False)
        or getattr(trainer, "is_model_parallel", False)
        or getattr(trainer, "is_distributed_loading_by_transformers", False)
        or args.n_gpu > 1
    )
    if sharded:
        return "it needs a whole model on each rank, by DistributedDataParallel: leave it out"
    refused = {
        "fp16=True": accelerator.scaler is not None,
        "torch_compile": args.torch_compile,
        "auto_find_batch_size": args.auto_find_batch_size,
        "model_init": trainer.model_init is not None,
        "neftune_noise_alpha": trainer.neftune_noise_alpha is not None,
        "use_liger_kernel": args.use_liger_kernel,
        "debug": bool(args.debug),
        "optim=%r" % optimizer: "lomo" in optimizer or "layerwise" in optimizer,
    }
    found = [name for name, given in refused.items() if given]
    if found:
        return "it was not tried with %s: leave one of the two out" % ", ".join(found)
    return ""


def order(args: Any) -> str:
    """Return the order of data that the arguments ask for."""
    by_length = getattr(args, "group_by_length", False)  # before transformers 5
    return str(
        getattr(args, "train_sampling_strategy", "group_by_length" if by_length else "random")
    )


def total_batch(args: Any) -> int:
    """Return the batch of all ranks that the arguments make in this world."""
    return int(
        args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    )


def _owner(trainer: Any, name: str) -> str:
    """Return the name of what overrides a method of transformers' own trainers; or ""."""
    if name in vars(trainer):
        return "trainer"
    for one in type(trainer).__mro__:
        if name in vars(one):
            return "" if one.__module__.startswith("transformers.") else one.__qualname__
    return ""
