# SPDX-License-Identifier: Apache-2.0
"""Reviews that anybody may send: each is answered, and costs a bounded amount of processor time."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from controller.admission.injector import POD_MAX_BYTES, POD_MAX_VALUES, AdmissionMetrics, Injector
from injection.settings import TABLE, annotation
from rdzv.errors import ClusterRefused, ConfigError
from tests.support.injection.injecting import FLAGS, environ, manifest
from tests.support.injection.owners import pods_of

CPU_MAX_S = 3.0
"""Of one review, for all threads of the process: ten times what the largest costs."""
REVIEWS = 500
JUNK: list[Any] = [
    None,
    "",
    0,
    -1,
    1.5,
    True,
    [],
    {},
    "a",
    [None],
    [{}],
    {"a": None},
    "é\0",
    {"name": 3},
]
PIECES = [
    "/",
    "{",
    "}",
    "a",
    "a/",
    "{a/",
    ",",
    "1,",
    "=",
    "cpu=1,",
    ":",
    "https://",
    "--",
    " ",
    "\\",
    ".",
]


class NoObjects:
    """An API server in which no owner is to be found."""

    async def get(self, *given: Any) -> Any:
        raise ClusterRefused("there is none", 404)


def labelled() -> dict[str, Any]:
    (_, pod, _), *_ = pods_of(json.loads(manifest("Job", command=["torchrun", "t.py"])))
    return pod


async def answered(pod: Any) -> float:
    """Send a review of the pod; return the processor time that it took, in seconds."""
    api: Any = NoObjects()
    injector = Injector(api, environ(FLAGS), AdmissionMetrics(), access=True)
    body = json.dumps({"request": {"uid": "u", "namespace": "team", "object": pod}}).encode()
    begun_s = time.process_time()
    try:
        answer = json.loads(await injector.answer(body))
        assert answer["response"]["allowed"] is True
    except ConfigError as error:
        assert "no AdmissionReview of a pod" in str(error)  # noqa: PT017 - it is one of two outcomes
    return time.process_time() - begun_s


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, below in inner for place in places(below, (*path, key)))]


def mutated(pod: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    for _ in range(chance.randint(1, 4)):
        *way, last = chance.choice([path for path in places(pod) if path])
        at: Any = pod
        for key in way:
            at = at[key]
        at[last] = json.loads(json.dumps(chance.choice(JUNK)))
    if isinstance(pod.get("metadata"), dict):
        name = annotation(chance.choice([*TABLE]))
        text = chance.choice(PIECES) * chance.choice([1, 100, 4000, 200_000])
        notes = pod["metadata"].get("annotations")
        pod["metadata"]["annotations"] = {**(notes if isinstance(notes, dict) else {}), name: text}
    return pod


async def test_mutated_reviews_are_answered_in_bounded_time() -> None:
    chance = random.Random(1)
    for _ in range(REVIEWS):
        pod = mutated(labelled(), chance)
        assert await answered(pod) < CPU_MAX_S, json.dumps(pod)[:2000]


LARGEST: dict[str, Any] = {
    "args": {"args": ["a"] * (POD_MAX_VALUES - 200)},
    "bytes": {"args": ["a" * (POD_MAX_BYTES - 5000)]},
    "shell": {"command": ["sh", "-c", "a; " * ((POD_MAX_BYTES - 5000) // 3)]},
    "quotes": {"command": ["sh", "-c", "' " * ((POD_MAX_BYTES - 5000) // 2)]},
    "env": {"env": [{"name": f"E{n}", "value": "v"} for n in range(POD_MAX_VALUES // 3 - 100)]},
    "ports": {"ports": [{"containerPort": n} for n in range(POD_MAX_VALUES // 2 - 100)]},
}


@pytest.mark.parametrize("much", sorted(LARGEST))
async def test_largest_pods_are_answered_in_bounded_time(much: str) -> None:
    pod = labelled()
    pod["spec"]["containers"][0] |= LARGEST[much]
    assert await answered(pod) < CPU_MAX_S
