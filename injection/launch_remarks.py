# SPDX-License-Identifier: Apache-2.0
"""Remarks on the launch line of a container: what Muster overrides in it, and what it cannot.

``docs/kubernetes.md`` has them all, in these words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from injection import launches
from injection.facts import listed
from injection.horovod import starts_mpi
from injection.launches import ACCELERATE, ADDRESS, HOROVODRUN, TORCHRUN, Launch
from injection.member_spec import Demand
from injection.remarks import Remark, warning
from injection.workloads import Kind, Workload

OVERRIDDEN = "container {name}: Muster overrides {options} of its {launcher} line"
NNODES = "container {name}: the job's {bounds} overrides the number of nodes in its command"
FIXED = (
    "container {name}: min and max are the {nodes} nodes of its launch line, so the job waits"
    " whenever a pod is missing: give a smaller --min"
)
WINS = (
    "container {name} has {option} in its command: kept, and it wins over what Muster says: remove"
    " it"
)
ADDRESS_WINS = "container {name} has --local-addr in its command: it wins over the pod's address"
KEPT = (
    "container {name} keeps the rendezvous of its accelerate launch, so its ranks meet without"
    " Muster: leave {keep} out"
)
FOREIGN = (
    "container {name} starts {launcher}, whose ranks meet without Muster: start the script by"
    " torchrun, which sets the same variables: torchrun --nproc-per-node={slots} {script}"
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
    if (other := launches.foreign(container)) is not None:
        of_mpi = (workload.known or Kind(())).horovod
        sentence = FOREIGN + (IN_MPI if of_mpi else "")
        sentence = sentence.format(
            name=name, launcher=other.launcher, slots=want.slots, script=other.script
        )
        yield Remark(sentence, "error")
    elif want.horovod == "launcher":
        if starts_mpi(container) is None and not any(o.launcher == HOROVODRUN for o in found):
            yield warning(NO_HOROVODRUN.format(name=name))
    elif not found and listed(container, "command"):
        yield warning(NO_LAUNCHER.format(name=name))
    if want.horovod is None:
        yield from _on_torch(container, found, wins=not wrapped or launches.keeps_flags(container))
        yield from _on_bounds(container, want)


def _on_torch(container: Mapping[str, Any], found: list[Launch], *, wins: bool) -> Iterator[Remark]:
    name = container.get("name")
    for launcher in (TORCHRUN, ACCELERATE):
        lines = [launch for launch in found if launch.launcher == launcher]
        options = list(dict.fromkeys(option for one in lines for option in one.winning()))
        if launcher == TORCHRUN and ADDRESS in options:
            options.remove(ADDRESS)
            yield warning(ADDRESS_WINS.format(name=name))
        given = [f"--{option}" for option in options]
        if not wins and given:
            line = OVERRIDDEN.format(name=name, options=_enumerated(given), launcher=launcher)
            yield Remark(line)
        elif wins and launcher == ACCELERATE and lines:
            yield Remark(KEPT.format(name=name, keep=launches.KEEP_FLAGS), "error")
        elif wins:
            for option in given:
                yield Remark(WINS.format(name=name, option=option), "error")


def _on_bounds(container: Mapping[str, Any], want: Demand) -> Iterator[Remark]:
    name, of_job = container.get("name"), (want.least, want.most)
    if want.sized_by_launch and want.least == want.most > 1:
        yield warning(FIXED.format(name=name, nodes=want.most))
    elif launches.nnodes(container) is not None and launches.bounds(container) != of_job:
        yield Remark(NNODES.format(name=name, bounds=f"{want.least}:{want.most}"))


def _enumerated(options: list[str]) -> str:
    *others, last = options
    return f"{', '.join(others)} and {last}" if others else last
