# SPDX-License-Identifier: Apache-2.0
"""Publishes why a pod that asks for a sidecar has none: as an Event at the object that made it.

What the API server shows counts, never a request to the webhook, which anybody may send. The pod
exists, this webhook is to be asked about it, and the verdict is made again of the pod itself.
Every replica does so, without a leader: an Event's name follows from what it says, so the API
server refuses the second one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.admission.decision import WITHOUT, Verdict
from controller.admission.injector import Injector
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from controller.cluster.events import Events, reference
from rdzv.errors import ClusterError, ClusterRefused

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""Retry interval while the API server is unavailable."""
NOT_ASKED = (
    "its sidecar could be put in, but no replica of the webhook answered the API server when the"
    " pod was created: delete the pod, so that another takes its place"
)


Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class UninjectedPod:
    """The kept fields of a pod without a sidecar. ``over``: whether it has ended, or is ending.

    ``about``: the object reference for its Events: what made it, or the pod itself.
    """

    uid: str
    namespace: str
    name: str
    about: Mapping[str, Any]
    over: bool

    @property
    def key(self) -> Key:
        """Its namespace and the UID that its Events are about, which a pod may claim falsely."""
        return self.namespace, str(self.about["uid"])


def pod_without(pod: Object) -> UninjectedPod:
    """Reduce a pod to the fields that are kept."""
    metadata = pod["metadata"]
    uid, name, namespace = metadata["uid"], metadata["name"], metadata["namespace"]
    itself = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    makers = [one for one in metadata.get("ownerReferences") or [] if one.get("controller")]
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    over = ended or bool(metadata.get("deletionTimestamp"))
    return UninjectedPod(
        uid, namespace, name, reference(next(iter(makers), itself), namespace), over
    )


@dataclass(eq=False, slots=True)
class _Followed:
    """The pods of one list, and by their makers whether these pods can be injected.

    None: this webhook is not asked about them, or has nothing to put in.
    """

    there: list[UninjectedPod] = field(default_factory=list)
    judged: dict[Key, bool | None] = field(default_factory=dict)


class UninjectedPods:
    """The publisher; ``configuration`` is the name of the webhook's configuration."""

    def __init__(
        self, api: ClusterApi, injector: Injector, configuration: str, events: Events
    ) -> None:
        self._followed: list[_Followed] = []
        self._api = api
        self._injector = injector
        self._configuration = paths.webhook_configuration(configuration)
        self._events = events

    def pods(self, *, injectable: bool = False) -> list[UninjectedPod]:
        """Return the pods that this webhook is asked about and that have no sidecar.

        ``injectable``: only those that get one if they are made again.
        """
        return [
            one
            for followed in self._followed
            for one in followed.there
            if (can := followed.judged.get(one.key)) is not None and (can or not injectable)
        ]

    async def run(self) -> None:
        """Publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run())
            tasks.create_task(self._follow(paths.PODS_WITHOUT))
            tasks.create_task(self._follow_namespaces(tasks))

    async def _follow_namespaces(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the pods of each namespace that asks for all its pods."""
        followed: dict[str, asyncio.Task[None]] = {}
        path = paths.NAMESPACES_THAT_ASK
        async with Collection(
            self._api, path, lambda one: one["metadata"]["name"]
        ).following() as c:
            sequence = 0
            while True:
                await c.changed_after(sequence)
                sequence, here = c.sequence, {str(name) for name in c.items.values()}
                for name in followed.keys() - here:
                    followed.pop(name).cancel()
                for name in here - followed.keys():
                    pods = self._follow(paths.pods_without(name))
                    followed[name] = tasks.create_task(pods)

    async def _follow(self, path: str) -> None:
        """Judge one pod for each object that has made some, as long as one of them is there."""
        followed = _Followed()
        judged = followed.judged
        self._followed.append(followed)
        try:
            async with Collection(self._api, path, pod_without).following() as pods:
                sequence = 0
                while True:
                    await pods.changed_after(sequence)
                    sequence = pods.sequence
                    followed.there = [one for one in pods.items.values() if not one.over]
                    here = {one.key: one for one in followed.there}
                    for key in judged.keys() - here.keys():
                        del judged[key]
                    for key, one in here.items():
                        if key not in judged:
                            judged[key] = await self._judge(one)
        finally:
            self._followed.remove(followed)

    async def _judge(self, pod: UninjectedPod) -> bool | None:
        """Publish why a pod has no sidecar, once the API server can be asked about it.

        Returns whether its maker's pods can be injected; None if this webhook is not asked, or has
        nothing to put in.
        """
        while True:
            try:
                found = await self._read(pod)
                break
            except ClusterRefused as error:
                # The pod or its namespace may be gone again; without the right, the log is left.
                log.info("cannot read why %s has no sidecar: %s", pod.name, error)
                return None
            except ClusterError as error:
                log.warning(
                    "cannot read pods without a sidecar, retrying: %s",
                    error,
                    extra={"event": "cluster_unavailable"},
                )
                await asyncio.sleep(AGAIN_S)
        if found is None:
            return None
        verdict, _ = await self._injector.verdict(found, pod.namespace, len(json.dumps(found)))
        why = _why(verdict)
        if why:
            self._events.say(pod.about, "NotInjected", f"a pod is {WITHOUT}{why}", warning=True)
        return verdict.injected if why else None

    async def _read(self, pod: UninjectedPod) -> Object | None:
        """Read the whole pod; None if it is gone, or this webhook is not asked about it."""
        webhook = await self._api.get(self._configuration)
        namespace = await self._api.get(paths.namespace(pod.namespace))
        named = f"?fieldSelector=metadata.name%3D{pod.name}"
        listed = await self._api.get(paths.core(pod.namespace, "pods") + named)
        for found in listed.get("items") or []:
            if found["metadata"]["uid"] == pod.uid and is_asked(webhook, namespace, found):
                return dict(found)
        return None


def _why(verdict: Verdict) -> str:
    if verdict.injected:
        return NOT_ASKED
    return verdict.reason if verdict.warnings else ""


def is_asked(webhook: Object, namespace: Object, pod: Object) -> bool:
    """Return whether the API server asks a webhook about the creation of a pod."""
    labels = [one["metadata"].get("labels") or {} for one in (namespace, pod)]
    return any(
        selects(one.get("namespaceSelector") or {}, labels[0])
        and selects(one.get("objectSelector") or {}, labels[1])
        for one in webhook.get("webhooks") or []
    )


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector of Kubernetes selects an object with these labels."""
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        _meets(one["operator"], one.get("values") or (), labels.get(one["key"]))
        for one in selector.get("matchExpressions") or []
    )


def _meets(operator: str, values: Any, value: str | None) -> bool:
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
    return value is None  # DoesNotExist
