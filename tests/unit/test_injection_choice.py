# SPDX-License-Identifier: Apache-2.0
"""Of several objects, and of several containers, only those that were chosen are touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from injection.injection import Injected, Request, inject, take_out
from rdzv.errors import ConfigError
from tests.support.injection.injecting import (
    FLAGS,
    again,
    loaded,
    pods,
    removed,
    sidecars,
    variables,
)

UNNAMED = {**FLAGS, "job": None}


def job(name: str) -> str:
    return f"""\
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  template:
    spec:
      containers:
        - name: c   # of {name}
          image: i
          command: [torchrun, {name}.py]
"""


TWO = job("a") + "---\n" + job("b")
UNKNOWN = """\
apiVersion: example.org/v1
kind: Ring
metadata: {name: a}
spec:
  pod: {spec: {containers: [{name: c, image: i, command: [a]}]}}
---
apiVersion: example.org/v1
kind: Star
metadata: {name: b}
spec:
  other: {spec: {containers: [{name: c, image: i, command: [b]}]}}
"""


def into(text: str, *objects: str, path: str | None = None, **flags: str | None) -> Injected:
    return inject(text, Request({**UNNAMED, **flags}, {}, objects, path))


def halves(text: str) -> list[str]:
    one, other = text.split("---\n")
    return [one, other]


def jobs_told(text: str) -> list[str | None]:
    """The job that each object's sidecar is told; None where there is no sidecar."""
    found = [sidecars(json.dumps(one)) for one in loaded(text)]
    return [variables(one[0])["MUSTER_JOB"] if one else None for one in found]


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def test_one_object_after_the_other() -> None:
    with_a = into(TWO, "Job/a")
    both = into(with_a.text, "Job/b")
    assert jobs_told(with_a.text) == ["a", None]
    assert jobs_told(both.text) == ["a", "b"]
    assert halves(both.text)[0] == halves(with_a.text)[0]
    assert "Job/a: left as it is: no --object names it" in both.notes
    assert both.text == into(TWO, "job/*").text
    assert again(both.text) == both.text
    assert removed(both.text) == TWO


def test_a_flag_for_one_object_leaves_the_sidecar_of_the_other() -> None:
    both = into(TWO, "Job/*").text
    changed = into(both, "Job/b", max_nodes="9").text
    assert halves(changed)[0] == halves(both)[0]
    assert 'muster.dev/max: "9"' in halves(changed)[1]
    assert again(changed) == changed


@pytest.mark.parametrize(
    ("text", "objects", "path"), [(TWO, ["job/b"], None), (UNKNOWN, [], "spec.other")]
)
def test_one_sidecar_is_taken_out(text: str, objects: Sequence[str], path: str | None) -> None:
    paths = [None] if path is None else ["spec.pod", "spec.other"]
    both = text
    for each in paths:
        both = into(both, "*/*", path=each).text
    assert jobs_told(both) == ["a", "b"]
    left = take_out(both, objects, path)
    assert halves(left.text) == [halves(both)[0], halves(text)[1]]
    assert len(left.notes) == 1
    assert "/a: left as it is: " in left.notes[0]
    assert take_out(both).text == text


@pytest.mark.parametrize("act", [lambda: take_out(TWO, ["Job/x"]), lambda: into(TWO, "Job/x")])
def test_an_object_that_is_not_there(act: Callable[[], object]) -> None:
    assert "nothing is called Job/x here; there are Job/a, Job/b" in refused(act)


def test_of_several_objects_one_must_be_named() -> None:
    said = refused(lambda: into(TWO))
    assert "--object Job/a" in said
    assert "there are Job/a, Job/b" in said


def test_taking_out_where_there_is_none() -> None:
    with_a = into(TWO, "Job/a").text
    left = take_out(with_a, ["Job/b"])
    assert left.text == with_a
    assert left.notes == (
        "Job/a: left as it is: no --object names it",
        "Job/b: left as it is: there is no sidecar in it",
    )


def in_a_list(*objects: str) -> str:
    """One document, as an anchor is known in its own alone."""
    lines = [line for text in objects for line in _as_item(text)]
    return "\n".join(["apiVersion: v1", "kind: List", "items:", *lines, ""])


def _as_item(text: str) -> list[str]:
    first, *rest = text.splitlines()
    return [f"  - {first}", *("    " + line for line in rest)]


def deployment(name: str, spec: str, template: str = "") -> str:
    return (
        f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {name}}}\n"
        f"spec:\n  template:{template}\n    spec: {spec}\n"
    )


POD = """&pod
      containers:
        - &c
          name: c
          image: i
          command: [torchrun]"""
PLAIN = POD.replace(" &c\n          ", " ").removeprefix("&pod")
OTHER = "\n        - name: d\n          image: i\n          command: [cat]"


def anchored(old: str, new: str, text: str = PLAIN + OTHER) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "used", "written"),
    [
        pytest.param(
            in_a_list(deployment("a", POD), deployment("b", "*pod")),
            "Deployment/b: spec.template.spec",
            "Deployment/a: spec.template.spec",
            id="a pod",
        ),
        pytest.param(
            in_a_list(deployment("a", POD), deployment("b", "{containers: [*c]}")),
            "Deployment/b: spec.template.spec.containers.c",
            "Deployment/a: spec.template.spec.containers.c",
            id="a container",
        ),
        pytest.param(
            in_a_list(deployment("a", POD), deployment("b", "{containers: [{<<: *c, name: e}]}")),
            "Deployment/b: spec.template.spec.containers.e.<<",
            "Deployment/a: spec.template.spec.containers.c",
            id="a container that is merged",
        ),
        pytest.param(
            deployment("a", anchored("[cat]", "*run", anchored("[torchrun]", "&run [torchrun]"))),
            "Deployment/a: spec.template.spec.containers.d.command",
            "Deployment/a: spec.template.spec.containers.c.command",
            id="a command",
        ),
        pytest.param(
            deployment(
                "a",
                anchored(
                    "command: [cat]",
                    "volumeMounts: *m",
                    anchored(
                        "command: [torchrun]",
                        "command: [torchrun]\n          volumeMounts: &m"
                        "\n            - {name: data, mountPath: /data}",
                    ),
                ),
            ),
            "Deployment/a: spec.template.spec.containers.d.volumeMounts",
            "Deployment/a: spec.template.spec.containers.c.volumeMounts",
            id="mounts",
        ),
        pytest.param(
            deployment("a", PLAIN, "\n    metadata: {labels: &l {app: a}}")
            + "  selector: {matchLabels: *l}\n",
            "Deployment/a: spec.selector.matchLabels",
            "Deployment/a: spec.template.metadata.labels",
            id="labels",
        ),
        pytest.param(
            in_a_list(deployment("a", PLAIN, " &t"), "kind: Deployment\nspec: {template: *t}\n"),
            "Deployment/?: spec.template",
            "Deployment/a: spec.template",
            id="a template",
        ),
    ],
)
def test_an_anchor_that_others_use(text: str, used: str, written: str) -> None:
    (line,) = refused(lambda: into(text, "Deployment/a", container="c")).splitlines()
    assert line.startswith(f"{used} is written at {written}, ")
    assert line.endswith(" would change with it: write it out in its own place")


@pytest.mark.parametrize(
    ("spec", "path"),
    [("*pod", "spec.template.spec"), ("{containers: [*c]}", "spec.template.spec.containers[c]")],
)
@pytest.mark.parametrize("wrap", ["true", "false"])
def test_an_anchor_that_all_who_train_use(spec: str, path: str, wrap: str) -> None:
    """With volumes and a grace of its own nothing else would go into the pod itself."""
    full = POD.replace(
        "\n      containers",
        "\n      terminationGracePeriodSeconds: 30\n      initContainers: [{name: i, image: i}]"
        "\n      volumes: [{name: data, emptyDir: {}}]\n      containers",
    )
    text = in_a_list(deployment("a", full), deployment("b", spec))
    (line,) = refused(lambda: into(text, "Deployment/*", wrap=wrap)).splitlines()
    assert line.startswith(f"Deployment/b: {path} (line ")
    assert "is an alias: write it out there" in line


TEMPLATE = "Deployment/b: spec.template is written at Deployment/a: spec.template, "
BARE = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: b}\nspec:\n  template: *t\n"


@pytest.mark.parametrize("chosen", ["Deployment/*", "Deployment/b"])
def test_one_template_of_two_objects_would_tell_both_one_job(chosen: str) -> None:
    text = in_a_list(deployment("a", PLAIN, " &t"), BARE)
    assert refused(lambda: into(text, chosen)).startswith(TEMPLATE)


def test_a_sidecar_that_two_share_is_not_taken_from_one() -> None:
    """Hands, or a former version, may have made it so."""
    with_a = into(job("a"), "Job/a").text.replace("    spec:\n", "    spec: &pod\n", 1)
    text = in_a_list(with_a, deployment("b", "*pod"))
    said = "Deployment/b: spec.template.spec is written at Job/a: spec.template.spec, "
    assert refused(lambda: take_out(text, ["Job/a"])).startswith(said)


HARMLESS: list[Any] = [
    pytest.param(anchored("[cat]", "[*w]", anchored("[torchrun]", "[&w torchrun]")), id="a word"),
    pytest.param(anchored("name: d", "<<: &d {tty: true}\n          name: d"), id="a merge"),
]


@pytest.mark.parametrize("spec", HARMLESS)
def test_an_anchor_that_does_no_harm(spec: str) -> None:
    text = deployment("a", spec)
    result = into(text, container="c").text
    assert removed(result) == text
    (before,), (after,) = pods(loaded(text)), pods(loaded(result))
    assert after["containers"][1] == before["containers"][1]
