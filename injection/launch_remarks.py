# SPDX-License-Identifier: Apache-2.0
"""Remarks on the launch line of a container: what Muster overrides in it, and what it cannot.

``docs/kubernetes.md`` has them all, in these words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from injection import launches
from injection.facts import listed
from injection.horovod import starts_mpi
from injection.kinds import Kind
from injection.launches import ACCELERATE, HOROVODRUN, TORCHRUN, FoundLauncher
from injection.member_spec import Demand
from injection.remarks import Remark, warning
from injection.workloads import Workload
from launcher_shim.pod.torchrun_options import KEEP_FLAGS

OVERRIDDEN = "container {name}: Muster overrides {options} of its {launcher} line"
NNODES = "container {name}: the job's {bounds} overrides the number of nodes in its command"
FIXED = (
    "container {name}: min and max are the {nodes} nodes of its launch line, so the job waits"
    " whenever a pod is missing: give a smaller --min"
)
WINS = (
    "container {name} has {option} in its command, and keeps it, so the pod would not train with"
    " the others: remove it"
)
HIDDEN = (
    "container {name}: {unknown} of its torchrun line is not known here, so {options} behind it"
    " may be kept: write {unknown}=VALUE"
)
ADDRESS_WINS = "container {name} has --local-addr in its command: it wins over the pod's address"
HALVES = (
    "min {least} is not above half of max {most}: while running pods have lost the store, new pods"
    " can train beside them: give --min {enough} or more, or --on-cut=hold"
)
KEPT = (
    "container {name} keeps the rendezvous of its accelerate launch, so its ranks meet without"
    " Muster: {remedy}"
)
APART = "container {name}: a {launcher} with MUSTER_KEEP_FLAGS=1 starts ranks apart from the job's"
ONE_PROCESS = (
    "container {name}: python -m accelerate.commands.launch starts one process, without Muster:"
    " write accelerate launch, or give it --multi_gpu"
)
BY_DEEPSPEED = (
    "container {name}: accelerate launch --use_deepspeed takes the deepspeed launcher for several"
    " machines, whose ranks meet without Muster: add --deepspeed_multinode_launcher standard"
)
FOREIGN = (
    "container {name} starts {launcher}, whose ranks meet without Muster: start the script by"
    " torchrun, which sets the same variables, and keep the script's arguments: torchrun"
    " --nproc-per-node={ranks} {script} …"
)
IN_MPI = ", in the pods of a Job or a PyTorchJob"
NO_LAUNCHER = (
    "container {name}: no launcher is found in its command. If a script starts torchrun or"
    " accelerate launch, it trains through Muster; ranks that a script starts itself do not"
)
NO_HOROVODRUN = (
    "container {name}: no horovodrun is found in its command. If a script starts one, it gets"
    " Muster's host list; another launcher does not"
)


def on_launches(
    workload: Workload, container: Mapping[str, Any], want: Demand, *, wrapped: bool
) -> Iterator[Remark]:
    """Yield the remarks on a container's launchers; ``wrapped``: muster-run starts its command."""
    name = container.get("name")
    if want.horovod == "worker":
        return
    found = launches.launches(container)
    if (fault := world_of_its_own(workload, container)) is not None:
        yield Remark(fault, "error")
    elif want.horovod == "launcher":
        if starts_mpi(container) is None and not any(o.launcher == HOROVODRUN for o in found):
            yield warning(NO_HOROVODRUN.format(name=name))
    elif not found and listed(container, "command"):
        yield warning(NO_LAUNCHER.format(name=name))
    if want.horovod is None:
        yield from _on_torch(container, found, _remedy(container, wrapped=wrapped))
        yield from _on_bounds(container, want)
        if 2 * want.least <= want.most and want.on_cut != "hold":
            enough = want.most // 2 + 1
            yield Remark(HALVES.format(least=want.least, most=want.most, enough=enough))


def world_of_its_own(workload: Workload, container: Mapping[str, Any]) -> str | None:
    """Return why ranks of a container's launcher never meet through Muster; None if they may."""
    name = container.get("name")
    if any(one.takes_deepspeed() for one in launches.launches(container)):
        return BY_DEEPSPEED.format(name=name)
    found = launches.foreign(container)
    if found is None:
        return None
    sentence = FOREIGN + (IN_MPI if (workload.known or Kind(())).horovod else "")
    ranks = found.options().get("num-gpus", "gpu")
    return sentence.format(name=name, launcher=found.launcher, script=found.script, ranks=ranks)


def _remedy(container: Mapping[str, Any], *, wrapped: bool) -> str | None:
    """Return what to do so that Muster overrides flags; None if it does."""
    if not wrapped:
        has_command = bool(listed(container, "command"))
        return "leave --no-wrap out" if has_command else "give the container its command"
    return f"leave {KEEP_FLAGS} out" if launches.keeps_flags(container) else None


def _on_torch(
    container: Mapping[str, Any], found: list[FoundLauncher], remedy: str | None
) -> Iterator[Remark]:
    """Yield the remarks on launchers of torch; ``remedy``: against the flags of all being kept."""
    name = container.get("name")
    of_torch = [one for one in found if one.launcher in (TORCHRUN, ACCELERATE)]
    apart = [one for one in of_torch if remedy or one.keeps]
    ours = [one for one in of_torch if one not in apart]
    if apart and ours:
        yield Remark(APART.format(name=name, launcher=apart[0].launcher))
    elif apart:
        yield from _on_kept(name, apart, remedy or f"leave {KEEP_FLAGS} out")
    torchruns = [one for one in ours if one.launcher == TORCHRUN]
    if any("local-addr" in one.options() for one in torchruns):
        yield warning(ADDRESS_WINS.format(name=name))
    for one in torchruns:
        unknown, behind = one.hidden()
        if behind:
            options = _enumerated(behind)
            yield Remark(HIDDEN.format(name=name, unknown=unknown, options=options), "error")
    for launcher in (TORCHRUN, ACCELERATE):
        of_it = [one for one in ours if one.launcher == launcher]
        if overridden := [option for one in of_it for option in one.overridden()]:
            options = _enumerated(overridden)
            yield Remark(OVERRIDDEN.format(name=name, options=options, launcher=launcher))
    if any(one.is_one_process() and one.by_module for one in ours):
        yield warning(ONE_PROCESS.format(name=name))


def _on_kept(name: Any, apart: list[FoundLauncher], remedy: str) -> Iterator[Remark]:
    torchruns = [one for one in apart if one.launcher == TORCHRUN]
    for option in dict.fromkeys(option for one in torchruns for option in one.winning()):
        yield Remark(WINS.format(name=name, option=f"--{option}"), "error")
    if len(torchruns) < len(apart):
        yield Remark(KEPT.format(name=name, remedy=remedy), "error")


def _on_bounds(container: Mapping[str, Any], want: Demand) -> Iterator[Remark]:
    name, of_job = container.get("name"), (want.least, want.most)
    if want.sized_by_launch and want.least == want.most > 1:
        yield warning(FIXED.format(name=name, nodes=want.most))
    elif launches.nnodes(container) is not None and launches.bounds(container) != of_job:
        yield Remark(NNODES.format(name=name, bounds=f"{want.least}:{want.most}"))


def _enumerated(options: Iterable[str]) -> str:
    *others, last = dict.fromkeys(f"--{option}" for option in options)
    return f"{', '.join(others)} and {last}" if others else last
