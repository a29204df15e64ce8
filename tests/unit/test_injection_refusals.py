# SPDX-License-Identifier: Apache-2.0
"""What ``muster inject`` refuses: one sentence each, with the field and the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from console.inject.injection import Request
from console.inject.injection import inject as run
from rdzv.errors import ConfigError
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import FLAGS, again, injected
from tests.support.injection.refusals import POD


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def refused(text: str, /, **flags: str | None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        injected(text, **flags)
    lines = str(caught.value).splitlines()
    assert all(len(line) < 400 for line in lines)
    return lines


WITHOUT_GRACE = "terminationGracePeriodSeconds: 0"
TEXT_GRACE = 'terminationGracePeriodSeconds: "30"'
POINT_GRACE = "terminationGracePeriodSeconds: 30.0"
YES_GRACE = "terminationGracePeriodSeconds: true"
WINDOWS_NODES = "nodeSelector: {kubernetes.io/os: windows}\n      volumes:"
NO_VOLUMES = "volumes: null\n      was:"
TAKEN_PORT = "image: i\n          ports: [{containerPort: 9400}]"
TAKEN_PLACE = "image: i\n          volumeMounts: [{name: data, mountPath: /var/run/muster/}]"
ABOVE_IT = "image: i\n          volumeMounts: [{name: data, mountPath: /var/run/muster/bin}]"


@pytest.mark.parametrize(
    ("old", "new", "field", "remedy"),
    [
        ("name: trainer", "name: muster", "a container muster", "remove or rename it"),
        ("name: data", "name: muster-run", "a volume muster-run", "rename it"),
        ("name: data", "name: muster-etcd", "a volume muster-etcd", "rename it"),
        ("image: i", TAKEN_PORT, "container trainer has port 9400", "--http-port"),
        ("image: i", TAKEN_PLACE, "a mount at /var/run/muster,", "move it"),
        ("image: i", ABOVE_IT, "a mount at /var/run/muster/bin,", "move it"),
        ("name: A", "name: MUSTER_RUN_DIR", "sets MUSTER_RUN_DIR to 'b'", "remove it"),
        ("volumes:", f"{WITHOUT_GRACE}\n      volumes:", WITHOUT_GRACE[:29], "give some seconds"),
        ("volumes:", f"{TEXT_GRACE}\n      volumes:", "is '30', and it", "in digits alone"),
        ("volumes:", f"{POINT_GRACE}\n      volumes:", "is '30.0', and it", "in digits alone"),
        ("volumes:", f"{YES_GRACE}\n      volumes:", "is True, and it", "in digits alone"),
        ("volumes:", "os: {name: windows}\n      volumes:", "spec.os.name is windows", "Linux"),
        ("volumes:", WINDOWS_NODES, "nodeSelector asks for kubernetes.io/os windows", "Linux"),
        ("containers:", "containers: []\n      was:", "spec.containers is empty", "give the"),
        (
            "spec:\n      volumes",
            "spec: {}\n    was:\n      volumes",
            "containers is empty",
            "give",
        ),
        ("image: i", "image: i\n        - name: second", "--container (", "among trainer, second"),
        ("  name: digits", "  generateName: d", "--job (MUSTER_JOB) is missing", "in common"),
        ("volumes:", NO_VOLUMES, "spec.template.spec.volumes (line 8) is 'null'", "remove that"),
        (
            "env:",
            "env: text\n          was:",
            "containers[0].env is 'text'",
            "a list belongs there",
        ),
        ("image: i", "image: i\n          image: j", "line 14: image is given twice", "remove one"),
        ("name: digits", "name: {{ .Values.name }}", "line 4: a key must be text", "helm template"),
        ('["torchrun"]', '["torchrun"', "line 15, column ", "this is no YAML"),
        ("kind: Deployment", "kind: *nobody", "line 2, column 7", "this is no YAML"),
        ("kind: Deployment", "kind: X", "X/digits", "--template-path spec.template"),
    ],
)
def test_a_manifest_that_cannot_be(old: str, new: str, field: str, remedy: str) -> None:
    (line,) = refused(changed(old, new)(POD), **({"job": None} if "generate" in new else {}))
    assert field in line
    assert remedy in line


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
    (line,) = refused(changed('command: ["torchrun"]', "args: []")(POD), wrap="true")
    assert "--wrap (MUSTER_WRAP): container trainer has no command" in line
    assert "--no-wrap" in line


@pytest.mark.parametrize(("command", "wrap"), [("command", "false"), ("args", None)])
def test_variables_of_an_operator_win_but_over_muster_run(command: str, wrap: str | None) -> None:
    text = CORPUS["anchors"].replace("command: &command", f"{command}: &command")
    (line,) = refused(text, wrap=wrap)
    assert "the training-operator gives container pytorch PET_* variables" in line
    assert "give the container its command" in line


def test_a_bare_pod_needs_the_name_of_a_job() -> None:
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}]}\n"
    (line,) = refused(pod, job=None)
    assert "all pods of a job have one in common" in line


def test_an_accelerator_for_the_sidecar() -> None:
    text = injected(POD).text.replace(
        "          restartPolicy: Always",
        "          restartPolicy: Always\n          resources: {limits: {nvidia.com/gpu: 1}}",
    )
    with pytest.raises(ConfigError) as caught:
        again(text)
    assert "spec.template.spec.initContainers[muster].resources asks for nvidia.com/gpu" in str(
        caught.value
    )
    assert "remove it there" in str(caught.value)


def test_resources_that_would_cost_the_pod_its_class() -> None:
    guaranteed = changed(
        "image: i", "image: i\n          resources: {limits: {cpu: 4, memory: 8Gi}}"
    )(POD)
    text = injected(guaranteed).text
    assert "requests:" in text
    text = text.replace('requests: {memory: "128Mi", cpu: "500m"}', 'requests: {cpu: "1m"}')
    with pytest.raises(ConfigError, match="make the pod Burstable, which is Guaranteed without it"):
        again(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "env:\n            - name: A\n              value: b",
            "env: *e",
            "env (line 16) is an alias",
        ),
        ("          command:", "          <<: *c\n          command:", ""),
        ('command: ["torchrun"]', "<<: *c", "command (line 13) comes through a merge key"),
    ],
)
def test_what_is_written_elsewhere(old: str, new: str, said: str) -> None:
    text = "x: {e: &e [{name: B, value: c}], c: &c {command: [a]}}\n" + changed(old, new)(POD)
    if not said:
        assert "muster-run" in injected(text).text
        return
    (line,) = refused(text)
    assert said in line
    assert "write it out there" in line


def test_of_several_objects_one_must_be_named() -> None:
    both = POD + "---\n" + POD.replace("name: digits", "name: etcd")
    (line,) = refused(both)
    assert "--object Deployment/digits" in line
    assert "there are Deployment/digits, Deployment/etcd" in line
    named = run(both, Request(FLAGS, {}, ["deployment/d*"]))
    assert named.text.count("name: muster\n") == 1
    assert named.notes[0] == "Deployment/etcd: left as it is: no --object names it"
    assert again(named.text) == named.text
    with pytest.raises(ConfigError, match="nothing is called Job/x here; there are Deployment"):
        run(both, Request(FLAGS, {}, ["Job/x"]))


def test_a_train_job_has_its_template_elsewhere() -> None:
    text = "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {name: t}\n"
    assert "inject into the runtime that its spec.runtimeRef names" in refused(text)[0]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "[]", "a"])
def test_a_text_without_objects(text: str) -> None:
    assert refused(text) == ["there is no object in this text: give a manifest"]


@pytest.mark.parametrize("text", ["a: b", "{kind: List, items: {}}", "? [a]\n: b"])
def test_a_text_of_something_else(text: str) -> None:
    assert len(refused(text)) == 1


ALIASES = [f"b{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Pod\nspec: &s {containers: [*s]}", "more than 100000 parts"),
        ("\n".join(["a: &a0 [x]", *ALIASES]), "more than 100000 parts"),
        ("[" * 500, "nested too deeply"),
        (changed("volumes:", "volumes:\n        &v")(POD), "anchor on a line of its own"),
    ],
    ids=["itself", "aliases of aliases", "brackets", "anchor"],
)
def test_a_text_made_to_do_harm(text: str, said: str) -> None:
    (line,) = refused(text)
    assert said in line


def test_a_setting_by_hand_and_another_by_a_flag() -> None:
    text = changed("    spec:", '    metadata: {annotations: {muster.dev/max: "9"}}\n    spec:')(
        POD
    )
    assert 'MUSTER_MAX, value: "9"' in injected(text, max_nodes=None).text
    (line,) = refused(text)
    assert "the annotation muster.dev/max says '9', and --max says '4'" in line
    (line,) = refused(text.replace('"9"', "9"))
    assert "the annotation muster.dev/max is no text: put it in quotes" in line


@pytest.mark.parametrize("wrap", ["true", "false"])
@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ({"http_port": "29400"}, "29400"),
        ({"relay_port": "9400"}, "9400"),
        ({"http_port": "8080", "relay_port": "8080"}, "8080"),
    ],
)
def test_one_port_for_two_things(wrap: str, flags: dict[str, str], port: str) -> None:
    (line,) = refused(POD, wrap=wrap, **flags)
    both = "--http-port (MUSTER_HTTP_PORT) and --relay-port (MUSTER_RELAY_PORT) are both"
    assert f"{both} {port}" in line
    assert "c10d" not in line


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_ports_that_have_changed_places_are_two(wrap: str) -> None:
    said = injected(POD, wrap=wrap, http_port="8080", relay_port="9400").text
    assert 'MUSTER_HTTP_PORT, value: "8080"' in said
    assert 'MUSTER_RELAY_PORT, value: "9400"' in said


@pytest.mark.parametrize(
    ("number", "flag"), [("9400", "--http-port"), ("29400", "--relay-port"), ("8080", "")]
)
def test_a_port_of_another_container(number: str, flag: str) -> None:
    other = "        - name: log\n          image: l\n"
    other += f"          ports: [{{containerPort: {number}}}]\n"
    text = POD + other
    if not flag:
        assert injected(text, container="trainer").text != text
        return
    (line,) = refused(text, container="trainer")
    assert f"container log has port {number}" in line
    assert f"another one with {flag}" in line
    assert injected(text, container="trainer", **{flag[2:].replace("-", "_"): "8081"}).text


def test_the_old_rendezvous_port_of_the_training_container_is_no_obstacle() -> None:
    ports = "image: i\n          ports: [{containerPort: 29400}]"
    assert injected(changed("image: i", ports)(POD)).text
