# SPDX-License-Identifier: Apache-2.0
"""What a sidecar consists of, and how its parts know of each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from time import monotonic

from agent.config import Config
from agent.draining.drains import Drains
from agent.host_delivery import HostDelivery
from agent.launcher_watch import Policy
from agent.lookout import Lookout
from agent.rundir import RunDir, State
from agent.store_version import StoreVersion
from agent.sweeper import Sweeper
from launcher_shim.c10d.endpoint import Endpoint
from rdzv.keys import JobKeys
from rdzv.losses import Losses
from rdzv.membership import Membership
from rdzv.registrar import Registrar
from rdzv.registration import Held, Identity
from rdzv.store import Store
from rdzv.watching import Mirror, Watching


@dataclass(frozen=True, slots=True)
class JobParts:
    """The job as this member sees it, its place in it, and what it does for all."""

    mirror: Mirror
    watching: Watching
    membership: Membership
    registrar: Registrar
    losses: Losses
    sweeper: Sweeper
    store_version: StoreVersion


@dataclass(frozen=True, slots=True)
class LauncherParts:
    """What the launcher beside this sidecar is served by, and what looks after it."""

    hosts: HostDelivery
    endpoint: Endpoint
    drains: Drains
    lookout: Lookout


def job_parts(
    config: Config,
    state: State,
    store: Store,
    random: Random,
    *,
    on_held: Callable[[Held], Awaitable[None]],
) -> JobParts:
    """Make the job's parts. ``on_held`` keeps each registration for the next sidecar."""
    keys = JobKeys(config.namespace, config.job)
    mirror = Mirror(keys.prefix, monotonic)
    membership = Membership(keys, mirror)
    registrar = Registrar(
        store,
        mirror,
        membership,
        identity_of(config, state.pod_uid),
        lease_ttl_s=config.lease_ttl_s,
        clock=monotonic,
        random=random,
        held=state.held,
        on_held=on_held,
    )
    return JobParts(
        mirror=mirror,
        watching=Watching(store, mirror, random=random),
        membership=membership,
        registrar=registrar,
        losses=Losses(store, mirror, membership, config.member),
        sweeper=Sweeper(store, mirror, membership, config.member, state.pod_uid),
        store_version=StoreVersion(store, mirror),
    )


def launcher_parts(
    config: Config,
    run_dir: RunDir,
    state: State,
    store: Store,
    job: JobParts,
    random: Random,
    *,
    ready: Callable[[], bool],
) -> LauncherParts:
    """Make the launcher's parts. ``ready``: whether a launcher may start."""
    registrar = job.registrar
    hosts = HostDelivery(
        run_dir,
        job.mirror,
        job.membership,
        state.held.generation if state.held else 0,
        monotonic,
        lambda: registrar.held.generation if registrar.held else None,
        nudges=config.role == "launcher",
    )
    endpoint = Endpoint(
        registrar=registrar,
        membership=job.membership,
        mirror=job.mirror,
        store=store,
        port=config.c10d_port or None,
        unix_path=str(run_dir.c10d_socket),
        first_call_s=config.first_call_s,
        last_call_s=config.last_call_s,
        clock=monotonic,
        random=random,
        kept=run_dir,
    )
    drains = Drains(
        run_dir,
        store,
        job.mirror,
        job.membership,
        registrar,
        endpoint,
        grace_s=config.grace_s,
        below_min=config.below_min,
        random=random,
    )
    policy = Policy(
        config.job,
        config.min_nodes,
        config.max_nodes,
        config.c10d_port or config.relay_port,
        relayed=not config.c10d_port,
    )
    lookout = Lookout(
        run_dir.path,
        store,
        job.mirror,
        job.membership,
        registrar,
        endpoint,
        policy,
        ready=ready,
        clock=monotonic,
    )
    return LauncherParts(hosts, endpoint, drains, lookout)


def identity_of(config: Config, pod_uid: str) -> Identity:
    """What the configuration says this member is."""
    return Identity(
        member=config.member,
        pod_uid=pod_uid,
        address=config.address,
        node=config.node,
        role=config.role,
        slots=config.slots if config.role == "worker" else 0,
        min_workers=config.min_nodes,
        max_workers=config.max_nodes,
        job_uid=config.job_uid,
        index=config.index,
    )
