# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` refuses: one sentence each, with the field and the remedy."""

from __future__ import annotations

import pytest

from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import POD, injected, refused


def changed(old: str, new: str, text: str = POD) -> str:
    assert old in text
    return text.replace(old, new, 1)


def before(new: str, old: str = "volumes:") -> tuple[str, str]:
    """A line before another one of the pod."""
    return old, f"{new}\n      {old}"


TAKEN_PORT = "image: i\n          ports: [{containerPort: 9400}]"
TAKEN_PLACE = "image: i\n          volumeMounts: [{name: data, mountPath: /var/run/muster/}]"
ABOVE_IT = "image: i\n          volumeMounts: [{name: data, mountPath: /var/run/muster/bin}]"
WINDOWS = "nodeSelector: {kubernetes.io/os: windows}"


def nodes(*terms: str) -> str:
    asked = ", ".join(f"{{matchExpressions: [{term}]}}" for term in terms)
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return f"affinity: {{nodeAffinity: {{{required}: {{nodeSelectorTerms: [{asked}]}}}}}}"


OS = "{key: kubernetes.io/os, operator: In, values: [%s]}"
BUILD = "{key: node.kubernetes.io/windows-build, operator: Exists}"
GPU = "{key: gpu, operator: Exists}"
GRACE = "terminationGracePeriodSeconds"
NO_PODS = "spec: {}\n    was:\n      volumes"
ENV = "env:\n            - name: A\n              value: b"
KUBEFLOW = "apiVersion: trainer.kubeflow.org/v1alpha1\n"
SCALE_IN = (
    "apiVersion: kai.alibabacloud.com/v1alpha1\nkind: ScaleIn\nspec: {toDelete: {count: 1}}\n"
)
CLASS = "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: a}\nvalue: 1\n"
NO_OBJECT = "there is no object in this text: give a manifest"
NO_TEMPLATE = "left as it is: there is no pod template in it"
ALIASES = [f"b{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("name: trainer", "name: muster"), ["a container muster", "remove or rename it"]),
        (("name: data", "name: muster-run"), ["a volume muster-run", "rename it"]),
        (("name: data", "name: muster-etcd"), ["a volume muster-etcd", "rename it"]),
        (("image: i", TAKEN_PORT), ["container trainer has port 9400", "--http-port"]),
        (("image: i", TAKEN_PLACE), ["a mount at /var/run/muster,", "move it"]),
        (("image: i", ABOVE_IT), ["a mount at /var/run/muster/bin,", "move it"]),
        (("name: A", "name: MUSTER_RUN_DIR"), ["sets MUSTER_RUN_DIR to 'b'", "remove it"]),
        (before(f"{GRACE}: 0"), [GRACE, "give some seconds"]),
        (before(f'{GRACE}: "30"'), ["is '30', and it", "in digits alone"]),
        (before(f"{GRACE}: 30.0"), ["is '30.0', and it", "in digits alone"]),
        (before(f"{GRACE}: true"), ["is True, and it", "in digits alone"]),
        (before("os: {name: windows}"), ["spec.os.name is windows", "Linux"]),
        (before(WINDOWS), ["nodeSelector asks for kubernetes.io/os windows", "Linux"]),
        (before(nodes(f"{GPU}, {OS % 'windows'}")), ["nodeAffinity asks for", "Linux"]),
        (before(nodes(GPU, BUILD)), ["node.kubernetes.io/windows-build", "Linux"]),
        (("containers:", "containers: []\n      was:"), ["spec.containers is empty", "give the"]),
        (("spec:\n      volumes", NO_PODS), ["containers is empty", "give"]),
        (("image: i", "image: i\n        - name: second"), ["--container (", "trainer, second"]),
        (("volumes:", "volumes: null\n      was:"), ["spec.volumes (line 8) is 'null'", "remove"]),
        (("env:", "env: text\n          was:"), ["containers[0].env is 'text'", "a list belongs"]),
        (("image: i", "image: i\n          image: j"), ["14: image is given twice", "remove one"]),
        (("name: digits", "name: {{ .Values.name }}"), ["4: a key must be text", "helm template"]),
        (('["torchrun"]', '["torchrun"'), ["line 15, column ", "this is no YAML"]),
        (("kind: Deployment", "kind: *nobody"), ["line 2, column 7", "this is no YAML"]),
        (("kind: Deployment", "kind: X"), ["X/digits", "--template-path spec.template"]),
        (("volumes:", "volumes:\n        &v"), ["anchor on a line of its own"]),
    ],
)
def test_a_manifest_that_cannot_be(change: tuple[str, str], parts: list[str]) -> None:
    (line,) = refused(changed(*change))
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize("nodes", [nodes(OS % "linux"), nodes(OS % "linux, windows"), nodes(GPU)])
def test_nodes_that_may_be_linux_are_no_obstacle(nodes: str) -> None:
    assert "name: muster\n" in injected(changed(*before(nodes))).text


def test_a_pod_or_a_generated_name_that_no_label_has_needs_the_name_of_a_job() -> None:
    generated = changed("  name: digits", "  generateName: d")
    for text in (generated, CORPUS["plain-pod"]):
        (line,) = refused(text, job=None)
        assert "--job (MUSTER_JOB) is missing" in line
        assert "in common" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, NO_OBJECT) for text in ("", "# nothing\n", "---\n", "[]", "a")),
        ("a: b", ""),
        ("{kind: List, items: {}}", ""),
        ("? [a]\n: b", ""),
        ("kind: Pod\nspec: &s {containers: [*s]}", "more than 100000 parts"),
        ("\n".join(["a: &a0 [x]", *ALIASES]), "more than 100000 parts"),
        ("[" * 500, "nested too deeply"),
        (f"{KUBEFLOW}kind: TrainJob\nmetadata: {{name: t}}\n", "that its spec.runtimeRef names"),
        (SCALE_IN, NO_TEMPLATE),
    ],
    ids=range(13),
)
def test_a_text_without_pods_or_made_to_do_harm(text: str, said: str) -> None:
    (line,) = refused(text)
    assert said in line


def test_each_object_without_pods_is_named() -> None:
    lines = refused(f"{CLASS}---\n{SCALE_IN}")
    assert [line.partition("/")[0] for line in lines] == ["PriorityClass", "ScaleIn"]
    assert all(line.endswith(NO_TEMPLATE) for line in lines)


ZONE = "{metadata.labels['topology.kubernetes.io/zone']}"
NO_TOPOLOGIES = ("{zone}", "b1/{metadata.name}", f"{ZONE}}}", "b 1", "$(ZONE)/r1")
HTTP_AND_RELAY = "--http-port (MUSTER_HTTP_PORT) and --relay-port (MUSTER_RELAY_PORT) are both"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"min_nodes": None}, ["--min (MUSTER_MIN) is missing"]),
        (
            {"min_nodes": None, "max_nodes": None, "etcd_endpoints": None, "image": None},
            ["--min", "--max", "--etcd-endpoints (MUSTER_ETCD_ENDPOINTS) is missing", "--image"],
        ),
        ({"min_nodes": "5"}, ["--min (MUSTER_MIN) is 5, more than --max (MUSTER_MAX), which is 4"]),
        (
            {"min_nodes": "many", "http_port": "0"},
            ["--min (MUSTER_MIN): 'many' from --min", "--http"],
        ),
        ({"etcd_endpoints": "https://e:1"}, ["--etcd-secret"]),
        ({"etcd_endpoints": "https://e:1,e:2"}, ["write all alike"]),
        ({"etcd_secret": "s"}, ["write https://host:port"]),
        ({"etcd_secret_keys": "tls.crt"}, ["tls.crt and tls.key go together"]),
        ({"etcd_secret_keys": "ca.pem"}, ["expected some of ca.crt,tls.crt,tls.key,username"]),
        ({"container": "other"}, ["other is not in spec.template.spec; name the one"]),
        ({"image": "two words"}, ["--image (MUSTER_IMAGE): 'two words'"]),
        ({"http_port": "29400"}, [f"{HTTP_AND_RELAY} 29400"]),
        ({"relay_port": "9400", "wrap": "true"}, [f"{HTTP_AND_RELAY} 9400"]),
        ({"relay_port": "9400", "wrap": "false"}, [f"{HTTP_AND_RELAY} 9400"]),
        ({"http_port": "8080", "relay_port": "8080"}, [f"{HTTP_AND_RELAY} 8080"]),
        ({"resources": "cpu=500m:100m"}, ["expected cpu=REQUEST or cpu=REQUEST:LIMIT"]),
        ({"resources": "cpu=0"}, ["expected cpu=REQUEST"]),
        ({"resources": "cpu"}, ["expected cpu=REQUEST"]),
        ({"resources": "cpu=1:"}, ["expected cpu=REQUEST"]),
        ({"resources": "gpu=1"}, ["expected each of cpu, memory, ephemeral-storage once"]),
        ({"resources": "cpu=1,cpu=2"}, ["expected each of"]),
        ({"user": "0"}, ["expected 1 to"]),
        ({"user": "root"}, ["expected a whole number"]),
        ({"pull_policy": "always"}, ["expected Always or IfNotPresent or Never"]),
        ({"pull_secrets": "a,,b"}, ["a name has letters"]),
        *(({"topology": text}, ["--topology (MUSTER_TOPOLOGY)"]) for text in NO_TOPOLOGIES),
    ],
)
def test_settings_that_cannot_be(flags: dict[str, str | None], expected: list[str]) -> None:
    lines = refused(POD, **flags)
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line
        assert line.startswith("Deployment/digits: ")


def test_a_password_in_an_endpoint_is_not_repeated() -> None:
    (line,) = refused(POD, etcd_endpoints="me:secret@e:1")
    assert "secret@" not in line


def test_wrapping_needs_a_command() -> None:
    (line,) = refused(changed('command: ["torchrun"]', "args: []"), wrap="true")
    assert "--wrap (MUSTER_WRAP): container trainer has no command" in line
    assert "--no-wrap" in line


@pytest.mark.parametrize(("command", "wrap"), [("command", "false"), ("args", None)])
def test_variables_of_an_operator_win_but_over_muster_run(command: str, wrap: str | None) -> None:
    text = CORPUS["anchors"].replace("command: &command", f"{command}: &command")
    (line,) = refused(text, wrap=wrap)
    assert "the training-operator gives container pytorch PET_* variables" in line
    assert "give the container its command" in line


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (ENV, "env: *e", "env (line 16) is an alias"),
        ('command: ["torchrun"]', "<<: *c", "command (line 13) comes through a merge key"),
    ],
)
def test_what_is_written_elsewhere(old: str, new: str, said: str) -> None:
    anchors = "x: {e: &e [{name: B, value: c}], c: &c {command: [a]}}\n"
    (line,) = refused(anchors + changed(old, new))
    assert said in line
    assert "write it out there" in line
    overruled = changed("          command:", "          <<: *c\n          command:")
    assert "muster-run" in injected(anchors + overruled).text


def test_a_setting_by_hand_and_another_by_a_flag() -> None:
    text = changed("    spec:", '    metadata: {annotations: {muster.dev/max: "9"}}\n    spec:')
    assert 'MUSTER_MAX, value: "9"' in injected(text, max_nodes=None).text
    (line,) = refused(text)
    assert "the annotation muster.dev/max says '9', and --max says '4'" in line
    (line,) = refused(text.replace('"9"', "9"))
    assert "the annotation muster.dev/max is no text: put it in quotes" in line


@pytest.mark.parametrize(
    ("number", "flag"), [("9400", "--http-port"), ("29400", "--relay-port"), ("8080", "")]
)
def test_a_port_of_another_container(number: str, flag: str) -> None:
    other = "        - name: log\n          image: l\n"
    text = f"{POD}{other}          ports: [{{containerPort: {number}}}]\n"
    if not flag:
        assert injected(text, container="trainer").text != text
        return
    (line,) = refused(text, container="trainer")
    assert f"container log has port {number}" in line
    assert f"another one with {flag}" in line
    assert injected(text, container="trainer", **{flag[2:].replace("-", "_"): "8081"}).text


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_ports_that_are_no_obstacle(wrap: str) -> None:
    """Two that have changed places, and the old rendezvous port of the training container."""
    text = changed("image: i", "image: i\n          ports: [{containerPort: 29400}]")
    assert injected(text).text
    said = injected(POD, wrap=wrap, http_port="8080", relay_port="9400").text
    assert 'MUSTER_HTTP_PORT, value: "8080"' in said
    assert 'MUSTER_RELAY_PORT, value: "9400"' in said
