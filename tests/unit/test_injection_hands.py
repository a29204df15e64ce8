# SPDX-License-Identifier: Apache-2.0
"""What people write into an injected file stays, when it is taken out too."""

from __future__ import annotations

from typing import Any

import pytest

from console.inject.injection import Request, inject
from console.inject.removal import removed
from tests.support.injection.injecting import again, injected, loaded, pods
from tests.support.injection.refusals import POD

ENV = "          env:\n"
TWO = POD + "        - name: log\n          image: l\n          command: [cat]\n"
BY_HAND = """\
            - {name: PYTHONPATH, value: /src}
            - {name: PET_MAX_RESTARTS, value: "3"}
"""
MOUNTS_BY_HAND = """\
          env:
            - {name: PYTHONPATH, value: /log}
          volumeMounts:
            - {name: muster-run, mountPath: /var/run/muster, readOnly: true}
"""


def container(text: str, name: str = "trainer") -> Any:
    (pod,) = pods(loaded(text))
    return next(c for c in pod["containers"] if c["name"] == name)


def edited(text: str, old: str, new: str) -> str:
    """``text`` with the last ``old`` changed: the training container is behind the sidecar."""
    before, found, after = text.rpartition(old)
    assert found
    return before + new + after


def settled(text: str) -> str:
    """Injected once more; a third time changes nothing."""
    result = again(text)
    assert again(result) == result
    return result


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_variables_written_later_stay(wrap: str) -> None:
    made = injected(POD, wrap=wrap).text
    by_hand = edited(made, ENV, ENV + BY_HAND)
    kept = container(settled(by_hand))["env"]
    assert {"name": "PYTHONPATH", "value": "/src"} in kept
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in kept
    assert [v["name"] for v in kept].count("PYTHONPATH") == 1
    for text in (by_hand, settled(by_hand)):
        assert removed(text) == edited(POD, ENV, ENV + BY_HAND)


def test_a_value_changed_later_stays() -> None:
    made = injected(POD, wrap="false").text
    by_hand = edited(
        made, '{name: PET_MAX_RESTARTS, value: "10"}', '{name: PET_MAX_RESTARTS, value: "3"}'
    )
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in container(settled(by_hand))["env"]
    assert {"name": "PET_MAX_RESTARTS", "value": "3"} in container(removed(by_hand))["env"]


def test_what_a_server_adds_to_a_variable_is_no_change_of_it() -> None:
    made = injected(POD, wrap="false").text
    live = made.replace("{fieldPath: status.podIP}", "{apiVersion: v1, fieldPath: status.podIP}")
    assert live != made
    assert removed(live) == POD


@pytest.mark.parametrize("wrap", ["true", "false"])
def test_another_container_is_left_alone(wrap: str) -> None:
    made = injected(TWO, wrap=wrap, container="trainer").text
    by_hand = edited(made, "          command: [cat]\n", MOUNTS_BY_HAND)
    for text in (settled(by_hand), removed(by_hand)):
        assert container(text, "log") == container(by_hand, "log")


def test_a_mount_of_the_run_directory_elsewhere_stays() -> None:
    made = injected(POD).text
    mount = "{name: muster-run, mountPath: /logs/muster}"
    by_hand = edited(made, "volumeMounts: [", f"volumeMounts: [{mount}, ")
    kept = container(settled(by_hand))["volumeMounts"]
    assert {"name": "muster-run", "mountPath": "/logs/muster"} in kept


def test_a_hook_changed_later_stays() -> None:
    made = injected(POD, wrap="false").text
    by_hand = edited(
        made,
        '["/var/run/muster/bin/muster-hold"]',
        '["sh", "-c", "sync; /var/run/muster/bin/muster-hold"]',
    )
    hook = container(by_hand)["lifecycle"]
    assert container(settled(by_hand))["lifecycle"] == hook
    assert container(removed(by_hand))["lifecycle"] == hook


def test_a_container_that_was_renamed_later_is_found() -> None:
    made = injected(POD).text
    by_hand = edited(made, "name: trainer", "name: learner")
    assert removed(by_hand) == edited(POD, "name: trainer", "name: learner")
    assert container(settled(by_hand), "learner")["command"][0].endswith("/muster-run")


def test_labels_and_annotations_of_others_stay() -> None:
    made = injected(POD).text
    label, note = "muster.dev/team: vision", 'muster.dev/ticket: "7"'
    by_hand = edited(made, "labels: {", f"labels: {{{label}, ")
    by_hand = edited(by_hand, "annotations:\n", f"annotations:\n        {note}\n")
    for text in (settled(by_hand), removed(by_hand)):
        metadata = loaded(text)[0]["spec"]["template"]["metadata"]
        assert metadata["labels"]["muster.dev/team"] == "vision"
        assert metadata["annotations"]["muster.dev/ticket"] == "7"


def test_a_number_of_a_pod_that_is_gone_leaves_nothing_behind() -> None:
    numbered = edited(POD, "kind: Deployment", "kind: StatefulSet")
    made = edited(injected(numbered).text, "kind: StatefulSet", "kind: Deployment")
    assert "MUSTER_INDEX" in made
    assert "MUSTER_INDEX" not in settled(made)


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


def below_min(text: str) -> str | None:
    (pod,) = pods(loaded(text))
    env = {v["name"]: v.get("value") for v in pod["initContainers"][0]["env"]}
    value = env.get("MUSTER_BELOW_MIN")
    return None if value is None else str(value)


def test_what_hands_say_of_too_few_nodes_stays() -> None:
    plain = injected(POD).text
    by_hand = plain.replace(
        "- {name: MUSTER_MIN,",
        "- {name: MUSTER_BELOW_MIN, value: commit}\n" + 12 * " " + "- {name: MUSTER_MIN,",
    )
    assert below_min(settled(by_hand)) == "commit"
    made = injected(edited(POD, "kind: Deployment", "kind: StatefulSet")).text
    held = made.replace("MUSTER_BELOW_MIN, value: commit", "MUSTER_BELOW_MIN, value: hold")
    assert held != made
    assert below_min(settled(held)) == "hold"


def test_what_a_kind_says_of_too_few_nodes_goes_with_the_kind() -> None:
    made = injected(edited(POD, "kind: Deployment", "kind: StatefulSet")).text
    assert below_min(settled(made)) == "commit"
    assert below_min(settled(edited(made, "kind: StatefulSet", "kind: Deployment"))) is None
