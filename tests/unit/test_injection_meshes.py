# SPDX-License-Identifier: Apache-2.0
"""Pods of a mesh: its native proxy starts before the sidecar, and it is never what trains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.admission.decision import decide
from controller.owner_kinds import owner_of
from injection.injection import take_out
from tests.support.injection.injecting import (
    FLAGS,
    again,
    environ,
    injected,
    loaded,
    manifest,
    pods,
    refused,
)
from tests.support.injection.owners import pods_of
from tests.support.injection.patching import patched

BLOCK = """\
apiVersion: v1
kind: Pod
metadata: {name: digits-0}
spec:
  initContainers:
    # takes over the network
    - name: istio-validation
      image: p
    - image: p   # the proxy
      restartPolicy: Always
      name: istio-proxy
      args:
        - |
          a
          b

    # the user's own
    - name: fetch
      image: f
  containers:
    - name: t
      image: i
      command: ["torchrun"]
"""
LAST = BLOCK.replace(
    "    # the user's own\n    - name: fetch\n      image: f\n", "    # behind it\n"
)
FLOW = BLOCK[: BLOCK.index("initC")] + (
    "initContainers: [{name: linkerd-proxy, restartPolicy: Always, image: p},  {name: fetch}]\n"
    "  containers: [{name: t, image: i, command: [torchrun]}]\n"
)
LAST_IN_FLOW = FLOW.replace(",  {name: fetch}", "")


def native(name: str) -> dict[str, str]:
    return {"name": name, "image": "p", "restartPolicy": "Always"}


def names(text: str) -> list[str]:
    (pod,) = pods(loaded(text))
    return [one["name"] for one in pod["initContainers"]]


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (BLOCK, ["istio-validation", "istio-proxy", "muster", "fetch"]),
        (LAST, ["istio-validation", "istio-proxy", "muster"]),
        (FLOW, ["linkerd-proxy", "muster", "fetch"]),
        (LAST_IN_FLOW, ["linkerd-proxy", "muster"]),
        (
            json.dumps(loaded(BLOCK)[0], indent=2),
            ["istio-validation", "istio-proxy", "muster", "fetch"],
        ),
        (BLOCK.replace("\n", "\r\n"), ["istio-validation", "istio-proxy", "muster", "fetch"]),
        (
            BLOCK.replace("Always", "OnFailure"),
            ["muster", "istio-validation", "istio-proxy", "fetch"],
        ),
    ],
    ids=["block", "last", "flow", "last-in-flow", "json", "crlf", "not-native"],
)
def test_sidecar_starts_after_a_native_proxy(text: str, order: list[str]) -> None:
    made = injected(text).text
    assert names(made) == order
    assert again(made) == made
    assert take_out(made).text == text


def test_proxy_by_an_alias_is_refused() -> None:
    text = f"x: &p {{name: istio-proxy, image: p, restartPolicy: Always}}\n{BLOCK}".replace(
        BLOCK[BLOCK.index("    - image: p ") : BLOCK.index("\n    # the user's")], "    - *p"
    )
    (line,) = refused(text)
    assert "is an alias: write it out there" in line


@pytest.mark.parametrize("proxy", ["istio-proxy", "linkerd-proxy"])
def test_proxy_is_no_candidate_for_training(proxy: str) -> None:
    before, after = {"name": proxy, "image": "p"}, {"name": "t", "image": "i", "command": ["a"]}
    text = manifest(pod={"containers": [before, after]})
    (pod,) = pods(loaded(injected(text).text))
    assert [one["command"][-1] if "command" in one else None for one in pod["containers"]] == [
        None,
        "a",
    ]
    assert any("starts only after the sidecar" in note for note in injected(text).notes)
    (line,) = refused(text, container=proxy)
    assert f"{proxy} is a mesh's proxy" in line
    (line,) = refused(manifest(pod={"containers": [before]}))
    assert "containers is empty or missing" in line


@pytest.mark.parametrize("late", [False, True])
def test_labelled_pod_starts_after_the_proxy(late: bool) -> None:
    """Whether the mesh's webhook comes before ours or, with the sidecar there already, after it."""
    text = manifest("Job", command=["torchrun"])
    if late:
        text = injected(text).text
    (_, pod, read), *_ = pods_of(json.loads(text))
    inits: list[Any] = pod["spec"].setdefault("initContainers", [])
    inits += [native("istio-proxy"), {"name": "fetch", "image": "f"}]
    verdict = decide(pod, "default", owner_of(pod), read, environ(FLAGS))
    made = patched(pod, verdict.patch)
    found = [one["name"] for one in made["spec"]["initContainers"]]
    assert found == ["istio-proxy", "muster", "fetch"]
    if not late:
        (added,) = [one for one in verdict.patch if one["path"].startswith("/spec/initC")]
        assert (added["op"], added["path"]) == ("add", "/spec/initContainers/1")
    again = decide(made, "default", owner_of(made), read, environ(FLAGS))
    assert again.patch == ()
