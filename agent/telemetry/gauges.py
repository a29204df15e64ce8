# SPDX-License-Identifier: Apache-2.0
"""The gauges of the sidecar, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable

from agent.launcher_watch import LauncherWatcher
from agent.parts import Drains, LauncherParts, MemberParts
from agent.shards import ShardDesk
from agent.telemetry.http import LoopLag
from agent.telemetry.metrics import Metrics
from launcher_shim.c10d.endpoint import Endpoint
from rdzv.mirror import Mirror


def add_gauges(
    metrics: Metrics,
    member: MemberParts,
    launcher: LauncherParts,
    loop_lag: LoopLag,
    clock: Callable[[], float],
) -> None:
    """Add the gauges of one sidecar to ``metrics``. ``clock`` is its parts', in seconds."""
    _add_member_gauges(metrics, member, launcher, clock)
    _add_watch_gauges(metrics, member.client.mirror, clock)
    _add_endpoint_gauges(metrics, launcher.endpoint)
    _add_shard_gauges(metrics, launcher.desk)
    metrics.gauge(
        "muster_worker_failures",
        "Worlds that workers of this pod have ended by a failure since this sidecar started.",
        lambda: float(launcher.failures.total),
    )
    metrics.gauge(
        "muster_loop_stuck_seconds",
        "Seconds for which a loop has had something to do and has not done it, by the reason.",
        member.kernel.stuck_s,
        "loop",
        "reason",
    )
    metrics.gauge(
        "muster_loop_lag_seconds",
        "The worst lag of the event loop in the last ten seconds.",
        lambda: loop_lag.worst_s,
    )


def _add_member_gauges(
    metrics: Metrics, member: MemberParts, launcher: LauncherParts, clock: Callable[[], float]
) -> None:
    registrar = member.registrar

    def members() -> dict[str, float]:
        listing = launcher.hosts.listing
        return {
            "listed": len(listing.listed),
            "standby": len(listing.standby),
            "excluded": len(listing.excluded),
        }

    metrics.gauge("muster_members", "Members of the job, by state.", members, "state")
    metrics.gauge(
        "muster_job_state",
        "1 for the state of the job, 0 for the others; 0 for all while the store is away.",
        member.states.by_state,
        "state",
    )
    metrics.gauge(
        "muster_stuck_ranks",
        "1 for each rank that keeps a world that stands still from training.",
        member.states.stuck_ranks,
        "rank",
    )
    metrics.gauge(
        "muster_registered",
        "1 while this member is registered under a lease that has not expired.",
        lambda: float(registrar.registered.is_set() and registrar.lease_valid_until_s > clock()),
    )
    metrics.gauge(
        "muster_lease_remaining_seconds",
        "Seconds until this member's lease expires if it is not renewed.",
        lambda: max(0.0, registrar.lease_valid_until_s - clock()),
    )
    metrics.gauge(
        "muster_generation",
        "Generation of the job that this member is in; 0 before it registered.",
        lambda: float(registrar.generation or 0),
    )
    if member.peers is not None:
        metrics.gauge(
            "muster_peers",
            "Neighbours whose machines this sidecar watches by an idle connection, by state.",
            member.peers.by_state,
            "state",
        )


def _add_endpoint_gauges(metrics: Metrics, endpoint: Endpoint) -> None:
    def rounds() -> dict[str, float]:
        runs = endpoint.rendezvous().items()
        return {run_id: float(run.snapshot().round.number) for run_id, run in runs}

    metrics.gauge(
        "muster_c10d_connections",
        "Launchers connected to the rendezvous endpoint.",
        lambda: float(endpoint.connections),
    )
    metrics.gauge("muster_round", "Number of the newest round of each torch run.", rounds, "run_id")


def _add_shard_gauges(metrics: Metrics, desk: ShardDesk) -> None:
    metrics.gauge(
        "muster_shards_open",
        "Shards of the current epoch that no rank holds or has trained, by data set.",
        lambda: {name: one.open for name, one in desk.progress().items()},
        "data_set",
    )
    metrics.gauge(
        "muster_shards_leased",
        "Shards of the current epoch that ranks hold and have not trained, by data set.",
        lambda: {name: one.leased for name, one in desk.progress().items()},
        "data_set",
    )
    metrics.gauge(
        "muster_shards_done",
        "Shards of the current epoch that a save of all ranks contains, by data set.",
        lambda: {name: one.done for name, one in desk.progress().items()},
        "data_set",
    )


def _add_watch_gauges(metrics: Metrics, mirror: Mirror, clock: Callable[[], float]) -> None:
    metrics.gauge(
        "muster_store_revision",
        "Revision of the store that this member has seen.",
        lambda: float(mirror.revision),
    )
    metrics.gauge(
        "muster_watch_healthy_seconds",
        "Seconds for which the watch of the store has worked without a gap; 0 while it does not.",
        lambda: mirror.healthy_for_s(clock()),
    )
    metrics.gauge(
        "muster_watch_lag_seconds",
        "Seconds for which the watch has been behind the revision in the store's responses.",
        lambda: metrics.store.unseen_for_s(mirror.revision),
    )
    metrics.gauge(
        "muster_watch_listener_errors",
        "Failures of a part of this sidecar on a change in the store: a defect, see its log.",
        lambda: float(mirror.listener_errors),
    )


def add_drain_gauges(metrics: Metrics, drains: Drains, boot_clock: Callable[[], float]) -> None:
    """Add the gauges about drains, as this sidecar knows of them, to ``metrics``."""

    def seconds_left() -> float:
        due_boot_s = drains.own.due_boot_s
        return -1.0 if due_boot_s is None else max(0.0, due_boot_s - boot_clock())

    metrics.gauge(
        "muster_draining",
        "1 while this pod drains.",
        lambda: float(drains.own.active),
    )
    metrics.gauge(
        "muster_drain_seconds_left",
        "Seconds until SIGTERM is passed to this pod's launcher at the latest; -1: no deadline.",
        seconds_left,
    )
    metrics.gauge(
        "muster_commit_epoch",
        "Number of the newest attempt of all ranks to save the same step.",
        lambda: float(drains.commit.epoch),
    )
    metrics.gauge(
        "muster_last_commit_step",
        "The newest step that all ranks saved, for whatever cause; -1 before the first.",
        lambda: float(drains.last_commit_step),
    )
    metrics.gauge(
        "muster_last_commit_samples_kept",
        "1 if the last commit keeps the samples, 0 if not: muster status says why; -1 before it.",
        lambda: float(drains.last_commit_keeps_samples),
    )
    metrics.gauge(
        "muster_last_saved_step",
        "The newest step that a rank of this pod saved in its round; -1 before the first.",
        lambda: float(drains.last_saved_step),
    )
    metrics.gauge(
        "muster_steps_at_risk",
        "Steps of this pod since the last commit; -1 while its ranks are in no round.",
        lambda: float(drains.saves.steps_at_risk),
    )
    metrics.gauge(
        "muster_drains",
        "Drain records in the store, by outcome; those in progress have none.",
        drains.by_outcome,
        "outcome",
    )


def add_launcher_gauges(metrics: Metrics, watcher: LauncherWatcher) -> None:
    """Add the gauges of the launcher's faults and workers to ``metrics``."""
    metrics.gauge(
        "muster_slots",
        "Workers of this pod: what its torchrun started, else what its sidecar was given.",
        lambda: float(watcher.slots),
    )
    metrics.gauge(
        "muster_launcher_bypass",
        "1 for what is wrong with the launcher beside this sidecar, by kind; 0 for the rest.",
        watcher.by_kind,
        "kind",
    )
