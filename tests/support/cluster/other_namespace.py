# SPDX-License-Identifier: Apache-2.0
"""What a pod of another namespace can do in the chart's etcd, by etcdctl and the Secret it has."""

from __future__ import annotations

from tests.support.cluster.lab import ETCD_IMAGE, Kubelab, Object
from tests.support.waiting import wait_until

ENDPOINT = "https://muster-etcd-0.muster-etcd.muster-system.svc:2379"
JOB, POD = "intruder", "etcdctl"
SECRET = f"{JOB}-muster-store"
PATIENCE_S = 180.0


def attempts(lab: Kubelab, namespace: str, victim: str) -> dict[str, tuple[int, str]]:
    """Exit status and words of each attempt on the prefix ``victim``; ``own`` is on its own job.

    The pod has the label and the annotations that the webhook gives, and so its Secret.
    """
    own = f"/muster/v1/{namespace}/{JOB}/"
    commands = {
        "own": ["put", f"{own}job", "mine"],
        "get": ["get", "--prefix", victim],
        "get-all": ["get", "--prefix", "/muster/v1/"],
        "put": ["put", f"{victim}job", "mine"],
        "del": ["del", "--prefix", victim],
        "watch": ["watch", "--prefix", victim, "--rev=1"],
        "users": ["user", "list"],
        "grant": ["role", "grant-permission", "--prefix=true", "root", "readwrite", victim],
    }
    lab.apply(namespace, _pod(commands))
    wait_until(
        lambda: len(_ended(lab, namespace)) == len(commands), PATIENCE_S, "every attempt has ended"
    )
    return {
        name: (status, lab.kubectl("-n", namespace, "logs", POD, "-c", name))
        for name, status in _ended(lab, namespace).items()
    }


def _ended(lab: Kubelab, namespace: str) -> dict[str, int]:
    statuses = lab.get(namespace, "pod", POD)["status"].get("containerStatuses", [])
    return {
        one["name"]: one["state"]["terminated"]["exitCode"]
        for one in statuses
        if "terminated" in one["state"]
    }


def _pod(commands: dict[str, list[str]]) -> Object:
    files = [f"--{flag}=/access/{key}" for flag, key in _FILES.items()]
    containers = [
        {
            "name": name,
            "image": ETCD_IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/usr/local/bin/etcdctl", f"--endpoints={ENDPOINT}", *files, *words],
            "volumeMounts": [{"name": "access", "mountPath": "/access", "readOnly": True}],
        }
        for name, words in commands.items()
    ]
    notes = {"muster.dev/job": JOB, "muster.dev/etcd-secret": SECRET}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD, "labels": {"muster.dev/job": JOB}, "annotations": notes},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": containers,
            "volumes": [{"name": "access", "secret": {"secretName": SECRET}}],
        },
    }


_FILES = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
