# SPDX-License-Identifier: Apache-2.0
"""Evicts pods without a sidecar, slowly, so that what made them makes others; for the leader.

It helps only if others get a sidecar: the verdict says so, and then the first successor shows it.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from controller.admission.uninjected import Key, UninjectedPod, UninjectedPods
from controller.cluster import paths
from controller.cluster.api import CONFLICT, NOT_FOUND, ClusterApi
from rdzv.errors import ClusterError, ClusterRefused
from rdzv.pacing import Doubling
from rdzv.reconcile import Loop, Outlook

log = logging.getLogger(__name__)

REPLACING = frozenset({("apps/v1", "ReplicaSet"), ("apps/v1", "StatefulSet")})
"""Kinds that replace an evicted pod and never count it as a failure, as a Job does."""
EVICT_S = 10.0
"""Interval between two evictions in the whole cluster."""
PROBE_S = 60.0
"""Time after the first eviction of a maker's pod before the next one: its successor shows whether
the webhook answers now."""
REFUSED = Doubling(first_s=60.0, longest_s=1800.0)
"""Time for which a maker is passed over after its pod was not evicted, by refusals in a row."""
KEPT = 1000
"""Number of remembered makers whose pods were evicted, and of those whose pods were not."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """The first eviction of a maker's pod: when, and which of its pods had no sidecar then."""

    first_s: float
    known: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refused:
    """Evictions of a maker's pods that failed in a row, and when the next one may be tried."""

    times: int
    not_before_s: float


NEVER_REFUSED = Refused(0, -math.inf)


def after_refusal(now: float, before: Refused) -> Refused:
    """Count one more refusal at ``now``."""
    return Refused(before.times + 1, now + REFUSED.after(before.times))


def next_eviction(
    now: float,
    found: Iterable[UninjectedPod],
    evicted: Mapping[Key, Evicted],
    refused: Mapping[Key, Refused],
) -> UninjectedPod | None:
    """Return the pod to evict at ``now``, monotonic, in seconds; None if there is none.

    ``found`` are the pods that get a sidecar if they are made again. Once a successor has none
    either, no other pod of that maker is evicted. Makers with fewer refusals come first, so that
    those with a blocked PodDisruptionBudget never take the turns of the others.
    """

    def refusal(key: Key) -> Refused:
        return refused.get(key, NEVER_REFUSED)

    of_makers: dict[Key, list[UninjectedPod]] = {}
    for pod in sorted(found, key=lambda one: (refusal(one.key).times, one.namespace, one.name)):
        if (pod.about.get("apiVersion"), pod.about.get("kind")) in REPLACING:
            of_makers.setdefault(pod.key, []).append(pod)
    for key, pods in of_makers.items():
        if now < refusal(key).not_before_s:
            continue
        before = evicted.get(key)
        if before is None:
            return pods[0]
        succeeded = all(one.uid in before.known for one in pods)
        if succeeded and now >= before.first_s + PROBE_S:
            return pods[0]
    return None


class Evictor(Loop):
    """The executor of evictions. ``clock`` is monotonic, in seconds."""

    def __init__(
        self, api: ClusterApi, uninjected: UninjectedPods, clock: Callable[[], float]
    ) -> None:
        super().__init__(clock)
        self._api = api
        self._uninjected = uninjected
        self._evicted: OrderedDict[Key, Evicted] = OrderedDict()
        self._refused: OrderedDict[Key, Refused] = OrderedDict()

    async def step(self) -> Outlook:
        """Evict at most one pod every ``EVICT_S``."""
        found = self._uninjected.pods(injectable=True)
        pod = next_eviction(self.clock(), found, self._evicted, self._refused)
        if pod is not None and await self._evict(pod):
            known = frozenset(one.uid for one in found if one.key == pod.key)
            self._evicted.setdefault(pod.key, Evicted(self.clock(), known))
            self._refused.pop(pod.key, None)
        elif pod is not None:
            before = self._refused.pop(pod.key, NEVER_REFUSED)
            self._refused[pod.key] = after_refusal(self.clock(), before)
        for kept in (self._evicted, self._refused):
            while len(kept) > KEPT:
                kept.popitem(last=False)
        return Outlook(look_at_s=self.clock() + EVICT_S)

    async def _evict(self, pod: UninjectedPod) -> bool:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        named = (pod.name, pod.namespace)
        try:
            await self._api.create(f"{paths.core(pod.namespace, 'pods', pod.name)}/eviction", body)
        except ClusterError as error:
            if not (isinstance(error, ClusterRefused) and error.status in (NOT_FOUND, CONFLICT)):
                extra = {"event": "pod_not_evicted"}
                log.warning("cannot evict pod %s of namespace %s: %s", *named, error, extra=extra)
            return False
        text = "evicted pod %s of namespace %s, which had no sidecar"
        log.info(text, *named, extra={"event": "pod_evicted"})
        return True
