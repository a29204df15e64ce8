# SPDX-License-Identifier: Apache-2.0
"""The sight of Muster in a cluster, and the findings about it with their remedies: pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from console.doctor.job import Finding
from rdzv.sentences import counted

OLDEST = (1, 29)
"""The first version of Kubernetes with native sidecars."""
SOON = timedelta(days=14)
"""Validity left below which to warn: the controller should have renewed a month before the end."""
SKEW_S = 2.0
"""Differences between clocks up to this are not reported."""

LEASE_S = 40.0
"""Kubernetes counts a node as away if it has not renewed its lease for this long, in seconds."""
NAMED_MOST = 5


@dataclass(frozen=True, slots=True)
class Hook:
    """A webhook that injects sidecars: its service, and whether the API server can verify it."""

    configuration: str
    namespace: str
    service: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class ChartPart:
    """The controller or etcd: its wanted and ready pods, their image, and the chart."""

    name: str
    wanted: int
    ready: int
    image: str
    chart: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of creating a labelled pod in a dry run.

    ``error``: the reason why there is no answer. ``server_time``: the pod's creation, by the API
    server's clock; ``asked``: the start of the request, by this machine's.
    """

    injected: bool = False
    error: str = ""
    server_time: datetime | None = None
    asked: datetime | None = None


@dataclass(frozen=True, slots=True)
class AskingPod:
    """A pod that asks for a sidecar, or whose namespace does.

    ``sidecar``: the image of its sidecar; None if it has none. ``missing``: a Secret that it needs
    and that does not exist. ``immutable``: the controller's Secret that it uses, if a user has made
    that immutable.
    """

    namespace: str
    name: str
    phase: str
    sidecar: str | None
    missing: str = ""
    immutable: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything that was seen of a cluster at ``now``, by the clock of this machine.

    ``leaders``: the members of etcd that lead. ``certificates``: the end of validity of each, by
    Secret and key. ``secrets_left``: the number of Secrets that pods name but that were not read,
    as there are too many. ``renewed``: the last renewal of each node's lease, by that node's clock.
    ``unread``: the reason why something could not be read, by its check.
    """

    now: datetime
    server_version: str
    hooks: tuple[Hook, ...] = ()
    controllers: tuple[ChartPart, ...] = ()
    stores: tuple[ChartPart, ...] = ()
    leaders: tuple[str, ...] = ()
    certificates: Mapping[str, datetime] | None = None
    probe: Probe | None = None
    pods: tuple[AskingPod, ...] = ()
    secrets_left: int = 0
    renewed: Mapping[str, datetime] | None = None
    unread: Mapping[str, str] | None = None


def findings_of(seen: Cluster) -> list[Finding]:
    """Return the findings about a cluster, in the order of ``docs/operations.md``."""
    return [
        *_version(seen.server_version),
        *_chart(seen),
        *_webhook(seen),
        *_certificates(seen),
        *(finding for one in seen.stores for finding in _store(one)),
        *_leaders(seen),
        *_sidecars(seen.pods),
        *_without(seen.pods),
        *_access(seen.pods, seen.secrets_left),
        *_clocks(seen),
        *(
            Finding(what, "note", f"not checked: {why}", "get the right to read it")
            for what, why in (seen.unread or {}).items()
            if what != "webhook"
        ),
    ]


def _version(text: str) -> Iterator[Finding]:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    if found is None:
        yield Finding("version", "note", f"the API server calls itself {text!r}")
    elif (int(found[1]), int(found[2])) < OLDEST:
        yield Finding(
            "version",
            "fault",
            f"Kubernetes {text} knows no native sidecars: injected pods never start their training",
            "use 1.29, or later",
        )
    else:
        yield Finding("version", "ok", f"Kubernetes {text}")


def _chart(seen: Cluster) -> Iterator[Finding]:
    if why := (seen.unread or {}).get("webhook"):
        yield Finding(
            "chart",
            "warning",
            f"not checked, nor the webhook, the controller, certificates and etcd: {why}",
            "get the right to list mutatingwebhookconfigurations, or have a cluster admin run this",
        )
    elif not seen.hooks:
        yield Finding(
            "chart",
            "fault",
            "no webhook gives labelled pods their sidecar",
            "install the chart (docs/controller.md), or go on with muster inject",
        )
    configurations = sorted({hook.configuration for hook in seen.hooks})
    if len(configurations) > 1:
        yield Finding(
            "chart",
            "warning",
            f"{len(configurations)} charts inject, whichever comes first: "
            + ", ".join(configurations),
            "keep one, or give each namespaces of its own",
        )
    for one in seen.controllers:
        what = f"{one.name}: {one.ready} of {counted(one.wanted, 'replica')} ready,"
        told = f"{what} {one.image}, {one.chart}"
        if one.ready == 0:
            yield Finding(
                "controller",
                "fault",
                f"{told}: pods start without Muster",
                f"kubectl describe the pods of {one.name}, and read their logs",
            )
        elif one.ready < one.wanted:
            yield Finding("controller", "warning", told, f"kubectl describe the pods of {one.name}")
        else:
            yield Finding("controller", "ok", told)


def _webhook(seen: Cluster) -> Iterator[Finding]:
    for hook in seen.hooks:
        if not hook.trusted:
            yield Finding(
                "webhook",
                "fault",
                f"{hook.configuration} has no caBundle: the API server cannot verify the webhook,"
                " and skips it",
                "see the log of the controller, which writes it: it needs update on this object",
            )
            return
    probe = seen.probe
    if probe is None or not seen.hooks:
        return
    if probe.error:
        yield Finding(
            "webhook",
            "warning",
            f"a labelled pod could not be tried: {probe.error}",
            "get the right to create pods there, which a dry run needs, too",
        )
    elif probe.injected:
        yield Finding("webhook", "ok", "a labelled pod, made in a dry run, gets its sidecar")
    else:
        yield Finding(
            "webhook",
            "fault",
            "a labelled pod, made in a dry run, gets no sidecar: the API server does not reach the"
            " webhook, or its answer is late",
            "see that the controller's pods are ready, and that the API server reaches them at port"
            " 9443 (firewalls of hosted clusters, NetworkPolicies)",
        )


def _certificates(seen: Cluster) -> Iterator[Finding]:
    for name, ends in sorted((seen.certificates or {}).items()):
        told = f"{name} ends on {ends:%Y-%m-%d %H:%M} UTC"
        if ends <= seen.now:
            yield Finding(
                "certificate",
                "fault",
                f"{told}, which is over",
                "restart the controller, which renews its own; for etcd's, renew the Secret that"
                " etcd.tls names and restart its members one by one",
            )
        elif ends - seen.now < SOON:
            yield Finding(
                "certificate",
                "warning",
                told,
                "see the log of the controller, which should have renewed its own by now; renew"
                " etcd's",
            )
        else:
            yield Finding("certificate", "ok", told)


def _store(store: ChartPart) -> Iterator[Finding]:
    told = f"{store.name}: {store.ready} of {counted(store.wanted, 'member')} ready, {store.image}"
    if store.ready == store.wanted > 0:
        yield Finding("etcd", "ok", told)
        return
    level = "warning" if store.ready > store.wanted // 2 else "fault"
    without = "" if level == "warning" else ": no write is taken, and no world can change"
    yield Finding(
        "etcd",
        level,  # type: ignore[arg-type]
        f"{told}{without}",
        f"kubectl describe the pods of {store.name}; muster doctor --job JOB asks the store itself",
    )


def _leaders(seen: Cluster) -> Iterator[Finding]:
    if len(seen.leaders) > max(len(seen.stores), 1):
        yield Finding(
            "stores",
            "fault",
            f"{len(seen.leaders)} members of etcd lead, so they belong to different stores:"
            f" {', '.join(seen.leaders)}; pods of one job may see different ones",
            "undo the change of etcd.replicas (helm rollback); see docs/etcd-members.md",
        )


def _sidecars(pods: Sequence[AskingPod]) -> Iterator[Finding]:
    images = Counter(pod.sidecar for pod in pods if pod.sidecar is not None)
    if not images:
        return
    told = ", ".join(
        f"{counted(count, 'pod')} with {image}" for image, count in sorted(images.items())
    )
    if len(images) == 1:
        yield Finding("sidecars", "ok", told)
    else:
        yield Finding(
            "sidecars",
            "note",
            told,
            "docs/upgrading.md says which versions run in one job, and how to get to one",
        )


def _without(pods: Sequence[AskingPod]) -> Iterator[Finding]:
    missed = [pod for pod in pods if pod.sidecar is None]
    if not missed:
        return
    names = _named(missed)
    yield Finding(
        "injection",
        "warning",
        f"{counted(len(missed), 'pod')} with the label {'has' if len(missed) == 1 else 'have'} no"
        f" sidecar, and no part in the training of the others: {names}",
        "the webhook was away, or refused them (kubectl get events says why): once it answers,"
        " delete them, so that they are made again: "
        + "; ".join(
            f"kubectl delete pod -n {pod.namespace} {pod.name}" for pod in missed[:NAMED_MOST]
        ),
    )


def _access(pods: Sequence[AskingPod], secrets_left: int) -> Iterator[Finding]:
    waiting = [pod for pod in pods if pod.missing]
    for missing in sorted({(pod.namespace, pod.missing) for pod in waiting}):
        of_it = [pod for pod in waiting if (pod.namespace, pod.missing) == missing]
        yield Finding(
            "access",
            "fault",
            f"namespace {missing[0]} has no Secret {missing[1]}, without which"
            f" {counted(len(of_it), 'pod')} cannot start: {_named(of_it)}",
            "make it, with what lets the job into the store: docs/security.md#set-up",
        )
    for namespace, name in sorted({(pod.namespace, pod.immutable) for pod in pods}):
        if name:
            yield Finding(
                "access",
                "warning",
                f"the Secret {name} of namespace {namespace} is immutable: its certificate cannot"
                " be replaced, and ends",
                f"scale the job to 0, kubectl delete secret -n {namespace} {name}, and scale it"
                " back: the controller makes another, but a kubelet goes on giving the former one"
                " to pods of its node while one of them has it. Without scaling, delete the Secret"
                " and then, on each node, all pods of the job before the first comes back there",
            )
    if secrets_left:
        yield Finding(
            "access",
            "note",
            f"{counted(secrets_left, 'Secret')} that pods name more than are looked at; those that"
            " pending pods wait for come first",
            "kubectl get pods -A --field-selector=status.phase=Pending shows who still waits",
        )


def _clocks(seen: Cluster) -> Iterator[Finding]:
    server = seen.probe.server_time if seen.probe else None
    if seen.probe is not None and server is not None:
        # The server's time has whole seconds, and other webhooks may have delayed it after
        # the request.
        ahead_s = (server - seen.now).total_seconds()
        behind_s = ((seen.probe.asked or seen.now) - server).total_seconds()
        if ahead_s > SKEW_S:
            yield _skewed("the API server", ahead_s)
        elif behind_s > SKEW_S + 1:
            yield _skewed("the API server", -behind_s)
    for node, renewed in sorted((seen.renewed or {}).items()):
        ahead_s = (renewed - seen.now).total_seconds()
        if ahead_s > SKEW_S:
            yield _skewed(f"node {node}", ahead_s)
        elif ahead_s < -LEASE_S:
            yield Finding(
                "clocks",
                "warning",
                f"node {node} renewed its lease {-ahead_s:.0f} s ago by its clock: it is away, or"
                " its clock is behind",
                f"kubectl get node {node}; if it is ready, set its clock (chrony, NTP)",
            )
    if seen.renewed and all(
        -LEASE_S <= (at - seen.now).total_seconds() <= SKEW_S for at in seen.renewed.values()
    ):
        yield Finding("clocks", "ok", f"{counted(len(seen.renewed), 'node')}: no clock is ahead")


def _skewed(whose: str, ahead_s: float) -> Finding:
    where = "ahead of" if ahead_s > 0 else "behind"
    return Finding(
        "clocks",
        "warning",
        f"the clock of {whose} is {abs(ahead_s):.0f} s {where} this machine's: certificates and"
        " logs go by it, rounds and drains do not",
        "set both by NTP",
    )


def _named(pods: Sequence[AskingPod]) -> str:
    shown = ", ".join(f"{pod.namespace}/{pod.name}" for pod in pods[:NAMED_MOST])
    more = len(pods) - NAMED_MOST
    return f"{shown} and {more} more" if more > 0 else shown
