# SPDX-License-Identifier: Apache-2.0
"""Remarks of an injection on a manifest, with their levels, and the obstacles to a sidecar.

Each is one sentence; that of an obstacle has the way around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from injection import facts, sidecar
from injection.annotations import Former
from injection.facts import RESOURCES, Asked
from injection.member_spec import Demand
from injection.settings import TABLE
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ConfigError

Level = Literal["note", "warning", "error"]


class Remark(str):
    """One sentence and its level.

    A note is worth knowing; a warning is about something that its user may not expect; with an
    error the manifest cannot do what it is for.
    """

    level: Level

    def __new__(cls, sentence: str, level: Level = "note") -> Remark:
        """Create a remark."""
        remark = super().__new__(cls, sentence)
        remark.level = level
        return remark

    def about(self, label: str) -> Remark:
        """Return the remark with the label of its object before it."""
        return Remark(f"{label}: {self}", self.level)

    def lowered(self) -> Remark:
        """Return the remark, an error as a warning, for a user who goes on in spite of it."""
        return Remark(self, "warning") if self.level == "error" else self


def warning(sentence: str) -> Remark:
    """Create a warning."""
    return Remark(sentence, "warning")


def refuse_conflicts(
    pod: Mapping[str, Any], path: str, container: Mapping[str, Any], want: Demand
) -> None:
    """Raise ``ConfigError`` if there are obstacles, with one line for each."""
    if faults := list(_obstacles(pod, path, container, want)):
        raise ConfigError("\n".join(faults))


def _obstacles(
    pod: Mapping[str, Any], path: str, container: Mapping[str, Any], want: Demand
) -> Iterator[str]:
    everyone = facts.containers(pod)
    if (found := _windows(pod)) is not None:
        yield (
            f"{path}.{found}: the sidecar and what it delivers are for Linux: inject into pods for"
            " Linux nodes alone"
        )
    if any(other.get("name") == sidecar.NAME for other in everyone):
        yield (
            f"{path} has a container {sidecar.NAME} that muster inject has not put there: remove or"
            " rename it"
        )
    for volume in facts.listed(pod, "volumes"):
        if volume.get("name") in sidecar.VOLUMES:
            yield (
                f"{path}.volumes has a volume {volume['name']} that muster inject has not put"
                " there: rename it"
            )
    name = container.get("name")
    for mount in facts.listed(container, "volumeMounts"):
        place = str(mount.get("mountPath", "")).rstrip("/")
        if f"{place}/".startswith(f"{sidecar.RUN_DIR}/"):
            yield (
                f"container {name} has a mount at {place}, where the run directory has to be:"
                " move it"
            )
    if want.http_port == want.relay_port:
        http, relay = TABLE["http_port"], TABLE["relay_port"]
        yield (
            f"{http.flag} ({http.variable}) and {relay.flag} ({relay.variable}) are both"
            f" {want.http_port}: give each its own"
        )
    tunnel_port = want.tunnel_port if want.role == "worker" else None
    if want.http_port == tunnel_port:
        http = TABLE["http_port"]
        yield (
            f"{http.flag} ({http.variable}) is {tunnel_port}, where the sidecar of a"
            f" {CENTRAL.library} worker takes its launcher's commands: choose another one"
        )
    for other, port in facts.ports(everyone):
        if port == tunnel_port:
            yield (
                f"container {other} has port {port}, where the sidecar takes the commands of"
                f" {CENTRAL.name}: give the container another one"
            )
        if port == want.http_port:
            yield (
                f"container {other} has port {port}, which the sidecar needs for its health: give"
                " the sidecar another one with --http-port"
            )
        # In the training container this is the port of its own rendezvous, from before Muster.
        if port == want.relay_port and other != container.get("name"):
            yield (
                f"container {other} has port {port}, which torchrun's rendezvous needs on the"
                " loopback: give it another one with --relay-port"
            )
    for variable in facts.listed(container, "env"):
        if variable.get("name") == "MUSTER_RUN_DIR" and variable.get("value") != sidecar.RUN_DIR:
            yield (
                f"container {name} sets MUSTER_RUN_DIR to {variable.get('value')!r}: remove it, it"
                f" is {sidecar.RUN_DIR}"
            )


def _windows(pod: Mapping[str, Any]) -> str | None:
    """Return what marks a pod as one for Windows; None if nothing does."""
    if (pod.get("os") or {}).get("name") == "windows":
        return "os.name is windows"
    for name, value in (pod.get("nodeSelector") or {}).items():
        if _for_windows({"key": name, "operator": "In", "values": [value]}):
            return f"nodeSelector asks for {name} {value}"
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in facts.listed(required, "nodeSelectorTerms"):
        for one in facts.listed(term or {}, "matchExpressions"):
            if _for_windows(one):
                return f"affinity.nodeAffinity asks for {one['key']} of Windows"
    return None


def _for_windows(asked: Mapping[str, Any]) -> bool:
    """Return whether a requirement on the labels of nodes leaves Windows nodes alone."""
    values = facts.listed(asked, "values")
    match asked.get("key"), asked.get("operator"):
        case (("kubernetes.io/os" | "beta.kubernetes.io/os"), "In"):
            return "windows" in values and "linux" not in values
        case (("kubernetes.io/os" | "beta.kubernetes.io/os"), "NotIn"):
            return "linux" in values
        case "node.kubernetes.io/windows-build", operator:
            return operator in ("In", "Exists")
    return False


def checked_resources(
    pod: Mapping[str, Any], path: str, former: Former, asked: Asked | None
) -> Mapping[str, Any]:
    """Return the sidecar's resources, which keep the pod's QoS class. Raises ``ConfigError``.

    If the pod itself has resources, its class follows from those. What a setting asks for wins over
    what a user has written into the sidecar.
    """
    everyone = facts.containers(pod)
    quality = facts.quality_of_service(everyone)
    of_the_pod = pod.get("resources") if facts.asks_as_a_whole(pod) else None
    wanted = None if asked else former.resources()
    if wanted is None and of_the_pod is not None:
        return {}
    if wanted is None:
        limited = facts.limits_cpu(everyone)
        return facts.resources_for(quality, cpu_is_limited=limited, asked=asked)
    where = f"{path}.initContainers[{sidecar.NAME}].resources"
    names = {str(name) for asked in wanted.values() if isinstance(asked, Mapping) for name in asked}
    if foreign := names - {*RESOURCES}:
        raise ConfigError(
            f"{where} asks for {', '.join(sorted(foreign))}, which the sidecar would take from the"
            " training: remove it there"
        )
    if of_the_pod is not None:
        # Kubernetes would set the missing request of the pod to the sum of its containers' ones.
        unasked = (names & {"cpu", "memory"}) - {*(of_the_pod.get("requests") or {})}
        if unasked:
            raise ConfigError(
                f"{where} asks for {', '.join(sorted(unasked))}, and {path}.resources.requests does"
                " not: give a request there, or remove it here"
            )
        return wanted
    after = facts.quality_of_service([*everyone, {"resources": wanted}])
    if after != quality:
        raise ConfigError(
            f"{where} would make the pod {after}, which is {quality} without it: remove them, and"
            " inject chooses"
        )
    return wanted
