# SPDX-License-Identifier: Apache-2.0
"""The check that the launcher beside this sidecar connects to it, with its sidecar's options.

A torchrun that is pointed elsewhere trains without Muster: its pod counts as a member, but takes
part in no drain and in no round. So it is reported. Only what is known is reported: without
``muster-run``, a container that still pulls its image looks like one that never starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace

from agent.rundir.reports import LaunchReport
from launcher_shim.torchrun.launcher import bounds
from rdzv.dataclass import dataclass
from rdzv.records.troubles import Bypass
from rdzv.sentences import counted

FINE = Bypass()


@dataclass(frozen=True, slots=True)
class LauncherPolicy:
    """The options that the launcher should have, and how long it may take to come."""

    run_id: str
    """Its ``--rdzv-id``: the job's name. With another it trains in a run of its own."""
    min_nodes: int
    """The fewest nodes of its ``--nnodes``: as its pod was given it, even after the job's bound has
    changed."""
    max_nodes: int
    """The most nodes of its ``--nnodes``, in the same way."""
    port: int
    """Port of its rendezvous, on the loopback address."""
    slots: int = 1
    """The workers that it should start: as its pod was given it."""
    relayed: bool = False
    """Whether ``muster-run`` has to serve that port."""
    patience_s: float = 60.0
    """Report a launcher that has not connected after this time, in seconds. A shorter
    one reports launchers that are still starting."""


@dataclass(frozen=True, slots=True)
class LauncherView:
    """The launcher at one moment, as its sidecar sees it.

    ``expected``: a torchrun should come: the member is ready, takes part, and is a worker of a job
    without a central launcher. ``over``: a run of this generation was closed. ``launch``: the
    report of ``muster-run``, if any. ``runs``: run ids of the torchruns that are connected,
    and whether each has shown another ``--nnodes`` than its sidecar's. ``others``: run ids that
    torchruns of other members are in. ``ranks``: training processes have published their progress.
    ``workers``: the number that its torchrun has started in the present round; 0: unknown.
    ``plain``: why workers started without the zygote that ``MUSTER_WARM`` asks for, by local rank.
    """

    expected: bool = False
    over: bool = False
    launch: LaunchReport | None = None
    runs: Mapping[str, bool] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    ranks: bool = False
    workers: int = 0
    plain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LauncherObservations:
    """Past observations. Times are monotonic, in seconds; ``inf`` if there is none yet.

    ``waiting_since_s``: since when a torchrun of the present container and process is expected.
    ``connected``: one has connected since. ``apart_since_s``: since when one asks for another run
    id than the job's name. ``workers``: the number that it started last; 0: unknown. ``process``:
    the launch that these observations are about.
    """

    waiting_since_s: float = math.inf
    connected: bool = False
    apart_since_s: float = math.inf
    workers: int = 0
    process: tuple[str, int] = ("", 0)


def observe(
    now: float, previous: LauncherObservations, sight: LauncherView, policy: LauncherPolicy
) -> LauncherObservations:
    """Return the observations with the present view added."""
    launch = sight.launch
    process = (launch.started, launch.pid) if launch else ("", 0)
    if launch is None:
        process = previous.process  # it has ended, or reports nothing: no other has begun
    elif process != previous.process:
        # Another container, or another launcher in it: its predecessor does not count.
        previous = LauncherObservations(process=process)
    waiting_since_s = min(previous.waiting_since_s, now) if sight.expected else math.inf
    apart = any(run != policy.run_id for run in sight.runs)
    return replace(
        previous,
        waiting_since_s=waiting_since_s,
        connected=previous.connected or bool(sight.runs),
        apart_since_s=min(previous.apart_since_s, now) if apart else math.inf,
        workers=sight.workers or previous.workers,
    )


def decide(
    now: float, seen: LauncherObservations, sight: LauncherView, policy: LauncherPolicy
) -> Bypass:
    """Return the finding, in a sentence that stays the same for as long as it is so."""
    found = _fault(now, seen, sight, policy)
    other = sight.runs and seen.workers not in (0, policy.slots)
    if not found.kind and sight.plain:
        found = Bypass("plain", _plain(sight.plain))
    if not other:
        return found
    if found.kind:
        return replace(found, slots=seen.workers)
    return Bypass(
        "slots",
        f"its torchrun started {seen.workers} worker{'s'[: seen.workers > 1]}, and that counts; its"
        f" sidecar was given --slots={policy.slots}",
        seen.workers,
    )


def _fault(
    now: float, seen: LauncherObservations, sight: LauncherView, policy: LauncherPolicy
) -> Bypass:
    """Return what is wrong with the launcher itself."""
    if not sight.expected:
        return FINE
    if sight.runs:
        return _of_connected(now, seen, sight, policy)
    if sight.over or seen.connected:
        return FINE
    launch = sight.launch
    if launch is not None and launch.launcher == "torchrun":
        elsewhere = _elsewhere(launch, policy)
        if elsewhere:
            return Bypass("elsewhere", elsewhere)
    if now - seen.waiting_since_s < policy.patience_s:
        return FINE
    return _of_absent(sight, policy)


def _plain(reasons: tuple[str, ...]) -> str:
    """Return the sentence on workers that started plainly, and why."""
    those = counted(len(reasons), "worker")
    several = "; ".join(dict.fromkeys(reasons))
    return f"{those} started without the zygote, so later than with it: {several}"


def _of_connected(
    now: float, seen: LauncherObservations, sight: LauncherView, policy: LauncherPolicy
) -> Bypass:
    own = f"{policy.min_nodes}:{policy.max_nodes}"
    nnodes = sight.launch.nnodes if sight.launch else ""
    if nnodes and bounds(nnodes) != (policy.min_nodes, policy.max_nodes):
        return Bypass(
            "nnodes",
            f"its torchrun was given --nnodes={nnodes}, but its sidecar {own}, and the"
            " sidecars' values count: give the same, or none",
        )
    if any(sight.runs.values()):
        return Bypass(
            "nnodes",
            f"its torchrun was given another --nnodes than its sidecar's {own}, and the"
            " sidecars' values count: give the same, or none",
        )
    apart = sorted(run for run in sight.runs if run not in {policy.run_id, *sight.others})
    if apart and now - seen.apart_since_s >= policy.patience_s:
        return Bypass(
            "run_id",
            f"its torchrun was given --rdzv-id={apart[0]}, which no other pod of the job asks for:"
            f" give {policy.run_id}, or none",
        )
    return FINE


def _of_absent(sight: LauncherView, policy: LauncherPolicy) -> Bypass:
    launch, over_s = sight.launch, f"for {policy.patience_s:.0f} s or more"
    if launch is not None and launch.launcher == "torchrun":
        return Bypass(
            "absent",
            f"its torchrun was started and has not connected to localhost:{policy.port} {over_s}:"
            " see its log",
        )
    if launch is not None:
        return Bypass(
            "absent",
            f"its training container was started and has started no torchrun {over_s}: the pod"
            " counts as a member, but does not train with the others",
        )
    if sight.ranks:
        return Bypass(
            "absent",
            "its ranks train, but no torchrun has connected: start torchrun with what the file env"
            " in the run directory says",
        )
    missing = "muster-run does not run in it" if policy.relayed else "none has connected"
    return Bypass(
        "unseen",
        f"no torchrun was seen {over_s} ({missing}): its container may still be starting, or its"
        " command does not begin with muster-run",
    )


def _elsewhere(launch: LaunchReport, policy: LauncherPolicy) -> str:
    """Name the other rendezvous that a torchrun was given; empty if it was given this one."""
    here = f"localhost:{policy.port}"
    if launch.standalone:
        return (
            f"its torchrun was given --standalone and trains alone, not with the others at {here}:"
            " leave --standalone out"
        )
    if launch.rdzv_backend != "c10d":
        backend = launch.rdzv_backend or "static"
        return (
            f"its torchrun was given the rendezvous backend {backend}, not c10d, and does not meet"
            f" the others at {here}: start it with what the file env in the run directory says"
        )
    if not _is_here(launch.rdzv_endpoint, policy.port):
        given = launch.rdzv_endpoint or "none"
        return (
            f"its torchrun was given the rendezvous endpoint {given}, not {here}: leave"
            " --rdzv-endpoint out, or give that"
        )
    return ""


def _is_here(endpoint: str, port: int) -> bool:
    host, _, given_port = endpoint.rpartition(":")
    if not host and endpoint:
        host, given_port = endpoint, "29400"  # torch's default
    return host in ("localhost", "127.0.0.1", "[::1]", "::1") and given_port == str(port)
