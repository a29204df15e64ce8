# SPDX-License-Identifier: Apache-2.0
"""Whatever a manifest looks like: nothing is lost, nothing is done twice, all can be undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from console.inject.injection import Request, inject
from console.inject.removal import removed
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, again, injected, keeps, loaded

WORDS = st.sampled_from(
    ["a", "yes", "0x1f", "1e3", "a: b", "# no", "*x", "&y", "--", "{a}", "é", " ", "a\nb", "null"]
)
COMMENTS = st.sampled_from(["", "# why", "#", "  # - item: x", "# {", "# *a &b", "#    indented"])


@st.composite
def containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "image": draw(WORDS)}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "command": st.lists(WORDS, min_size=1, max_size=3),
        "args": st.lists(WORDS, max_size=3),
        "env": st.lists(st.fixed_dictionaries({"name": WORDS, "value": WORDS}), max_size=2),
        "volumeMounts": st.just([{"name": "data", "mountPath": "/data"}]),
        "lifecycle": st.sampled_from(
            [{}, {"preStop": {"sleep": {"seconds": 1}}}, {"postStart": {}}]
        ),
        "resources": st.sampled_from([{}, {"limits": {"cpu": 1, "memory": "1Gi"}}]),
    }
    for key, values in optional.items():
        if draw(st.booleans()):
            made[key] = draw(values)
    keys = draw(st.permutations(list(made)))
    return {key: made[key] for key in keys}


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    pod: dict[str, Any] = {"containers": [draw(containers("c"))]}
    if draw(st.booleans()):
        pod["containers"].append(draw(containers("d")))
    if draw(st.booleans()):
        pod["initContainers"] = draw(st.sampled_from([[], [{"name": "i", "image": "i"}]]))
    if draw(st.booleans()):
        pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    if draw(st.booleans()):
        pod["terminationGracePeriodSeconds"] = draw(st.integers(1, 600))
    template: dict[str, Any] = {"spec": pod}
    if draw(st.booleans()):
        template["metadata"] = draw(
            st.sampled_from(
                [{}, {"labels": {}}, {"labels": {"a": "b"}}, {"annotations": {"x": "y"}}]
            )
        )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "digits"},
        "spec": {"template": {key: template[key] for key in draw(st.permutations(list(template)))}},
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


@pytest.mark.timeout(300)  # a few seconds of work, on a machine that may be busy
@given(texts(), st.sampled_from([None, "true", "false"]))
@settings(max_examples=30, deadline=None)
def test_whatever_it_looks_like(text: str, wrap: str | None) -> None:
    if wrap == "true" and "command" not in _trainer(text):
        with pytest.raises(ConfigError, match="--wrap"):
            injected(text, container="c", wrap=wrap)
        return
    result = injected(text, container="c", wrap=wrap).text
    (before,), (after,) = loaded(text), loaded(result)
    assert keeps(after, before)
    assert removed(result) == text
    assert again(result) == result
    assert (
        again(result, max_nodes="9") == injected(text, container="c", wrap=wrap, max_nodes="9").text
    )
    old, new = _trainer(text), _trainer(result)
    command = old.get("command")
    wrapped = ["/var/run/muster/bin/muster-run", "--", *(command or [])]
    assert new.get("command") == (wrapped if command and wrap != "false" else command)


def _trainer(text: str) -> Any:
    found = loaded(text)[0]["spec"]["template"]["spec"]["containers"]
    return next(container for container in found if container["name"] == "c")


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        "x",
        3,
        True,
        1.5,
        [],
        {},
        [None],
        ["a"],
        [[]],
        [{}],
        {"a": 1},
        {"name": 3},
        [{"name": []}],
    ]
)


@given(st.data(), st.sampled_from(["commented-deployment", "mpi", "hold", "settings-by-hand"]))
@settings(max_examples=30, deadline=None)
def test_whatever_is_wrong_in_it_is_refused_or_undone(data: st.DataObject, name: str) -> None:
    value = deepcopy(loaded(CORPUS[name])[0])
    places = list(_places(value))
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(ODD)
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


@pytest.mark.parametrize("edit", [lambda t: t, lambda t: t.replace("app: 'digits'", "app: other")])
def test_what_hands_change_elsewhere_stays_when_it_is_taken_out(edit: Callable[[str], str]) -> None:
    before = CORPUS["commented-deployment"]
    assert removed(edit(injected(before).text)) == edit(before)
