# SPDX-License-Identifier: Apache-2.0
"""The settings of the sidecar; those that commands have, too, are in ``agent/job_config.py``."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from agent.job_config import JobConfig, StoreConfig
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.pod.ranks import DEFAULT_STEPS, MAX_STEPS
from rdzv import settings as texts
from rdzv.dataclass import dataclass
from rdzv.records.policy import JobPolicy
from rdzv.sentences import named
from rdzv.settings import Setting, field, part

DELIVERED_VARIABLES = frozenset({"MUSTER_RUN_DIR", "MUSTER_MEMBER"})
"""Variables that a sidecar hands to the training container."""


def _own_address(environ: Mapping[str, str]) -> str | None:
    # In a pod, others must be able to reach the address, and no guess is safe.
    return None if "KUBERNETES_SERVICE_HOST" in environ else "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(JobConfig):
    """All settings of ``muster agent``."""

    member: str = field(
        Setting(
            "--member",
            texts.name,
            lambda environ: socket.gethostname(),
            "NAME",
            "Name of this member: the pod's name.",
            otherwise="the host's name",
        )
    )
    pod_uid: str = field(
        Setting(
            "--pod-uid",
            texts.free_text,
            "",
            "UID",
            "UID of this pod; without it, one that is kept in the run directory.",
        )
    )
    job_uid: str = field(
        Setting(
            "--job-uid",
            texts.free_text,
            "",
            "UID",
            "UID of the job's object: a job created again under its name is a new generation.",
        )
    )
    index: int = field(
        Setting(
            "--index",
            texts.index,
            "",
            "N",
            "Number that the pod's controller gave it: scaling down takes the highest first.",
        )
    )
    address: str = field(
        Setting(
            "--address",
            texts.address,
            _own_address,
            "IP",
            "Address that other nodes reach this one at, which also serves health and metrics;"
            " in a pod give status.podIP.",
            otherwise="127.0.0.1 outside Kubernetes",
        )
    )
    node: str = field(
        Setting(
            "--node",
            texts.free_text,
            "",
            "NAME",
            "Name of the machine: for people to read, and its pods have ranks that follow one"
            " another.",
        )
    )
    topology: str = field(
        Setting(
            "--topology",
            texts.topology,
            "",
            "PATH",
            "Where the machine is, the most general part first, as in block/rack: neighbours have"
            " ranks that follow one another. A part that is unknown may be empty.",
        )
    )
    role: Literal["worker", "launcher"] = field(
        Setting(
            "--role",
            texts.one_of("worker", "launcher"),
            "worker",
            "worker|launcher",
            "A launcher pod has no slots.",
        )
    )
    owner: str = field(
        Setting(
            "--owner",
            texts.free_text,
            "",
            "KIND",
            "Kind of the object that the job is named after: a worker of an object of another kind"
            " and the same name is refused. Empty if somebody has named the job.",
        )
    )
    slots: int = field(
        Setting("--slots", texts.count(1, 1024), "1", "N", "Worker processes in this pod.")
    )
    policy: JobPolicy = part(JobPolicy)
    run_dir: str = field(
        Setting(
            "--run-dir",
            texts.directory,
            "/var/run/muster",
            "DIR",
            "Directory shared with the training container, as long-lived as the pod.",
        )
    )
    c10d_port: int = field(
        Setting(
            "--c10d-port",
            texts.port,
            "29400",
            "PORT",
            "Loopback port of torchrun's rendezvous; 0: only the socket in the run directory, for"
            " muster-run, which then serves the port in the training container.",
        )
    )
    relay_port: int = field(
        Setting(
            "--relay-port",
            texts.real_port,
            "29400",
            "PORT",
            "Loopback port that muster-run serves where --c10d-port is 0.",
        )
    )
    http_port: int = field(
        Setting(
            "--http-port",
            texts.real_port,
            "9400",
            "PORT",
            "Port of /healthz, /readyz and /metrics, on the address of this member alone.",
        )
    )
    tunnel_port: int = field(
        Setting(
            "--tunnel-port",
            texts.port,
            "0",
            "PORT",
            f"Port, on the address of this member, at which the sidecar of a {CENTRAL.library}"
            " worker takes its launcher's commands, by mutual TLS; set it in the launcher's pod"
            " too. 9401 is what muster inject gives; 0: no tunnel, as for torchrun.",
        )
    )
    lease_ttl_s: int = field(
        Setting(
            "--lease-ttl",
            texts.whole_duration_s(2, 600),
            "10s",
            "TIME",
            "The others count a member as lost if it does not renew its lease for this long;"
            " rounded up to whole seconds. Shorter notices a dead node sooner; below 10s, an"
            " election of the store can cost members their lease.",
        )
    )
    first_call_s: float = field(
        Setting(
            "--first-call",
            texts.duration_s(0, 3600),
            "30s",
            "TIME",
            "How long a round that has min but not max waits for a member whose torchrun has never"
            " connected; it does not wait if others ask for all places.",
        )
    )
    last_call_s: float = field(
        Setting(
            "--last-call",
            texts.duration_s(0, 600),
            "2s",
            "TIME",
            "How long a round waits for nodes that may still come, once it has min.",
        )
    )
    grace_s: float = field(
        Setting(
            "--grace-s",
            texts.duration_s(1, 86_400),
            "30s",
            "TIME",
            "The pod's terminationGracePeriodSeconds: how long there is from a notice to the end.",
        )
    )
    below_min: Literal["hold", "commit"] = field(
        Setting(
            "--below-min",
            texts.one_of("hold", "commit"),
            "hold",
            "hold|commit",
            "What a drain does that would leave fewer than min: hold waits for a replacement until"
            " the deadline, commit lets the pod go once all have saved.",
        )
    )
    on_cut: Literal["train", "hold"] = field(
        Setting(
            "--on-cut",
            texts.one_of("train", "hold"),
            "train",
            "train|hold",
            "What the ranks of a pod do once it has had no lease in the store for 60 s: train on,"
            " or wait at their next step boundary until it has one again. Without the store, pods"
            " that have it may form another world meanwhile, which goes on from the last commit.",
        )
    )
    stuck_after_s: float = field(
        Setting(
            "--stuck-after",
            texts.duration_s(1, 86_400),
            "30s",
            "TIME",
            "Ranks that make no step for this long, and for 10 times the usual one, are asked for"
            " their stacks; muster status then names the one that keeps the others waiting.",
        )
    )
    when_stuck: Literal["tell", "reform"] = field(
        Setting(
            "--when-stuck",
            texts.one_of("tell", "reform"),
            "tell",
            "tell|reform",
            "What happens to a rank that keeps its world from training: it is named, or after 30 s"
            " more its process is ended as well (SIGKILL), and the world forms again from the last"
            " save.",
        )
    )
    warm: Literal["0", "1"] = field(
        Setting(
            "--warm",
            texts.one_of("0", "1"),
            "0",
            "0|1",
            "1: workers are forks of a process that has imported torch, and need not import it in"
            " each new world.",
        )
    )
    restart_steps: int = field(
        Setting(
            "--restart-steps",
            texts.count(0, MAX_STEPS),
            str(DEFAULT_STEPS),
            "N",
            "A torchrun that ends by a failure after its ranks have made so many steps is started"
            " again by muster-run, and is no crash loop; 0: steps are not looked at.",
        )
    )
    start_timeout_s: float = field(
        Setting(
            "--start-timeout",
            texts.duration_s(1, 86_400),
            "60s",
            "TIME",
            "How long a first start waits for the store before it ends with status 69.",
        )
    )
    log_format: Literal["json", "plain"] = field(
        Setting(
            "--log-format",
            texts.one_of("json", "plain"),
            "json",
            "json|plain",
            "One JSON object a line, or text for people.",
        )
    )

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each fault between settings, and in the files that they name."""
        yield from StoreConfig.faults(values)
        yield from JobPolicy.faults(values)
        match values:
            case {"c10d_port": c10d, "http_port": http} if c10d == http:
                yield (
                    f"{named('--c10d-port')} and {named('--http-port')} are both"
                    f" {http}: give each its own"
                )
        match values:
            case {"tunnel_port": tunnel, "http_port": http} if tunnel == http:
                yield (
                    f"{named('--tunnel-port')} and {named('--http-port')} are both"
                    f" {http}: give each its own"
                )
