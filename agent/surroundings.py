# SPDX-License-Identifier: Apache-2.0
"""The dependencies of a sidecar's parts: no part takes a clock, randomness or a socket by itself.

The product passes the real ones, the simulation and the tests their own; the parts, and how they
know of each other (``agent.parts``), are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Literal

from agent.config import Config
from agent.neighbour import Dial
from agent.rundir.files import RunDir
from agent.tunnel.identity import TunnelIdentity
from agent.upkeep import SWEEP_PAUSE_S
from launcher_shim.rundir import layout
from rdzv.dataclass import dataclass
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
    """Seconds since the machine started (``agent.process``): deadlines that outlive the process
    or that another container reads are kept on it."""

    random: Random
    """Source of lease ids, and of the jitter that keeps sidecars from acting at the same moment."""

    store_address: str = "the given address"
    """The store's address, for messages about one that does not answer."""

    version: str = ""
    """The program's version, for people who look at the member; empty if it is not known."""

    dial: Dial | None = None
    """Opens an idle connection to another sidecar; None: this one watches no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """The sockets of one sidecar for the containers beside it; by default none."""

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
    """Unix socket at which the training container takes commands; the sidecar only connects to
    it."""

    shards_path: Path | None = None
    """Unix socket where ranks ask for shards."""

    @classmethod
    def of(cls, config: Config, run_dir: RunDir, tunnel: TunnelIdentity | None = None) -> Sockets:
        """Return the sockets of a configuration; ``tunnel`` is the key if there is a tunnel."""
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
    """The part of a configuration that one member's parts need.

    The defaults are those of ``agent.config``, which says what each is for.
    """

    keys: JobKeys
    """Names of the job's keys in the store."""

    identity: Identity
    """The identity that the member registers; the policy of the job is in it."""

    lease_ttl_s: float = 10.0
    """Whole seconds without a renewal until the others count the member as lost."""

    start_timeout_s: float = 60.0
    """Seconds that a fresh pod waits for its first read of the store."""

    first_call_s: float = 30.0
    """Longest wait of a round for members whose torchrun has never connected, in seconds."""

    last_call_s: float = 2.0
    """Longest wait of a round that has min for nodes that may still come, in seconds."""

    grace_s: float = 30.0
    """Seconds from a notice to the pod's end, if the notice does not say."""

    below_min: Literal["hold", "commit"] = "hold"
    """The policy for a drain that leaves fewer than min."""

    on_cut: Literal["train", "hold"] = "train"
    """The policy for ranks whose pod has had no lease for ``ON_CUT_S``."""

    stuck_after_s: float = 30.0
    """Shortest time without a step after which ranks are asked for their stacks, in seconds."""

    when_stuck: Literal["tell", "reform"] = "tell"
    """The policy for a rank that keeps its world from training."""

    launcher_port: int = 29400
    """Loopback port at which the launcher should find the rendezvous."""

    relayed: bool = False
    """Whether that port is the relay's, in the training container."""

    quarantine: Terms = TERMS
    """Terms on which a member whose launcher keeps failing is kept out of rounds, and for how
    long."""

    sweep_pause_s: float = SWEEP_PAUSE_S
    """Seconds between two sweeps of what gone pods have left in the store."""

    @classmethod
    def of(cls, config: Config, pod_uid: str, version: str = "", pin: str = "") -> MemberSettings:
        """Return the settings of one configuration; ``pod_uid`` is the pod's, given or generated.

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
            on_cut=config.on_cut,
            stuck_after_s=config.stuck_after_s,
            when_stuck=config.when_stuck,
            quarantine=replace(TERMS, steps=config.restart_steps),
            launcher_port=config.c10d_port or config.relay_port,
            relayed=not config.c10d_port,
        )


def identity_of(config: Config, pod_uid: str, version: str, pin: str) -> Identity:
    """Build the identity that the configuration gives this member."""
    return Identity(
        member=config.member,
        pod_uid=pod_uid,
        address=config.address,
        node=config.node,
        role=config.role,
        slots=config.slots if config.role == "worker" else 0,
        policy=config.policy,
        job_uid=config.job_uid,
        index=config.index,
        version=version,
        topology=config.topology,
        tunnel_port=config.tunnel_port,
        pin=pin,
        owner=config.owner,
        health_port=config.http_port,
    )
