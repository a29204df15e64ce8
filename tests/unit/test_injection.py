# SPDX-License-Identifier: Apache-2.0
"""Whatever a manifest looks like: nothing is lost, nothing is done twice, all can be undone."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from injection.injection import Request, inject
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    FLAGS,
    again,
    injected,
    keeps,
    lawful,
    loaded,
    pods,
    refused,
    removed,
    sidecars,
    variables,
)

everything = pytest.mark.parametrize("name", CORPUS)
OURS = "/var/run/muster/bin/"
RULES = {
    "resources": "cpu=125m:500m,memory=256Mi",
    "user": "none",
    "pull_policy": "IfNotPresent",
    "pull_secrets": "mirror,team",
}


def keeps_all(text: str, change: dict[str, str], **flags: str | None) -> str:
    """Inject by the laws: what was there stays, and a changed setting wins."""
    result = lawful(text, **flags)
    assert again(result, **change) == injected(text, **flags, **change).text
    before, after = loaded(text), loaded(result)
    assert keeps(after, before)
    for old, new in zip(pods(before), pods(after), strict=True):
        for one, other in zip(old["containers"], new["containers"], strict=True):
            command = one.get("command") or []
            run = [f"{OURS}muster-run", "--"]
            workers = [*run, f"{OURS}muster-exec", "--", *command]
            assert (other.get("command") or []) in (command, [*run, *command], workers)
    return result


@everything
@pytest.mark.parametrize("flags", [{}, RULES], ids=["plain", "rules"])
def test_it_comes_out_again_goes_in_once_and_loses_nothing(
    name: str, flags: dict[str, str]
) -> None:
    keeps_all(CORPUS[name], {"slots": "5"}, **flags)


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
    text = injected(CORPUS[name]).text
    assert sidecars(text)
    for pod in pods(loaded(text)):
        ours = (pod.get("initContainers") or [{"name": ""}])[0]
        if ours["name"] != "muster":
            continue
        assert ours["restartPolicy"] == "Always"
        assert ours["lifecycle"]["preStop"]["exec"]["command"] == ["muster", "notice"]
        assert ours["startupProbe"]["httpGet"] == ours["readinessProbe"]["httpGet"]
        said = variables(ours)
        assert said["MUSTER_MIN"] == "2"
        assert said["MUSTER_GRACE_S"] == str(pod["terminationGracePeriodSeconds"])
        assert {v["name"] for v in ours["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}
        trainer = next(
            c
            for c in pod["containers"]
            if any(m["name"] == "muster-run" for m in c.get("volumeMounts") or [])
        )
        wrapped = (trainer.get("command") or [""])[0] == f"{OURS}muster-run"
        hook = (trainer.get("lifecycle") or {}).get("preStop")
        assert wrapped or hook == {"exec": {"command": [f"{OURS}muster-hold"]}}
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


# --- whatever comes ---

WORDS = st.sampled_from(
    ["a", "yes", "0x1f", "1e3", "a: b", "# no", "*x", "&y", "--", "{a}", "é", " ", "a\nb", "null"]
)
COMMENTS = st.sampled_from(["", "# why", "#", "  # - item: x", "# {", "# *a &b", "#    indented"])
PRE_STOP = {"preStop": {"sleep": {"seconds": 1}}}


def shuffled(draw: st.DrawFn, made: dict[str, Any]) -> dict[str, Any]:
    return {key: made[key] for key in draw(st.permutations(list(made)))}


def containers(name: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"name": st.just(name), "image": WORDS},
        optional={
            "command": st.lists(WORDS, min_size=1, max_size=3),
            "args": st.lists(WORDS, max_size=3),
            "env": st.lists(st.fixed_dictionaries({"name": WORDS, "value": WORDS}), max_size=2),
            "volumeMounts": st.just([{"name": "data", "mountPath": "/data"}]),
            "lifecycle": st.sampled_from([{}, PRE_STOP, {"postStart": {}}]),
            "resources": st.sampled_from([{}, {"limits": {"cpu": 1, "memory": "1Gi"}}]),
        },
    )


PODS = st.fixed_dictionaries(
    {
        "containers": st.tuples(containers("c"), st.none() | containers("d")).map(
            lambda both: [one for one in both if one]
        )
    },
    optional={
        "initContainers": st.sampled_from([[], [{"name": "i", "image": "i"}]]),
        "volumes": st.just([{"name": "data", "emptyDir": {}}]),
        "terminationGracePeriodSeconds": st.integers(1, 600),
    },
)
METADATA: st.SearchStrategy[Any] = st.sampled_from(
    [None, {}, {"labels": {}}, {"labels": {"a": "b"}}, {"annotations": {"x": "y"}}]
)


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    pod: dict[str, Any] = draw(PODS)
    pod["containers"] = [shuffled(draw, one) for one in pod["containers"]]
    template: dict[str, Any] = {"spec": pod, "metadata": draw(METADATA)}
    if template["metadata"] is None:
        del template["metadata"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "digits"},
        "spec": {"template": shuffled(draw, template)},
    }


class Indented(yaml.SafeDumper):  # type: ignore[misc]
    """Writes the dashes of a list deeper than its key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


@st.composite
def texts(draw: st.DrawFn) -> str:
    value = draw(manifests())
    if draw(st.integers(0, 4)) == 0:
        return json.dumps(value, indent=draw(st.sampled_from([None, 1, 2, 4])))
    text = yaml.dump(
        value,
        Dumper=draw(st.sampled_from([yaml.SafeDumper, Indented])),
        default_flow_style=draw(st.sampled_from([False, False, None, True])),
        indent=draw(st.sampled_from([2, 3, 4])),
        width=draw(st.sampled_from([20, 80, 1000])),
        sort_keys=draw(st.booleans()),
        allow_unicode=True,
    )
    lines = text.splitlines()
    for at in draw(st.lists(st.integers(0, len(lines)), max_size=6)):
        # A comment may stand before a key or an item, wherever no text is going on.
        following = lines[at].lstrip() if at < len(lines) else ""
        if following.startswith(("- ", "apiVersion", "kind", "metadata", "spec", "image", "name:")):
            lines.insert(at, draw(COMMENTS))
    ending = draw(st.sampled_from(["\n", "\n", "\r\n"]))
    result = ending.join(lines) + draw(st.sampled_from(["", ending, ending + ending]))
    return result if loaded(result) == [value] else text


@given(texts(), st.sampled_from([None, "true", "false"]))
@settings(max_examples=30, deadline=None)
def test_whatever_it_looks_like(text: str, wrap: str | None) -> None:
    command = _trainer(text).get("command")
    if wrap == "true" and command is None:
        assert "--wrap" in refused(text, container="c", wrap=wrap)[0]
        return
    after = _trainer(keeps_all(text, {"max_nodes": "9"}, container="c", wrap=wrap))
    wrapped = [f"{OURS}muster-run", "--", *(command or [])]
    assert after.get("command") == (wrapped if command and wrap != "false" else command)


def _trainer(text: str) -> Any:
    (pod,) = pods(loaded(text))
    return next(container for container in pod["containers"] if container["name"] == "c")


ODD: list[Any] = [None, "x", 3, True, 1.5, [], {}, [None], ["a"], [[]], [{}], {"a": 1}]
ODD += [{"name": 3}, [{"name": []}]]


@given(st.data(), st.sampled_from(["commented-deployment", "mpi", "hold", "settings-by-hand"]))
@settings(max_examples=30, deadline=None)
def test_whatever_is_wrong_in_it_is_refused_or_undone(data: st.DataObject, name: str) -> None:
    value = deepcopy(loaded(CORPUS[name])[0])
    holder, key = data.draw(st.sampled_from(list(_places(value))))
    holder[key] = data.draw(st.sampled_from(ODD))
    text = yaml.safe_dump(value)
    try:
        result = injected(text).text
    except ConfigError:
        return
    assert removed(result) == text
    assert again(result) == result


def _places(value: Any) -> Any:
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


@given(st.text(st.sampled_from("ab:-[]{}#&*|>'\"\n \t?!%,"), max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(text, Request(FLAGS, {}))
    assert str(caught.value)
