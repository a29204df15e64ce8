# SPDX-License-Identifier: Apache-2.0
"""What ``muster controller`` is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent.config import parsers as texts
from agent.config.sidecar import AccessConfig
from agent.config.table import Setting, field
from controller.taints import DEFAULT_TAINTS, TaintRule
from injection.settings import TABLE, told
from rdzv.errors import ConfigError


def _taints(text: str) -> tuple[TaintRule, ...]:
    return tuple(TaintRule.of(one.strip()) for one in text.split(",") if one.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig(AccessConfig):
    """Where it serves, which objects of the cluster are its own, and what it does besides."""

    own_namespace: str = field(
        Setting(
            "--own-namespace",
            texts.name,
            None,
            "NAME",
            "Namespace that the controller runs in.",
        )
    )
    service: str = field(
        Setting(
            "--service",
            texts.name,
            "muster-controller",
            "NAME",
            "Service by which the API server finds it: the name in its certificate.",
        )
    )
    certificate_secret: str = field(
        Setting(
            "--certificate-secret",
            texts.name,
            "muster-controller",
            "NAME",
            "Secret of its namespace that keeps the webhook's certificate; it has to be there.",
        )
    )
    webhook: str = field(
        Setting(
            "--webhook",
            texts.name,
            "muster-controller",
            "NAME",
            "MutatingWebhookConfiguration that is told which authority to trust.",
        )
    )
    listen: str = field(
        Setting("--listen", texts.free_text, "0.0.0.0", "ADDRESS", "Where it listens.")
    )
    port: int = field(
        Setting("--port", texts.real_port, "9443", "PORT", "Port of the webhook, over TLS.")
    )
    follow_jobs: Literal["on", "off"] = field(
        Setting(
            "--follow-jobs",
            texts.one_of("on", "off"),
            "off",
            "on|off",
            "Whether it follows the jobs in the store: what comes below needs that.",
        )
    )
    lease: str = field(
        Setting(
            "--lease",
            texts.name,
            "muster-controller",
            "NAME",
            "Lease of its namespace by which the replicas choose who tells and asks; it has to be"
            " there.",
        )
    )
    events: Literal["on", "off"] = field(
        Setting(
            "--events",
            texts.one_of("on", "off"),
            "on",
            "on|off",
            "Whether what happens to jobs is told as Events, at their pods and at what made them.",
        )
    )
    desired: Literal["on", "off"] = field(
        Setting(
            "--desired",
            texts.one_of("on", "off"),
            "on",
            "on|off",
            "Whether the replicas of a job's owner are the nodes that a new world waits for.",
        )
    )
    annotations: Literal["on", "off"] = field(
        Setting(
            "--annotations",
            texts.one_of("on", "off"),
            "off",
            "on|off",
            "Whether the owner of a job's pods is annotated with its last commit and its members.",
        )
    )
    notices: Literal["on", "off"] = field(
        Setting(
            "--notices",
            texts.one_of("on", "off"),
            "on",
            "on|off",
            "Whether pods are asked to drain when their node, or they, show that they have to go.",
        )
    )
    notice_taints: tuple[TaintRule, ...] = field(
        Setting(
            "--notice-taints",
            _taints,
            ",".join(DEFAULT_TAINTS),
            "TAINT,…",
            "Taints of a node that mean so, as KEY[=VALUE][:EFFECT].",
            otherwise="those of docs/controller.md",
        )
    )
    notice_cordon: Literal["on", "off"] = field(
        Setting(
            "--notice-cordon",
            texts.one_of("on", "off"),
            "on",
            "on|off",
            "Whether a cordoned node means so; never below min.",
        )
    )
    notice_deadline_s: float = field(
        Setting(
            "--notice-deadline",
            texts.duration_s(10, 86_400),
            "10m",
            "TIME",
            "Time that such a drain has, unless the kubelet's own notice ends it sooner.",
        )
    )
    store_access: str = field(
        Setting(
            "--store-access",
            texts.free_text,
            "",
            "NAME",
            "Secret of its namespace that lets it into the store of --default etcd-endpoints;"
            " without it, jobs get no access of their own.",
        )
    )
    store_members: str = field(
        Setting(
            "--store-members",
            texts.free_text,
            "",
            "NAME",
            "Secret with the certificate of the store's members: the chart's own store, whose"
            " authentication it switches on.",
        )
    )
    store_hosts: str = field(
        Setting(
            "--store-hosts",
            texts.free_text,
            "",
            "HOST,…",
            "Names for which it makes that certificate; without them somebody else does.",
        )
    )
    give_access: Literal["on", "off"] = field(
        Setting(
            "--give-access",
            texts.one_of("on", "off"),
            "on",
            "on|off",
            "Whether each job gets a Secret with a user of its own, where there is --store-access.",
        )
    )
    access_keep_s: float = field(
        Setting(
            "--access-keep",
            texts.duration_s(60, 366 * 86_400),
            "24h",
            "TIME",
            "For how long a job's access is kept after its last pod.",
        )
    )
    access_rotate_s: float = field(
        Setting(
            "--access-rotate",
            texts.duration_s(3600, 366 * 86_400),
            "720h",
            "TIME",
            "Age at which a job's certificate is replaced.",
        )
    )
    page_port: int = field(
        Setting(
            "--page-port",
            texts.port,
            "9444",
            "PORT",
            "Port of the page of all jobs, on the loopback address alone; 0: none.",
        )
    )
    log_format: Literal["json", "plain"] = field(
        Setting(
            "--log-format",
            texts.one_of("json", "plain"),
            "json",
            "json|plain",
            "How log lines look.",
        )
    )

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Say what is wrong between settings; without jobs to follow, the store is nobody's."""
        kept = values.get("store_access") or values.get("store_members")
        if values.get("follow_jobs") == "on" and not kept:
            yield from AccessConfig.faults(values)


def defaults(given: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE, of what counts where no annotation ``muster.dev/NAME`` says otherwise.

    Returns the variables of ``muster inject`` that say the same; raises ``ConfigError``.
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
    told({}, {}, found)  # what is wrong is said now, not with each pod
    return found
