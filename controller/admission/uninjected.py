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
import math
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from controller.admission.decision import WITHOUT, Verdict
from controller.admission.injector import Injector
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.cluster.collection import Collection
from controller.cluster.events import Events, reference
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.pacing import Doubling
from rdzv.reconcile import Loop, Outlook, log_defect, restarted
from rdzv.sentences import Diary

log = logging.getLogger(__name__)

FRESH_S = 300.0
"""Time after which a maker's pods are judged again: an owner that was not read, or a plan that was
too slow, is no verdict for good."""
AGAIN = Doubling(first_s=5.0, longest_s=FRESH_S)
"""Time before another look at a maker's pods after one without a verdict, by those in a row."""
NAMESPACES_AT_ONCE = 4
"""Number of namespaces whose makers are looked at at once, one of each: a namespace whose looks
take long, up to the timeouts of the API server's calls, delays its own makers alone."""
LOOKS = 3
"""Maximum number of a maker's pods that are read in one look, if those before are gone."""
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


@dataclass(frozen=True, slots=True)
class Judged:
    """The last look at a maker's pods at ``at_s``, monotonic, and the last verdict: on which pod.

    ``injectable`` is None if this webhook is not asked about them or has nothing to put in, and
    before any verdict. ``failures`` are the looks without a verdict since the last one.
    """

    at_s: float = -math.inf
    uid: str = ""
    injectable: bool | None = None
    failures: int = 0

    def due_s(self, uids: Container[str]) -> float:
        """Return when to look again; ``uids`` are those of the maker's pods that are there."""
        if self.failures:
            return self.at_s + AGAIN.after(self.failures - 1)
        return self.at_s + (FRESH_S if self.uid in uids else AGAIN.first_s)


class _Followed(Loop):
    """The pods of one list, and what is known of their makers; ``judge`` looks at one maker's."""

    def __init__(
        self,
        pods: Collection[UninjectedPod],
        judge: Callable[[list[UninjectedPod], Judged], Awaitable[Judged]],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(clock)
        self.judged: dict[Key, Judged] = {}
        self._pods = pods
        self._judge = judge
        self._sequence, self._made = 0, self._of_makers()
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup

    async def run(self) -> None:
        """Judge one pod of each maker, as long as one of its pods is there, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await super().run()

    async def step(self) -> Outlook:
        """Look at the makers that are due, those seen last first, one of a namespace at a time."""
        if self._pods.sequence != self._sequence:
            self._sequence, self._made = self._pods.sequence, self._of_makers()
        made, judged = self._made, self.judged
        for key in judged.keys() - made.keys():
            del judged[key]
        due_s = {key: judged.get(key, Judged()).due_s(made[key]) for key in reversed(made)}
        now, next_s = self.clock(), math.inf
        for key in sorted(due_s, key=due_s.__getitem__):
            if len(self._looks) == NAMESPACES_AT_ONCE:
                break
            if key[0] in self._looks:
                continue
            if due_s[key] > now:
                next_s = due_s[key]
                break
            look = self._judge_pods(key, list(made[key].values()))
            self._looks[key[0]] = self._tasks.create_task(look)
        return Outlook(partial(self._pods.changed_after, self._sequence), next_s)

    async def _judge_pods(self, key: Key, found: list[UninjectedPod]) -> None:
        self.judged[key] = await self._judge(found, self.judged.get(key, Judged()))
        del self._looks[key[0]]
        self.wake()

    def there(self) -> list[UninjectedPod]:
        return [one for one in self._pods.items.values() if not one.over]

    def _of_makers(self) -> dict[Key, dict[str, UninjectedPod]]:
        """Return the pods of each maker, by UID; those seen last come last."""
        made: dict[Key, dict[str, UninjectedPod]] = {}
        for one in self.there():
            made.setdefault(one.key, {})[one.uid] = one
        return made


class UninjectedPods:
    """The publisher; ``configuration`` is the name of the webhook's configuration.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        api: ClusterApi,
        injector: Injector,
        configuration: str,
        events: Events,
        clock: Callable[[], float],
    ) -> None:
        self._followed: list[_Followed] = []
        self._api = api
        self._injector = injector
        self._configuration = paths.webhook_configuration(configuration)
        self._events = events
        self._clock = clock
        self._diary = Diary(log)

    def pods(self, *, injectable: bool = False) -> list[UninjectedPod]:
        """Return the pods that this webhook is asked about and that have no sidecar.

        ``injectable``: only those that get one if they are made again.
        """
        return [
            one
            for followed in self._followed
            for one in followed.there()
            if (can := followed.judged.get(one.key, Judged()).injectable) is not None
            and (can or not injectable)
        ]

    async def run(self) -> None:
        """Publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._events.run())
            what, follow = "looking for pods that ask", partial(self._follow, paths.PODS_WITHOUT)
            tasks.create_task(restarted(what, follow))
            tasks.create_task(self._follow_namespaces(tasks))

    async def _follow_namespaces(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the pods of each namespace that asks for all its pods."""
        followed: dict[str, asyncio.Task[None]] = {}
        path = paths.NAMESPACES_THAT_ASK
        async with Collection(
            self._api, path, lambda one: one["metadata"]["name"]
        ).following() as c:
            async for there in c.changes():
                here = {str(name) for name in there.values()}
                for name in followed.keys() - here:
                    followed.pop(name).cancel()
                for name in here - followed.keys():
                    what = f"looking for pods without a sidecar in namespace {name}"
                    follow = partial(self._follow, paths.pods_without(name))
                    followed[name] = tasks.create_task(restarted(what, follow))

    async def _follow(self, path: str) -> None:
        """Follow the pods of one list."""
        async with Collection(self._api, path, pod_without).following() as pods:
            followed = _Followed(pods, self._judge, self._clock)
            self._followed.append(followed)
            try:
                await followed.run()
            finally:
                self._followed.remove(followed)

    async def _judge(self, pods: list[UninjectedPod], before: Judged) -> Judged:
        """Publish why a maker's pods have no sidecar, by the one seen last that is still there.

        It never waits to retry, and logs a defect and goes on: other makers' pods are due, too.
        """
        try:
            for pod in pods[: -LOOKS - 1 : -1]:
                if (read := await self._read(pod)) is not None:
                    found, asked = read
                    can = await self._publish(pod, found) if asked else None
                    self._diary.forget()
                    return Judged(self._clock(), pod.uid, can)
        except ClusterRefused as error:
            # The namespace may be gone again; without the right, the log is left.
            log.info("cannot read why %s has no sidecar: %s", pod.name, error)
        except ClusterError as error:
            self._diary.say(
                f"cannot read pods without a sidecar, retrying: {error}",
                level=logging.WARNING,
                extra={"event": "cluster_unavailable"},
            )
        except Exception as error:
            log_defect(f"cannot judge why {pod.name} has no sidecar: {error}", error)
        return replace(before, at_s=self._clock(), failures=before.failures + 1)

    async def _publish(self, pod: UninjectedPod, found: Object) -> bool | None:
        """Publish why a pod has no sidecar; return whether its maker's pods can be injected."""
        verdict, _ = await self._injector.verdict(found, pod.namespace, len(json.dumps(found)))
        why = _why(verdict)
        if why:
            self._events.say(pod.about, "NotInjected", f"a pod is {WITHOUT}{why}", warning=True)
        return verdict.injected if why else None

    async def _read(self, pod: UninjectedPod) -> tuple[Object, bool] | None:
        """Read the whole pod, and whether this webhook is asked about it; None if it is gone."""
        webhook = await self._api.get(self._configuration)
        namespace = await self._api.get(paths.namespace(pod.namespace))
        named = f"?fieldSelector=metadata.name%3D{pod.name}"
        listed = await self._api.get(paths.core(pod.namespace, "pods") + named)
        for found in listed.get("items") or []:
            if found["metadata"]["uid"] == pod.uid:
                return dict(found), is_asked(webhook, namespace, found)
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
