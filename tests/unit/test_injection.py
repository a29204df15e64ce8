# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` keeps, and what it does: on manifests as people write them."""

from __future__ import annotations

import json

import pytest

from console.inject.removal import removed
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import again, injected, keeps, loaded, pods

everything = pytest.mark.parametrize("name", CORPUS)


@everything
def test_taking_it_out_again_restores_every_byte(name: str) -> None:
    result = injected(CORPUS[name]).text
    assert result != CORPUS[name]
    assert removed(result) == CORPUS[name]


@everything
def test_injecting_again_changes_nothing(name: str) -> None:
    result = injected(CORPUS[name]).text
    assert again(result) == result


@everything
def test_a_new_flag_changes_what_it_says_alone(name: str) -> None:
    result = again(injected(CORPUS[name], slots="3").text, slots="5")
    assert result == injected(CORPUS[name], slots="5").text
    assert loaded(result) != loaded(injected(CORPUS[name], slots="3").text) or "launcher" in result


@everything
def test_nothing_of_the_users_is_lost(name: str) -> None:
    before, after = loaded(CORPUS[name]), loaded(injected(CORPUS[name]).text)
    assert keeps(after, before)
    for old, new in zip(pods(before), pods(after), strict=True):
        for one, other in zip(old["containers"], new["containers"], strict=True):
            command = one.get("command") or []
            assert (other.get("command") or [])[-len(command) or 99 :] == command


@everything
def test_every_line_of_the_users_stays_as_it_is(name: str) -> None:
    """But for lists in brackets, whose one line grows."""
    lines = injected(CORPUS[name]).text.splitlines()
    for line in CORPUS[name].splitlines():
        if not set("[{") & set(line):
            assert line in lines
            lines = lines[lines.index(line) + 1 :]


@everything
def test_the_sidecar_is_first_and_complete(name: str) -> None:
    found = [p for p in pods(loaded(injected(CORPUS[name]).text)) if p.get("initContainers")]
    found = [p for p in found if p["initContainers"][0]["name"] == "muster"]
    assert found
    for pod in found:
        ours = pod["initContainers"][0]
        assert ours["restartPolicy"] == "Always"
        assert ours["lifecycle"]["preStop"]["exec"]["command"] == ["muster", "notice"]
        assert ours["startupProbe"]["httpGet"] == ours["readinessProbe"]["httpGet"]
        said = {v["name"]: v.get("value") for v in ours["env"]}
        assert said["MUSTER_MIN"] == "2"
        assert said["MUSTER_GRACE_S"] == str(pod["terminationGracePeriodSeconds"])
        assert {v["name"] for v in ours["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}
        trainer = next(
            c
            for c in pod["containers"]
            if any(m["name"] == "muster-run" for m in c.get("volumeMounts") or [])
        )
        wrapped = (trainer.get("command") or [""])[0].endswith("/muster-run")
        hook = (trainer.get("lifecycle") or {}).get("preStop")
        assert wrapped or hook == {"exec": {"command": ["/var/run/muster/bin/muster-hold"]}}
        assert (said["MUSTER_C10D_PORT"] == "0") == wrapped


def test_json_stays_json() -> None:
    result = injected(CORPUS["json"]).text
    assert json.loads(result) == loaded(result)[0]
    assert '\n                "initContainers": [\n' in result


def test_comments_stay_with_what_they_are_about() -> None:
    lines = injected(CORPUS["commented-deployment"]).text.splitlines()
    for comment, follower in (
        ("# one of them", "app: 'digits'"),
        ("# fetch", "- image: example.org/fetch:1"),
        ("# how loud", "- name: LOG"),
        ("# deeper than the rest", "- torchrun"),
    ):
        place = next(n for n, line in enumerate(lines) if line.strip() == comment)
        assert lines[place + 1].strip() == follower


def test_one_template_under_two_names_gets_one_sidecar() -> None:
    result = injected(CORPUS["anchors"]).text
    assert result.count("- name: muster\n") == 1
    replicas = loaded(result)[0]["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
