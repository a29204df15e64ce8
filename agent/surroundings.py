# SPDX-License-Identifier: Apache-2.0
"""The dependencies of a sidecar's parts: no part takes a clock, randomness or a socket by itself.

The product hands them the real ones, the simulation and the tests theirs; the parts, and how they
know of each other (``agent.parts``), are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from agent.config.sidecar import Config
from agent.rundir.files import RunDir
from agent.sweeper import PAUSE_S
from agent.tunnel.identity import TunnelIdentity
from launcher_shim.rundir import layout
from rdzv.keys import JobKeys
from rdzv.members.registration import Identity
from rdzv.records.quarantine import TERMS, Terms
from rdzv.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The dependencies of every part of one sidecar."""

    store: Store
    """The client of the store that all of its calls go through."""

    clock: Callable[[], float]
    """Seconds, monotonic; of this process alone."""

    boot_clock: Callable[[], float]
    """Seconds since the machine started (``agent.boot_clock``): deadlines that outlive the process
    or that another container reads are kept on it."""

    random: Random
    """For lease ids, and to keep sidecars from doing the same at the same moment."""

    store_address: str = "the given address"
    """Where the store is, for sentences about one that does not answer."""

    version: str = ""
    """The program's, for people who look at the member; empty where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """Where one sidecar listens for the containers beside it; by default nowhere."""

    c10d_port: int | None = None
    """Loopback port of the rendezvous. 0 chooses one; None: torchrun comes by the relay alone."""

    c10d_path: str | None = None
    """Unix socket of the rendezvous, for the relay of ``muster-run``."""

    notice_path: Path | None = None
    """Unix socket that takes notices that the pod ends."""

    tunnel: TunnelIdentity | None = None
    """The key of this end of the tunnel; None: the pod has none."""

    tunnel_path: Path | None = None
    """Unix socket that takes a launcher's commands for other pods."""

    exec_path: Path | None = None
    """Unix socket at which the training container takes commands; here nothing listens."""

    shards_path: Path | None = None
    """Unix socket where ranks ask for shards."""

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, tunnel: TunnelIdentity | None = None) -> Sockets:
        """Those that a configuration asks for; ``tunnel`` is the key if there is to be one."""
        return cls(
            c10d_port=config.c10d_port or None,
            c10d_path=str(run_dir.c10d_socket),
            notice_path=run_dir.path / layout.NOTICE_SOCKET,
            tunnel=tunnel,
            tunnel_path=run_dir.path / layout.TUNNEL_SOCKET,
            exec_path=run_dir.path / layout.EXEC_SOCKET,
            shards_path=run_dir.path / layout.SHARDS_SOCKET,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """As much of one member's configuration as its parts go by.

    The defaults are those of ``agent.config.sidecar``, which says what each is for.
    """

    keys: JobKeys
    """The job, in the store."""

    identity: Identity
    """What the member registers as; min and max of the job are in it."""

    lease_ttl_s: float = 10.0
    """Whole seconds without a renewal until the member is lost to the others."""

    start_timeout_s: float = 60.0
    """Seconds that a fresh pod waits for its first read of the store."""

    first_call_s: float = 30.0
    """Seconds that a round waits for members whose torchrun has never connected."""

    last_call_s: float = 2.0
    """Seconds that a round which has min waits for nodes that may still come."""

    grace_s: float = 30.0
    """Seconds from a notice to the pod's end, where the notice does not say."""

    below_min: Literal["hold", "commit"] = "hold"
    """What a drain does that leaves fewer than min."""

    launcher_port: int = 29400
    """Loopback port at which the launcher is to look for the rendezvous."""

    relayed: bool = False
    """Whether that port is the relay's, in the training container."""

    quarantine: Terms = TERMS
    """When a member whose launcher keeps failing is let into no round, and for how long."""

    sweep_pause_s: float = PAUSE_S
    """Seconds between two sweeps of what gone pods have left in the store."""

    @classmethod
    def of(cls, config: Config, pod_uid: str, version: str = "", pin: str = "") -> MemberSettings:
        """Those of one configuration; ``pod_uid`` is what the pod goes by, given or not.

        ``pin`` is that of its key for the tunnel; empty: it has none.
        """
        return cls(
            keys=JobKeys(config.namespace, config.job),
            identity=identity_of(config, pod_uid, version, pin),
            lease_ttl_s=config.lease_ttl_s,
            start_timeout_s=config.start_timeout_s,
            first_call_s=config.first_call_s,
            last_call_s=config.last_call_s,
            grace_s=config.grace_s,
            below_min=config.below_min,
            quarantine=replace(TERMS, steps=config.restart_steps),
            launcher_port=config.c10d_port or config.relay_port,
            relayed=not config.c10d_port,
        )


def identity_of(config: Config, pod_uid: str, version: str, pin: str) -> Identity:
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
        version=version,
        allowed_sizes=config.sizes,
        unit=config.unit,
        gather_s=config.gather_s,
        topology=config.topology,
        tunnel_port=config.tunnel_port,
        pin=pin,
    )
