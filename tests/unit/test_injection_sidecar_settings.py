# SPDX-License-Identifier: Apache-2.0
"""The sidecar in clusters with rules and in meshes: resources, users, proxies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.admission.decision import decide
from controller.owner_kinds import owner_of
from tests.support.injection.injecting import (
    FLAGS,
    POD,
    again,
    environ,
    injected,
    lawful,
    loaded,
    manifest,
    pods,
    refused,
    removed,
    sidecars,
)
from tests.support.injection.owners import pods_of
from tests.support.injection.patching import patched

GUARANTEED = {"limits": {"cpu": "4", "memory": "8Gi"}}
BURSTABLE = {"requests": {"cpu": "1"}}
LIMITED = {"requests": {"cpu": "1"}, "limits": {"cpu": "4"}}


def sidecar(text: str) -> Any:
    (found,) = sidecars(text)
    return found


@pytest.mark.parametrize(
    ("trainer", "asked", "requests", "limits"),
    [
        (BURSTABLE, "cpu=125m:500m", ("125m", "128Mi"), ("500m", "128Mi")),
        (BURSTABLE, "cpu=125m", ("125m", "128Mi"), (None, "128Mi")),
        (LIMITED, "cpu=125m", ("125m", "128Mi"), ("125m", "128Mi")),
        (BURSTABLE, "memory=64Mi:256Mi", ("50m", "64Mi"), (None, "256Mi")),
        (GUARANTEED, "cpu=100m:200m,memory=256Mi", ("200m", "256Mi"), ("200m", "256Mi")),
        (GUARANTEED, "cpu=1", ("1", "128Mi"), ("1", "128Mi")),
    ],
)
def test_resources_keep_the_pods_class(
    trainer: Any, asked: str, requests: tuple[str, str], limits: tuple[str | None, str]
) -> None:
    text = manifest(command=["a"], resources=trainer)
    found = sidecar(injected(text, resources=asked).text)["resources"]
    for which, expected in (("requests", requests), ("limits", limits)):
        assert tuple(found[which].get(name) for name in ("cpu", "memory")) == expected


def test_a_best_effort_pod_stays_one() -> None:
    assert "resources" not in sidecar(injected(POD, resources="cpu=1").text)


def test_a_quota_of_local_disk_can_be_kept() -> None:
    text = manifest(command=["a"], resources=BURSTABLE)
    found = sidecar(injected(text, resources="ephemeral-storage=16Mi").text)["resources"]
    assert found["requests"]["ephemeral-storage"] == found["limits"]["ephemeral-storage"] == "16Mi"


def test_pull_secrets_join_those_of_the_pod() -> None:
    own = POD.replace("      volumes:", "      imagePullSecrets: [{name: team}]\n      volumes:")
    for text in (POD, own):
        (pod,) = pods(loaded(lawful(text, pull_secrets="mirror,team")))
        assert pod["imagePullSecrets"] == [{"name": "mirror"}, {"name": "team"}]
        notes = injected(text, pull_secrets="mirror,team").notes
        warned = [note for note in notes if "ServiceAccount's" in note]
        assert [note.level for note in warned] == ([] if text is own else ["warning"])


def test_a_changed_setting_wins_over_what_it_was_before() -> None:
    text = manifest(command=["a"], resources=BURSTABLE)
    made = injected(text, resources="cpu=1", user="none", pull_secrets="mirror,team").text
    other = again(made, resources="cpu=70m", pull_policy="Always", user="1000", pull_secrets="team")
    one = sidecar(other)
    assert one["resources"]["requests"]["cpu"] == "70m"
    assert one["imagePullPolicy"] == "Always"
    assert one["securityContext"]["runAsUser"] == 1000
    (pod,) = pods(loaded(other))
    assert pod["imagePullSecrets"] == [{"name": "team"}]
    assert removed(other) == text


def test_labelled_pod_gets_them_from_annotations_or_the_charts_defaults() -> None:
    (_, pod, read), *_ = pods_of(json.loads(manifest("Job", command=["torchrun"])))
    pod["spec"]["containers"][0]["resources"] = BURSTABLE
    pod["spec"]["imagePullSecrets"] = [{"name": "serviceaccounts"}]
    pod["metadata"]["annotations"] = {"muster.dev/resources": "cpu=80m"}
    rules = {"resources": "cpu=125m", "user": "none", "pull_policy": "IfNotPresent"}
    defaults = environ({**FLAGS, **rules, "pull_secrets": "mirror,team"})
    verdict = decide(pod, "default", owner_of(pod), read, defaults)
    assert not any("ServiceAccount" in one for one in verdict.warnings)
    made = patched(pod, verdict.patch)
    (one,) = made["spec"]["initContainers"]
    assert one["resources"]["requests"] == {"memory": "128Mi", "cpu": "80m"}
    assert one["imagePullPolicy"] == "IfNotPresent"
    assert "runAsUser" not in one["securityContext"]
    names = [secret["name"] for secret in made["spec"]["imagePullSecrets"]]
    assert names == ["mirror", "team", "serviceaccounts"]


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
    (pod,) = pods(loaded(lawful(text)))
    assert [one["name"] for one in pod["initContainers"]] == order


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
    proxy = {"name": "istio-proxy", "image": "p", "restartPolicy": "Always"}
    inits += [proxy, {"name": "fetch", "image": "f"}]
    verdict = decide(pod, "default", owner_of(pod), read, environ(FLAGS))
    made = patched(pod, verdict.patch)
    found = [one["name"] for one in made["spec"]["initContainers"]]
    assert found == ["istio-proxy", "muster", "fetch"]
    if not late:
        (added,) = [one for one in verdict.patch if one["path"].startswith("/spec/initC")]
        assert (added["op"], added["path"]) == ("add", "/spec/initContainers/1")
    again = decide(made, "default", owner_of(made), read, environ(FLAGS))
    assert again.patch == ()
