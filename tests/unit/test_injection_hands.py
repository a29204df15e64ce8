# SPDX-License-Identifier: Apache-2.0
"""What people write into an injected file stays, when it is taken out too."""

from __future__ import annotations

from typing import Any

import pytest

from injection.injection import Request, inject
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import (
    POD,
    again,
    edited,
    injected,
    loaded,
    manifest,
    pods,
    removed,
    sidecars,
    variables,
)

ENV = "          env:\n"
SOURCE = "{name: PYTHONPATH, value: /src}"
RESTARTS = '{name: PET_MAX_RESTARTS, value: "3"}'
BY_HAND = f"{ENV}            - {SOURCE}\n            - {RESTARTS}\n"
SET = edited(POD, "kind: Deployment", "kind: StatefulSet")


def container(text: str, name: str = "trainer") -> Any:
    (pod,) = pods(loaded(text))
    return next(c for c in pod["containers"] if c["name"] == name)


def settled(text: str) -> str:
    """Injected once more; a third time changes nothing."""
    result = again(text)
    assert again(result) == result
    return result


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_variables_written_later_stay_with_and_without_the_sidecar(wrap: str) -> None:
    by_hand = edited(injected(POD, wrap=wrap).text, ENV, BY_HAND)
    env = container(settled(by_hand))["env"]
    assert {"name": "PYTHONPATH", "value": "/src"} in env
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in env
    assert [v["name"] for v in env].count("PYTHONPATH") == 1
    for text in (by_hand, settled(by_hand)):
        assert removed(text) == edited(POD, ENV, BY_HAND)


def test_a_container_that_was_renamed_later_is_found_and_keeps_its_name() -> None:
    by_hand = edited(injected(POD).text, "name: trainer", "name: learner")
    assert container(settled(by_hand), "learner")["command"][0].endswith("/muster-run")
    for text in (by_hand, settled(by_hand)):
        assert removed(text) == edited(POD, "name: trainer", "name: learner")


HOOK = '["/var/run/muster/bin/muster-hold"]'
MOUNT = "{name: muster-run, mountPath: /logs/muster}"


@pytest.mark.parametrize(
    ("old", "new", "key", "kept"),
    [
        (
            '{name: PET_MAX_RESTARTS, value: "10"}',
            RESTARTS,
            "env",
            {"name": "PET_MAX_RESTARTS", "value": "3"},
        ),
        (HOOK, '["sh"]', "lifecycle", {"preStop": {"exec": {"command": ["sh"]}}}),
    ],
)
def test_what_was_changed_later_stays(old: str, new: str, key: str, kept: Any) -> None:
    by_hand = edited(injected(POD, wrap="false").text, old, new)
    for text in (settled(by_hand), removed(by_hand)):
        found = container(text)[key]
        assert kept in (found if isinstance(found, list) else [found])


def test_a_mount_of_the_run_directory_elsewhere_stays() -> None:
    by_hand = edited(injected(POD).text, "volumeMounts: [", f"volumeMounts: [{MOUNT}, ")
    kept = container(settled(by_hand))["volumeMounts"]
    assert {"name": "muster-run", "mountPath": "/logs/muster"} in kept


def test_what_a_server_adds_to_a_variable_is_no_change_of_it() -> None:
    made = injected(POD, wrap="false").text
    live = made.replace("{fieldPath: status.podIP}", "{apiVersion: v1, fieldPath: status.podIP}")
    assert live != made
    assert removed(live) == POD


MOUNTS_BY_HAND = """\
          env:
            - {name: PYTHONPATH, value: /log}
          volumeMounts:
            - {name: muster-run, mountPath: /var/run/muster, readOnly: true}
"""


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_another_container_is_left_alone(wrap: str) -> None:
    cat = "          command: [cat]\n"
    two = f"{POD}        - name: log\n          image: l\n{cat}"
    by_hand = edited(injected(two, wrap=wrap, container="trainer").text, cat, MOUNTS_BY_HAND)
    for text in (settled(by_hand), removed(by_hand)):
        assert container(text, "log") == container(by_hand, "log")


def test_labels_and_annotations_of_others_stay() -> None:
    made = injected(POD).text
    by_hand = edited(made, "labels: {", "labels: {muster.dev/team: vision, ")
    note = '        muster.dev/ticket: "7"\n'
    by_hand = edited(by_hand, "annotations:\n", f"annotations:\n{note}")
    for text in (settled(by_hand), removed(by_hand)):
        metadata = loaded(text)[0]["spec"]["template"]["metadata"]
        assert metadata["labels"]["muster.dev/team"] == "vision"
        assert metadata["annotations"]["muster.dev/ticket"] == "7"


# --- in the sidecar itself ---


def test_what_hands_give_the_sidecar_stays() -> None:
    text = injected(CORPUS["block-scalars"]).text
    text = text.replace(
        "restartPolicy: Always",
        "restartPolicy: Always\n                  imagePullPolicy: Never\n"
        "                  resources: {limits: {ephemeral-storage: 1Mi}}",
    ).replace(
        '- {name: MUSTER_MIN, value: "2"}',
        '- {name: MUSTER_MIN, value: "1"}\n'
        '                      - {name: MUSTER_LEASE_TTL, value: "20s"}',
    )
    (made,) = sidecars(settled(text))
    assert made["imagePullPolicy"] == "Never"
    assert made["resources"] == {"limits": {"ephemeral-storage": "1Mi"}}
    said = variables(made)
    assert (said["MUSTER_LEASE_TTL"], said["MUSTER_MIN"]) == ("20s", "2")


def test_a_number_of_a_pod_that_is_gone_leaves_nothing_behind() -> None:
    made = edited(injected(SET).text, "kind: StatefulSet", "kind: Deployment")
    assert "MUSTER_INDEX" in made
    assert "MUSTER_INDEX" not in settled(made)


def test_a_secret_that_is_gone_leaves_nothing_behind() -> None:
    text = injected(manifest(), etcd_secret="s", etcd_endpoints="https://e:1").text
    plain = injected(text, etcd_endpoints="e:1", etcd_secret_keys="username,password").text
    env = set(variables(sidecars(plain)[0]))
    assert not {"MUSTER_ETCD_CACERT", "MUSTER_ETCD_CERT"} & env
    assert {"MUSTER_ETCD_USER", "MUSTER_ETCD_PASSWORD_FILE"} <= env


def test_what_hands_write_of_the_store_is_told_when_it_is_taken_out() -> None:
    made = injected(POD).text
    by_hand = made.replace(
        "            - {name: MUSTER_SLOTS,",
        "            - {name: MUSTER_ETCD_CACERT, value: /etc/store/ca.pem}\n"
        "            - {name: MUSTER_SLOTS,",
    ).replace("volumeMounts: [", "volumeMounts: [{name: store, mountPath: /etc/store}, ", 1)
    told = inject(by_hand, Request({}, {}))
    assert told.text == made
    news = [note for note in told.notes if note not in injected(POD).notes]
    assert [note.partition(" by hand")[0] for note in news] == [
        "Deployment/digits: container muster: MUSTER_ETCD_CACERT was written",
        "Deployment/digits: container muster: the volume store was mounted",
    ]
    assert all("--etcd-secret" in note for note in news)


def test_what_inject_wrote_of_the_store_goes_without_a_word() -> None:
    tls = {"etcd_endpoints": "https://etcd:2379", "etcd_secret": "client"}
    made = injected(POD, **tls, etcd_secret_keys="ca.crt,username,password").text
    fewer = inject(made, Request({"etcd_secret_keys": "ca.crt"}, {}))
    assert "MUSTER_ETCD_USER" in made
    assert "MUSTER_ETCD_USER" not in fewer.text
    assert fewer.notes == injected(POD, **tls).notes


def below_min(text: str) -> Any:
    return variables(sidecars(text)[0]).get("MUSTER_BELOW_MIN")


def test_what_hands_say_of_too_few_nodes_stays() -> None:
    by_hand = injected(POD).text.replace(
        "- {name: MUSTER_MIN,",
        "- {name: MUSTER_BELOW_MIN, value: commit}\n" + 12 * " " + "- {name: MUSTER_MIN,",
    )
    assert below_min(settled(by_hand)) == "commit"
    held = edited(
        injected(SET).text, "MUSTER_BELOW_MIN, value: commit", "MUSTER_BELOW_MIN, value: hold"
    )
    assert below_min(settled(held)) == "hold"


def test_what_a_kind_says_of_too_few_nodes_goes_with_the_kind() -> None:
    made = injected(SET).text
    assert below_min(settled(made)) == "commit"
    assert below_min(settled(edited(made, "kind: StatefulSet", "kind: Deployment"))) is None
