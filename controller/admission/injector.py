# SPDX-License-Identifier: Apache-2.0
"""The webhook's handler: answers each AdmissionReview in time and never rejects a pod.

A namespace that asks a lot waits for itself alone. A review may come from anybody who reaches the
port. So it is answered, counted and logged, and no object is written because of it;
``uninjected.py`` publishes what the API server itself shows.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from controller.admission import decision
from controller.admission.decision import WITHOUT, Verdict
from controller.cluster import paths
from controller.cluster.api import ClusterApi, Object
from controller.owner_kinds import Reference, maker_of, owner_of
from injection.settings import TABLE, annotation
from rdzv.errors import ClusterError
from rdzv.reconcile import log_defect

log = logging.getLogger(__name__)

T = TypeVar("T")

PLANNERS = 2
"""Number of plans made at once, of different namespaces. A pod that takes long holds up one of
them, and no request for health, metrics or certificates."""
PLAN_TIMEOUT_S = 1.0
"""Limit on the processor time of one plan; the limits on a pod keep it to a tenth of a second. The
clock does not count: a busy machine is no reason to admit a pod without Muster."""
LOOK_S = 0.1
"""Minimum interval between two looks at the processor time of a plan."""
NAMESPACE_MAX_BYTES = 8 * 2**20
"""Limit on a namespace's reviews under way: about a thousand pods of the usual size. Each takes
several times its size of memory, of which the container has 256 MiB."""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

READ_TIMEOUT_S = 1.0
"""Timeout for reading the owner, out of the 5 s that the API server allows for an admission."""
OWNERS_KEPT = 200
"""Number of cached owners: the pods of a job come in one burst, and its object is read once. Each
may have 100 KB, and the container's memory limit is 256 MiB."""
OWNER_FRESH_S = 30.0
"""Time for which a cached owner is used; a user may edit its elasticPolicy meanwhile."""

ANSWER_TIMEOUT_S = 4.5
"""Timeout for an answer, with the read of the owner and the wait until a plan begins: the API
server waits for 5 s."""
POD_MAX_BYTES = 1_500_000
"""Maximum size of a review; etcd takes no larger object, so a larger pod is refused later on."""
POD_MAX_VALUES = 20_000
"""Maximum number of values in a pod, or in its owner: a plan takes a tenth of a second of processor
time then."""

OF_NAMESPACE = ("image", "pull_policy", "pull_secrets", "resources", "user")
"""Settings that the annotations of a namespace give to all its pods that say nothing else."""

TOO_LARGE = f"the pod is larger than {POD_MAX_BYTES:,} bytes or {POD_MAX_VALUES:,} values"
TOO_SLOW = (
    f"the plan of its sidecar took longer than {PLAN_TIMEOUT_S:g} s of processor time, or was not"
    f" ready within {ANSWER_TIMEOUT_S:g} s, as others were planned"
)
TOO_MANY = (
    "the pods of its namespace that are created now are larger than"
    f" {NAMESPACE_MAX_BYTES:,} bytes together"
)

DEFECT = Verdict((), (f"{WITHOUT}a defect of muster, which its log has",), "a defect of muster")


class Turns:
    """The planners. Use it within one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PLANNERS, thread_name_prefix="plan")
        self._free = asyncio.Semaphore(PLANNERS)
        self._of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._bytes: collections.Counter[str] = collections.Counter()

    @contextmanager
    def under_way(self, namespace: str, size: int) -> Iterator[bool]:
        """Count a review of ``size`` bytes within the context; yield whether it may wait."""
        self._bytes[namespace] += size
        try:
            yield self._bytes[namespace] <= max(NAMESPACE_MAX_BYTES, size)
        finally:
            self._bytes[namespace] -= size
            if not self._bytes[namespace]:
                del self._bytes[namespace]

    async def planned(self, namespace: str, plan: Callable[[], T]) -> T:
        """Run ``plan`` in a thread in its turn; raise ``TimeoutError`` if it takes too long.

        Then it is finished in its thread, for nothing, and only after that is it the turn of the
        next one.
        """
        # A namespace has one review at most in the queue of the semaphore, which is in order.
        own = self._of.setdefault(namespace, asyncio.Lock())
        await own.acquire()
        try:
            await self._free.acquire()
        except BaseException:
            own.release()
            raise
        timed = _Timed(plan)
        planned = asyncio.get_running_loop().run_in_executor(self._threads, timed)

        def end(done: asyncio.Future[T]) -> None:
            done.exception()  # raised below, if the review still waits
            self._free.release()
            own.release()

        planned.add_done_callback(end)
        while not planned.done():
            left_s = PLAN_TIMEOUT_S - timed.spent_s
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait({planned}, timeout=max(LOOK_S, left_s))
        return planned.result()


class _Timed(Generic[T]):
    """A plan whose processor time can be read while its thread runs it."""

    def __init__(self, plan: Callable[[], T]) -> None:
        self._plan = plan
        self._begun_s = 0.0
        self._clock: int | None = None

    def __call__(self) -> T:
        self._begun_s = time.thread_time()
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return self._plan()

    @property
    def spent_s(self) -> float:
        """The processor time of the plan so far; 0 before it begins."""
        return 0.0 if self._clock is None else time.clock_gettime(self._clock) - self._begun_s


class AdmissionMetrics:
    """The number of admissions by outcome, and how long they took."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        """The registry; the controller's other metrics are in it, too."""
        self._pods = Counter(
            "muster_controller_admissions",
            "Pods that asked for a sidecar, by outcome: injected, unchanged or refused.",
            ["outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "muster_controller_admission_seconds",
            "Own time of the webhook for one pod, the read of its owner included.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )

        self._cpu_seconds = Histogram(
            "muster_controller_admission_cpu_seconds",
            "Processor time of the webhook for one pod: what a busy machine does not stretch.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def count(self, verdict: Verdict, seconds: float, cpu_seconds: float) -> None:
        """Count one admission."""
        outcome = "injected" if verdict.injected else "refused" if verdict.warnings else "unchanged"
        self._pods.labels(outcome).inc()
        self._seconds.observe(seconds)
        self._cpu_seconds.observe(cpu_seconds)

    def text(self) -> bytes:
        """Render all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Injector:
    """The webhook's answers; ``environ`` has the defaults for what pods and owners do not specify.

    ``access``: whether each job has a Secret of its own, and ``release``: which release keeps it.
    """

    def __init__(
        self,
        api: ClusterApi,
        environ: Mapping[str, str],
        metrics: AdmissionMetrics,
        *,
        access: bool = False,
        release: str = "",
    ) -> None:
        self._api = api
        self._access = access
        self._release = release
        self._environ = environ
        self._metrics = metrics
        self._owners: OrderedDict[str, tuple[float, Object]] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Object]] = {}
        self._turns = Turns()

    async def answer(self, body: bytes) -> bytes:
        """Answer one AdmissionReview; raises ``ConfigError`` if ``body`` is none."""
        begun_s = time.monotonic()
        if len(body) > POD_MAX_BYTES:
            verdict = decision.without(TOO_LARGE)
            self._metrics.count(verdict, 0.0, 0.0)
            log.warning("a pod of %d bytes: %s", len(body), verdict.reason)
            return decision.answer_to(decision.uid_of(body), verdict)
        asked = decision.read_review(body)
        verdict, spent_s = await self.verdict(asked.pod, asked.namespace, len(body))
        self._metrics.count(verdict, time.monotonic() - begun_s, spent_s)
        _tell(_name_of(asked.pod), asked.namespace, verdict)
        return decision.answer_to(asked.uid, verdict)

    async def verdict(
        self, pod: Mapping[str, Any], namespace: str, size: int
    ) -> tuple[Verdict, float]:
        """Return the verdict on a pod of ``size`` bytes, and the processor time of its plan in s.

        A defect is a verdict, too: a pod must start, whatever is wrong here.
        """
        try:
            if size > POD_MAX_BYTES or values_beyond(pod, POD_MAX_VALUES):
                return decision.without(TOO_LARGE), 0.0
            with self._turns.under_way(namespace, size) as may_wait:
                if not may_wait:
                    return decision.without(TOO_MANY), 0.0
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await self._plan(pod, namespace)
        except TimeoutError:
            return decision.without(TOO_SLOW), 0.0
        except Exception as error:
            log_defect(str(error), error, pod=_name_of(pod))
            return DEFECT, 0.0

    async def _plan(self, pod: Mapping[str, Any], namespace: str) -> tuple[Verdict, float]:
        """Return the verdict and the processor time it took in s; raises ``TimeoutError``."""
        owner = owner_of(pod)
        read = None if owner is None else await self._read(namespace, owner.read)
        if owner is not None and owner.must_be_read and read and read.get("kind") != owner.kind:
            read = await self._read(namespace, maker_of(owner, read))
        if values_beyond(read, POD_MAX_VALUES):
            read = None  # its plan would take as long as that of a pod of the size
        environ = {**self._environ, **await self._of_namespace(namespace)}

        def plan() -> tuple[Verdict, float]:
            begun_s = time.thread_time()
            verdict = decision.decide(
                pod,
                namespace,
                owner,
                read,
                environ,
                access=self._access,
                release=self._release,
            )
            return verdict, time.thread_time() - begun_s

        return await self._turns.planned(namespace, plan)

    async def _read(self, namespace: str, wanted: Reference | None) -> Object | None:
        """Read an owner's object, or take it from the cache; None if there is none to be had.

        The answer shows what the object says, so only a pod that has the object's UID gets it: who
        cannot read an object does not know its UID.
        """
        if wanted is None:
            return None
        path = paths.owner(wanted.api_version, wanted.kind, namespace, wanted.name)
        if path is None:
            return None
        return await self._found(path, f"{wanted.kind} {wanted.name}", "the pod alone", wanted.uid)

    async def _of_namespace(self, namespace: str) -> Mapping[str, str]:
        """Return the defaults that the annotations of the pods' namespace give, as variables."""
        what = f"Namespace {namespace}"
        found = await self._found(paths.namespace(namespace), what, "the defaults of the cluster")
        annotations = ((found or {}).get("metadata") or {}).get("annotations") or {}
        given = {TABLE[name].variable: annotations.get(annotation(name)) for name in OF_NAMESPACE}
        return {variable: text for variable, text in given.items() if text}

    async def _found(
        self, path: str, what: str, else_: str, uid: str | None = None
    ) -> Object | None:
        """Read an object, or take it from the cache; None if there is none, or none of ``uid``.

        ``uid`` None: whatever has the path. An empty one, as a pod may claim, is that of no object.

        ``else_``: what is used where it cannot be read, and was not before.
        """
        now_s = time.monotonic()
        known_as = path if uid is None else f"{path} {uid}"
        read_s, found = self._owners.get(known_as, (0.0, None))
        if found is not None and now_s - read_s < OWNER_FRESH_S:
            return found
        try:
            found = await self._read_once(known_as, path)
        except ClusterError as error:
            log.warning(
                "cannot read %s, using %s: %s",
                what,
                else_ if found is None else "what was read of it before",
                error,
                extra={"event": "owner_not_read"},
            )
            return found
        if uid is not None and uid != (found.get("metadata") or {}).get("uid"):
            return None
        self._owners[known_as] = (now_s, found)
        self._owners.move_to_end(known_as)
        while len(self._owners) > OWNERS_KEPT:
            self._owners.popitem(last=False)
        return found

    async def _read_once(self, known_as: str, path: str) -> Object:
        """Read the object, or join a read in progress: the pods of a job come at once."""
        reading = self._reading.get(known_as)
        if reading is None:
            reading = asyncio.create_task(self._api.get(path, READ_TIMEOUT_S))
            self._reading[known_as] = reading
            reading.add_done_callback(lambda _: self._reading.pop(known_as, None))
        return await asyncio.shield(reading)


def values_beyond(pod: object, most: int) -> bool:
    """Return whether ``pod`` has more than ``most`` values at any depth; counts no further."""
    count, rest = 0, [pod]
    while rest and count <= most:
        value: Any = rest.pop()
        count += 1
        if isinstance(value, Mapping):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
    return count + len(rest) > most


def _name_of(pod: Mapping[str, Any]) -> str:
    metadata = pod.get("metadata") or {}
    return metadata.get("name") or f"{metadata.get('generateName', '')}…"


def _tell(name: str, namespace: str, verdict: Verdict) -> None:
    if verdict.injected:
        text = "pod %s of namespace %s gets its sidecar"
        log.info(text, name, namespace, extra={"event": "pod_injected"})
    elif verdict.warnings:
        log.warning(
            "pod %s of namespace %s is admitted without Muster: %s",
            name,
            namespace,
            verdict.reason,
            extra={"event": "pod_not_injected"},
        )
