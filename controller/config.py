# SPDX-License-Identifier: Apache-2.0
"""Configuration of ``muster controller``."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from agent.job_config import AccessConfig
from controller.node_signs import DEFAULT_CONDITIONS, DEFAULT_TAINTS, ConditionRule, TaintRule
from injection.kinds import job_label
from injection.settings import TABLE, told
from rdzv import settings as texts
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.settings import Setting, field

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
T = TypeVar("T")


def _each(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return the parser of a list with commas."""
    return lambda text: tuple(parse(one.strip()) for one in text.split(",") if one.strip())


def _row(
    flag: str,
    parse: Callable[[str], Any],
    default: str | None,
    metavar: str,
    why: str,
    otherwise: str | None = None,
) -> Any:
    """Return the field of one setting."""
    return field(Setting(flag, parse, default, metavar, why, otherwise=otherwise))


def _switch(flag: str, default: Literal["on", "off"], why: str) -> Any:
    """Return the field of a function that is on or off."""
    return _row(flag, texts.one_of("on", "off"), default, "on|off", why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig(AccessConfig):
    """Configuration of the controller: its port, its objects in the cluster, and its functions."""

    own_namespace: str = _row(
        "--own-namespace",
        texts.name,
        None,
        "NAME",
        "Namespace that the controller runs in.",
    )
    service: str = _row(
        "--service",
        texts.name,
        "muster-controller",
        "NAME",
        "Service of the webhook, for which its certificate is issued.",
    )
    certificate_secret: str = _row(
        "--certificate-secret",
        texts.name,
        "muster-controller",
        "NAME",
        "Existing Secret in the controller's namespace for the webhook's certificate.",
    )
    webhook: str = _row(
        "--webhook",
        texts.name,
        "muster-controller",
        "NAME",
        "MutatingWebhookConfiguration whose caBundle the controller writes.",
    )
    listen: str = _row(
        "--listen", texts.free_text, "0.0.0.0", "ADDRESS", "Address that it listens on."
    )
    port: int = _row("--port", texts.real_port, "9443", "PORT", "Port of the webhook, over TLS.")
    api_server_cidrs: tuple[Network, ...] = _row(
        "--api-server-cidrs",
        _each(ipaddress.ip_network),
        "",
        "CIDR,…",
        "Addresses from which the API server calls the webhook; other callers are refused."
        " Empty: any.",
    )
    api_server_ca: str = _row(
        "--api-server-ca",
        texts.file,
        "",
        "FILE",
        "Authority of the API server's client certificate for webhooks; callers without one"
        " are refused. Empty: none is asked for.",
    )
    follow_jobs: Literal["on", "off"] = _switch(
        "--follow-jobs",
        "off",
        "Whether to follow the jobs in the store: Events, desired, annotations, notices and the"
        " page need it.",
    )
    lease: str = _row(
        "--lease",
        texts.name,
        "muster-controller",
        "NAME",
        "Existing Lease in the controller's namespace for leader election. Only the leader"
        " writes Events, desired and annotations, and requests drains.",
    )
    events: Literal["on", "off"] = _switch(
        "--events",
        "on",
        "Whether to publish Kubernetes Events about jobs, and about pods without a sidecar, on"
        " the pods and their owners.",
    )
    desired: Literal["on", "off"] = _switch(
        "--desired",
        "on",
        "Whether to set a job's desired number of nodes to the replicas of its owner.",
    )
    annotations: Literal["on", "off"] = _switch(
        "--annotations",
        "off",
        "Whether to annotate the owner of a job's pods with the last commit and the numbers of"
        " members.",
    )
    evict_uninjected: Literal["on", "off"] = _switch(
        "--evict-uninjected",
        "off",
        "Whether the leader evicts pods that could have a sidecar and have none, slowly, and"
        " only those of a ReplicaSet or StatefulSet, which makes others; needs --events.",
    )
    job_metrics: Literal["on", "off"] = _switch(
        "--job-metrics",
        "off",
        "Whether /metrics names each job, its namespace and the time of its saves: anybody who"
        " reaches the webhook's port may read it.",
    )
    notices: Literal["on", "off"] = _switch(
        "--notices",
        "on",
        "Whether to request a drain of pods as soon as their node or their own conditions show"
        " that they will be ended.",
    )
    notice_taints: tuple[TaintRule, ...] = _row(
        "--notice-taints",
        _each(TaintRule.of),
        ",".join(DEFAULT_TAINTS),
        "TAINT,…",
        "Taints of a node for which its pods are drained, as KEY[=VALUE][:EFFECT].",
        otherwise="those of docs/controller.md",
    )
    notice_conditions: tuple[ConditionRule, ...] = _row(
        "--notice-conditions",
        _each(ConditionRule.of),
        ",".join(DEFAULT_CONDITIONS),
        "CONDITION,…",
        "Conditions of a node for which its pods are drained, as TYPE[=STATUS].",
        otherwise="those of docs/controller.md",
    )
    notice_cordon: Literal["on", "off"] = _switch(
        "--notice-cordon",
        "on",
        "Whether to drain the pods of a cordoned node, too, as long as min others remain.",
    )
    notice_deadline_s: float = _row(
        "--notice-deadline",
        texts.duration_s(10, 86_400),
        "10m",
        "TIME",
        "Time until the deadline of such a drain; the kubelet's own notice may shorten it.",
    )
    store_access: str = _row(
        "--store-access",
        texts.free_text,
        "",
        "NAME",
        "Secret in the controller's namespace with its access to the store of --default"
        " etcd-endpoints; without it, jobs get no access of their own.",
    )
    store_members: str = _row(
        "--store-members",
        texts.free_text,
        "",
        "NAME",
        "Secret with the server certificate of the chart's own etcd, whose authentication the"
        " controller then enables; empty: another store.",
    )
    store_hosts: str = _row(
        "--store-hosts",
        texts.free_text,
        "",
        "HOST,…",
        "Host names for which the controller issues that certificate; empty: it is issued"
        " elsewhere.",
    )
    give_access: Literal["on", "off"] = _switch(
        "--give-access",
        "on",
        "Whether to create a Secret with a store user for each job; needs --store-access.",
    )
    access_keep_s: float = _row(
        "--access-keep",
        texts.duration_s(60, 366 * 86_400),
        "24h",
        "TIME",
        "Time for which a job's access is kept after its last pod has gone.",
    )
    access_rotate_s: float = _row(
        "--access-rotate",
        texts.duration_s(3600, 366 * 86_400),
        "720h",
        "TIME",
        "Age at which a job's certificate is renewed.",
    )
    backups: tuple[str, ...] = _row(
        "--backups",
        _each(texts.name),
        "",
        "NAME,…",
        "CronJobs in the controller's namespace that back etcd up; the time of their newest"
        " success is a metric. Empty: there are none.",
    )
    page_port: int = _row(
        "--page-port",
        texts.port,
        "9444",
        "PORT",
        "Port of the page of all jobs, on the loopback address only; 0: no page.",
    )
    log_format: Literal["json", "plain"] = _row(
        "--log-format",
        texts.one_of("json", "plain"),
        "json",
        "json|plain",
        "Format of the log lines.",
    )

    @property
    def release(self) -> str:
        """The name of this release of the chart, that of no other one in the cluster."""
        return job_label(f"{self.own_namespace}.{self.service}")

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults between settings; the store's are checked only if they are needed.

        They are needed to follow jobs, unless the controller takes its access from a Secret.
        """
        kept = values.get("store_access") or values.get("store_members")
        if values.get("follow_jobs") == "on" and not kept:
            yield from AccessConfig.faults(values)


def defaults(given: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE defaults of settings, which an annotation ``muster.dev/NAME`` overrides.

    Returns the equivalent variables of ``muster inject``; raises ``ConfigError``.
    """
    names = {setting.flag.removeprefix("--"): setting for setting in TABLE.values()}
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in names:
            raise ConfigError(
                f"--default: {text!r} is no NAME=VALUE with one of {', '.join(sorted(names))}"
            )
        found[names[name].variable] = value
    told({}, {}, found)  # raise for a bad value now, not with each pod
    return found
