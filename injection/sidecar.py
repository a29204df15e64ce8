# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a container of a pod spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.config import Config
from agent.rundir.files import torch_environment
from injection.member_spec import Demand
from injection.settings import OWN, TABLE
from injection.workloads import Role
from rdzv.members.registration import EMPTY_LEASE_TIMES
from rdzv.records.policy import POLICY_TABLE, spelled, variables_of
from rdzv.settings import load

NAME = "muster"
PORT_NAME = "muster-http"
TUNNEL_PORT_NAME = "muster-tunnel"
RUN_VOLUME = "muster-run"
SECRET_VOLUME = "muster-etcd"
VOLUMES = frozenset({RUN_VOLUME, SECRET_VOLUME})
RUN_DIR = "/var/run/muster"
SECRET_DIR = "/etc/muster/etcd"
MUSTER_RUN = f"{RUN_DIR}/bin/muster-run"
MUSTER_HOLD = f"{RUN_DIR}/bin/muster-hold"
MUSTER_EXEC = f"{RUN_DIR}/bin/muster-exec"

HOLD_HOOK = {"exec": {"command": [MUSTER_HOLD]}}
"""The preStop hook of a training container that muster-run does not hold."""

_SECRET_FILES = {
    "MUSTER_ETCD_CACERT": "ca.crt",
    "MUSTER_ETCD_CERT": "tls.crt",
    "MUSTER_ETCD_KEY": "tls.key",
    "MUSTER_ETCD_PASSWORD_FILE": "password",
}
"""The sidecar's variables for files of the Secret, each with its key there."""

SECRET_VARIABLES = frozenset({"MUSTER_ETCD_USER", *_SECRET_FILES})
"""The sidecar's variables for access to the store."""

_ALWAYS = ("MUSTER_MIN", "MUSTER_MAX")

VARIABLES = (
    SECRET_VARIABLES
    | {
        "MUSTER_JOB_UID",
        "MUSTER_INDEX",
        "MUSTER_OWNER",
        "MUSTER_ROLE",
        "MUSTER_SLOTS",
        "MUSTER_TOPOLOGY",
        "MUSTER_TUNNEL_PORT",
    }
    | {one.variable for one in POLICY_TABLE.values()}.difference(_ALWAYS)
)
"""The sidecar's variables that are set in some cases only."""

TOPOLOGY_PART = "TOPOLOGY_PART_"
"""Prefix of the numbered variables for parts of the topology that a pod reads from itself; only the
kubelet reads these variables."""

BELOW_MIN = "MUSTER_BELOW_MIN"
"""Set if asked for, or if a replacement comes only once the pod is gone, unless the user has set
another value."""

RUN_MOUNT = {"name": RUN_VOLUME, "mountPath": RUN_DIR}

RUN_DIR_SIZE = "16Mi"

START_MARGIN_S = 20
"""Time added to a fresh sidecar's configured waits: for its start, and requests to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarContainer:
    """The sidecar of one pod: its member's specification, and its parameters in this pod."""

    want: Demand
    role: Role
    grace_s: int
    wrapped: bool
    resources: Mapping[str, Any]
    lease_ttl_s: float
    start_timeout_s: float
    below_min: str | None

    def container(self) -> dict[str, Any]:
        """Build the container, one of initContainers."""
        given = self.want.settings
        mounts: list[Mapping[str, Any]] = [RUN_MOUNT]
        if given.etcd_secret is not None:
            mounts.append({"name": SECRET_VOLUME, "mountPath": SECRET_DIR, "readOnly": True})
        policy, user = given.pull_policy, given.user
        probe = {"httpGet": {"path": "/readyz", "port": self.want.http_port}, "timeoutSeconds": 2}
        return {
            "name": NAME,
            "image": given.image,
            **({"imagePullPolicy": policy} if policy else {}),
            "restartPolicy": "Always",
            "command": ["muster", "agent"],
            "env": self.environment(),
            "ports": [
                {"name": PORT_NAME, "containerPort": self.want.http_port},
                *self._tunnel_ports(),
            ],
            "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": self._start_s},
            "readinessProbe": {**probe, "periodSeconds": 2, "failureThreshold": 2},
            "lifecycle": {"preStop": {"exec": {"command": ["muster", "notice"]}}},
            **({"resources": dict(self.resources)} if self.resources else {}),
            "securityContext": {
                "runAsNonRoot": True,
                **({} if user == "none" else {"runAsUser": user, "runAsGroup": user}),
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": mounts,
        }

    @property
    def _start_s(self) -> int:
        """Time that a fresh sidecar may need to be ready, in seconds.

        It waits for the store, then for the leases of a former generation to expire, and then to
        see whether that generation comes back.
        """
        leases_s = (1 + EMPTY_LEASE_TIMES) * self.lease_ttl_s
        return math.ceil(self.start_timeout_s + leases_s) + START_MARGIN_S

    def environment(self) -> list[dict[str, Any]]:
        """Build the sidecar's variables."""
        given, kind = self.want.settings, self.want.kind
        labels = "metadata.labels['{}']".format
        fields = {
            "MUSTER_JOB": labels(self.want.job_name_label) if self.want.job_name_label else None,
            "MUSTER_NAMESPACE": None if given.namespace else "metadata.namespace",
            "MUSTER_JOB_UID": labels(kind.job_uid_label) if kind.job_uid_label else None,
            "MUSTER_INDEX": labels(kind.index_label) if kind.index_label else None,
            "MUSTER_MEMBER": "metadata.name",
            "MUSTER_POD_UID": "metadata.uid",
            "MUSTER_ADDRESS": "status.podIP",
            "MUSTER_NODE": "spec.nodeName",
        }
        values = {
            "MUSTER_JOB": None if self.want.job_name_label else self.want.job,
            "MUSTER_NAMESPACE": given.namespace,
            "MUSTER_OWNER": self.want.owner,
            **variables_of(self.want.policy),
            **{TABLE[name].variable: _given(given, name) for name in OWN},
            "MUSTER_ETCD_ENDPOINTS": ",".join(given.etcd_endpoints or ()),
            "MUSTER_ROLE": "launcher" if self.role == "launcher" else None,
            # For a launcher those of its workers: the slots of its own pod are always 0.
            "MUSTER_SLOTS": self.want.slots,
            "MUSTER_GRACE_S": self.grace_s,
            BELOW_MIN: self.below_min,
            "MUSTER_RUN_DIR": RUN_DIR,
            # Set even if they are the defaults, so that no Service's variable takes their place.
            "MUSTER_C10D_PORT": 0 if self.wrapped else self.want.relay_port,
            "MUSTER_RELAY_PORT": self.want.relay_port,
            "MUSTER_HTTP_PORT": self.want.http_port,
            "MUSTER_TUNNEL_PORT": self.want.tunnel_port,
            **self._secret_files(),
        }
        user = {"name": "MUSTER_ETCD_USER", **_from_secret(given.etcd_secret, "username")}
        return [
            *({"name": name, "value": str(v)} for name, v in values.items() if v is not None),
            *([user] if "username" in self._secret_keys else []),
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in fields.items()
                if path is not None
            ),
            *self._topology(),
        ]

    def _tunnel_ports(self) -> list[dict[str, Any]]:
        """Return the port for the launcher's commands if the pod is its worker, else none."""
        if self.want.role != "worker":
            return []
        return [{"name": TUNNEL_PORT_NAME, "containerPort": self.want.tunnel_port}]

    def _topology(self) -> list[dict[str, Any]]:
        """Return the variable of the topology, after those that it is composed of."""
        parts, variables = [], []
        for number, part in enumerate(self.want.settings.topology or (), 1):
            if part.startswith("{"):
                name = f"{TOPOLOGY_PART}{number}"
                field = {"fieldRef": {"fieldPath": part.strip("{}")}}
                variables.append({"name": name, "valueFrom": field})
                part = f"$({name})"
            parts.append(part)
        whole = [{"name": "MUSTER_TOPOLOGY", "value": "/".join(parts)}] if parts else []
        return [*variables, *whole]

    def delivered(self) -> list[dict[str, Any]]:
        """Build the training container's variables, without those that muster-run reads itself."""
        own = [{"name": "MUSTER_RUN_DIR", "value": RUN_DIR}]
        if self.wrapped:
            return own
        environ = {v["name"]: v.get("value", "") for v in self.environment()}
        stand_ins = {"MUSTER_ADDRESS": "127.0.0.1", "MUSTER_MEMBER": "pod", "MUSTER_JOB": "job"}
        environment = (*_ALWAYS, "MUSTER_GRACE_S", "MUSTER_C10D_PORT", "MUSTER_HTTP_PORT")
        config = load(Config, {}, {**stand_ins, **{name: environ[name] for name in environment}})
        fields = {"PET_LOCAL_ADDR": "status.podIP", "MUSTER_MEMBER": "metadata.name"}
        if self.want.job_name_label is not None:
            fields["PET_RDZV_ID"] = f"metadata.labels['{self.want.job_name_label}']"
        values = {
            **torch_environment(config),
            "PET_RDZV_ID": self.want.job,
            "MUSTER_RUN_DIR": RUN_DIR,
            "PYTHONPATH": f"{RUN_DIR}/python",
        }
        return [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": fields[name]}}}
            if name in fields
            else {"name": name, "value": value}
            for name, value in values.items()
        ]

    def volumes(self) -> list[dict[str, Any]]:
        """Return the volumes to add to the pod."""
        # In memory: a full or failing disk of the node must not keep a pod from being drained.
        run = {"medium": "Memory", "sizeLimit": RUN_DIR_SIZE}
        volumes: list[dict[str, Any]] = [{"name": RUN_VOLUME, "emptyDir": run}]
        if (secret := self.want.settings.etcd_secret) is not None:
            volumes.append({"name": SECRET_VOLUME, "secret": {"secretName": secret}})
        return volumes

    @property
    def _secret_keys(self) -> tuple[str, ...]:
        given = self.want.settings
        return () if given.etcd_secret is None else given.etcd_secret_keys or ()

    def _secret_files(self) -> dict[str, str]:
        keys = self._secret_keys
        return {name: f"{SECRET_DIR}/{key}" for name, key in _SECRET_FILES.items() if key in keys}


def is_ours(variable: Mapping[str, Any]) -> bool:
    """Return whether a variable about the store is as inject writes it."""
    if "secretKeyRef" in (variable.get("valueFrom") or {}):
        return True
    return str(variable.get("value")).startswith(f"{SECRET_DIR}/")


def _given(settings: object, name: str) -> str | None:
    """Return the text of a setting that the user gives; None for the sidecar's own default."""
    value = getattr(settings, name)
    return None if value is None else spelled(name, value)


def _from_secret(secret: str | None, key: str) -> dict[str, Any]:
    return {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
