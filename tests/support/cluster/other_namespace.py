# SPDX-License-Identifier: Apache-2.0
"""What a pod of another namespace can do: in the chart's etcd, by the Secret that it has; by the
records of its own job, which name the pods of another; and at the port of the webhook.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from controller.owner_kinds import Reference
from rdzv.keys import JobKeys
from rdzv.records.drain import Drain
from rdzv.records.job import HistoryEntry, Incarnation, Job
from rdzv.records.policy import JobPolicy
from tests.support.cluster.chart_release import NAMESPACE
from tests.support.cluster.lab import ETCD_IMAGE, TRAINER_IMAGE, Kubelab, Object
from tests.support.records import member
from tests.support.waiting import wait_until

ENDPOINT = "https://muster-etcd-0.muster-etcd.muster-system.svc:2379"
JOB, POD = "intruder", "etcdctl"
SECRET = f"{JOB}-muster-store"
PATIENCE_S = 180.0
TEXT = "its node is compromised, delete it"
"""What it wants people to read at objects of others."""
_POSTS = """
import json, ssl, sys, urllib.request
context = ssl._create_unverified_context()
for url in sys.argv[1].split():
    for review in json.loads(sys.argv[2]):
        request = urllib.request.Request(url, json.dumps(review).encode())
        answer = urllib.request.urlopen(request, context=context, timeout=30)
        print(answer.read().decode())
"""


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


class Intruder:
    """A Deployment of one pod, in a namespace of its own: its job has records, and no sidecar."""

    def __init__(self, lab: Kubelab) -> None:
        self.lab = lab
        self.namespace = f"other-{secrets.token_hex(4)}"
        self.keys = JobKeys(self.namespace, JOB)
        self._live = self.keys.in_generation(1)

    def __enter__(self) -> Self:
        self.lab.make_namespace(self.namespace)
        try:
            self.lab.apply(self.namespace, self._deployment())
            ready = ("rollout", "status", f"deployment/{JOB}", f"--timeout={PATIENCE_S:g}s")
            self.lab.kubectl("-n", self.namespace, *ready, timeout_s=PATIENCE_S + 10)
            (found,) = self.lab.pods(self.namespace, f"muster.dev/job={JOB}")
        except BaseException:
            self.__exit__()
            raise
        self.pod = found["metadata"]
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.remove_namespace(self.namespace)

    def _deployment(self) -> Object:
        sleeps = {"name": "posts", "image": TRAINER_IMAGE, "imagePullPolicy": "Never"}
        containers = [
            _etcdctl("store", ["watch", "--prefix", self.keys.prefix]),
            {**sleeps, "command": ["sleep", "3600"]},
        ]
        template = {"metadata": _METADATA, "spec": _spec(containers)}
        spec = {"replicas": 1, "selector": {"matchLabels": _METADATA["labels"]}}
        kind = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": JOB}}
        return {**kind, "spec": {**spec, "template": template}}

    def claims(self, victims: Sequence[Object]) -> None:
        """Write records that name the pods of others, and after them those of its own pod."""
        self._put(self.keys.job, Job(JobPolicy(1, 100)).to_json())
        for one in victims:
            name, uid = one["metadata"]["name"], one["metadata"]["uid"]
            self._put_member(name, uid)
            self._put_member(f"{self.pod['name']}-{name}", uid)
            for what in ("lost", "quarantine"):
                entry = HistoryEntry(what, name, TEXT, 1.0, {"pod_uid": uid})
                self._put(self.keys.history_entry(1, name, what), entry.to_json())
            self._put(self._live.drain(uid), Drain(uid, name, TEXT, "operator").to_json())
        self._put_member(self.pod["name"], self.pod["uid"])

    def drains(self) -> str:
        """The drains of its job."""
        return self._runs("store", *_ETCDCTL, "get", "--prefix", self._live.drains)

    def forget_drains(self) -> None:
        """Take back those that it has claimed."""
        self._runs("store", *_ETCDCTL, "del", "--prefix", self._live.drains)

    def posts(self, *reviews: Object) -> list[str]:
        """Send reviews to the port of each replica; return its answers, decoded."""
        replicas = self.lab.pods(NAMESPACE, "app.kubernetes.io/component=controller")
        urls = " ".join(f"https://{pod['status']['podIP']}:9443/inject" for pod in replicas)
        said = self._runs("posts", "python3", "-c", _POSTS, urls, json.dumps(reviews))
        answers = [json.loads(line)["response"] for line in said.splitlines()]
        assert len(answers) == len(replicas) * len(reviews) > 0
        patches = [base64.b64decode(one.get("patch", "")).decode() for one in answers]
        return [
            json.dumps({**one, "patch": json.loads(patch or "[]")})
            for one, patch in zip(answers, patches, strict=True)
        ]

    def _put_member(self, name: str, uid: str) -> None:
        claimed = replace(member(name, uid=uid, most=100), version="0.2.0")
        self._put(self._live.member(name), claimed.to_json())
        self._put(self.keys.incarnation(name), Incarnation(name, 1, uid).to_json())

    def _put(self, key: str, value: bytes) -> None:
        self._runs("store", *_ETCDCTL, "put", key, value.decode())

    def _runs(self, container: str, *words: str) -> str:
        in_its_pod = ("exec", self.pod["name"], "-c", container, "--", *words)
        return self.lab.kubectl("-n", self.namespace, *in_its_pod)


def review(namespace: str, maker: Reference, **annotations: str) -> Object:
    """What the API server would ask about a pod of ``maker``, which need not be there."""
    owner = {"apiVersion": maker.api_version, "kind": maker.kind, "name": maker.name}
    metadata = {
        "name": "x",
        "annotations": {f"muster.dev/{name}": value for name, value in annotations.items()},
        "ownerReferences": [{**owner, "uid": maker.uid, "controller": True}],
    }
    containers = [{"name": "pytorch", "image": "x", "command": ["torchrun", "train.py"]}]
    pod = {"metadata": metadata, "spec": {"containers": containers}}
    return {"request": {"uid": "u", "namespace": namespace, "object": pod}}


def namespaces_that_read(lab: Kubelab, text: str) -> set[str]:
    """Namespaces in which an Event has this text."""
    items = json.loads(lab.kubectl("get", "events", "--all-namespaces", "-o", "json"))["items"]
    return {one["metadata"]["namespace"] for one in items if text in one["message"]}


def _pod(commands: dict[str, list[str]]) -> Object:
    containers = [_etcdctl(name, words) for name, words in commands.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD, **_METADATA},
        "spec": {"restartPolicy": "Never", **_spec(containers)},
    }


def _etcdctl(name: str, words: Sequence[str]) -> Object:
    return {
        "name": name,
        "image": ETCD_IMAGE,
        "imagePullPolicy": "Never",
        "command": [*_ETCDCTL, *words],
        "volumeMounts": [{"name": "access", "mountPath": "/access", "readOnly": True}],
    }


def _spec(containers: Sequence[Object]) -> Object:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": containers,
        "volumes": [{"name": "access", "secret": {"secretName": SECRET}}],
    }


_METADATA: Object = {
    "labels": {"muster.dev/job": JOB},
    "annotations": {"muster.dev/job": JOB, "muster.dev/etcd-secret": SECRET},
}
_FILES = {"cacert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
_ETCDCTL = (
    *("/usr/local/bin/etcdctl", f"--endpoints={ENDPOINT}"),
    *(f"--{flag}=/access/{key}" for flag, key in _FILES.items()),
)
