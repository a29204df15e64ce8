# SPDX-License-Identifier: Apache-2.0
"""Injects into manifests, and reads what came of it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import yaml

from injection import cautions, failure_policy
from injection.injection import Injected, Request, inject, take_out
from injection.remarks import Remark
from injection.settings import TABLE
from rdzv.errors import ConfigError

FLAGS = {
    "job": "digits",
    "min_nodes": "2",
    "max_nodes": "4",
    "etcd_endpoints": "etcd:2379",
    "image": "example.org/muster-sidecar:0.2.0",
}
POD = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: digits
spec:
  template:
    spec:
      volumes:
        - name: data
          emptyDir: {}
      containers:
        - name: trainer
          image: i
          command: ["torchrun"]
          env:
            - name: A
              value: b
"""


def environ(flags: Mapping[str, str]) -> dict[str, str]:
    """The variables that mean the same as flags."""
    return {TABLE[name].variable: text for name, text in flags.items()}


def manifest(kind: str = "Deployment", /, *, pod: Any = None, **container: Any) -> str:
    """JSON of an object with one container."""
    template = {"spec": {"containers": [{"name": "c", "image": "i", **container}], **(pod or {})}}
    groups = {"Job": "batch/v1", "CronJob": "batch/v1", "Unheard": "example.org/v1"}
    spec: dict[str, Any] = {"template": template}
    if kind == "CronJob":
        spec = {"jobTemplate": {"spec": spec}}
    version = groups.get(kind, "apps/v1")
    metadata = {"name": "digits"}
    return json.dumps({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})


def edited(text: str, old: str, new: str) -> str:
    """``text`` with the last ``old`` changed: the training container is behind the sidecar."""
    before, found, after = text.rpartition(old)
    assert found
    return before + new + after


@functools.cache
def injected(text: str, /, **flags: str | None) -> Injected:
    return inject(text, Request({**FLAGS, **flags}, {}))


def removed(text: str) -> str:
    """``text`` without any sidecar."""
    return take_out(text).text


def again(text: str, /, **flags: str | None) -> str:
    return inject(text, Request(flags, {})).text


def settled(text: str) -> str:
    """An injected text, injected once more; a third time changes nothing."""
    result = again(text)
    assert again(result) == result
    return result


def lawful(text: str, /, **flags: str | None) -> str:
    """``text`` with the sidecar, which comes out again to the byte and goes in once only."""
    result = injected(text, **flags).text
    assert result != text
    assert removed(result) == text
    assert again(result) == result
    return result


def told(text: str, /, **flags: str | None) -> dict[str, Any]:
    """The variables of the first sidecar."""
    return variables(sidecars(injected(text, **flags).text)[0])


SENTENCES = {
    name: text
    for module in (cautions, failure_policy)
    for name, text in vars(module).items()
    if name.isupper() and isinstance(text, str) and re.search("{(name|path|kind)}", text)
} | {"NO_POLICY": failure_policy.NO_POLICY + failure_policy.OFFER}
"""The remarks of which the documentation has each, in these words."""
ON_LAUNCHES = (
    *("OVERRIDDEN", "NNODES", "FIXED", "WINS", "HIDDEN", "ADDRESS_WINS", "KEPT", "APART"),
    *("ONE_PROCESS", "BY_DEEPSPEED", "FOREIGN", "NO_LAUNCHER", "NO_CENTRAL"),
)


def of_sentences(text: str, names: Iterable[str], /, **flags: str | None) -> list[Remark]:
    """The remarks that are one of these sentences, without the object that each begins with."""
    patterns = [re.sub(r"\\{\w+\\}", ".+", re.escape(SENTENCES[name])) for name in names]
    found = injected(text, **flags).notes
    notes = [Remark(note.partition(": ")[2], note.level) for note in found]
    return [note for note in notes if any(re.fullmatch(one, note) for one in patterns)]


def refused(text: str, /, **flags: str | None) -> list[str]:
    """Why nothing is put in, a sentence each."""
    with pytest.raises(ConfigError) as caught:
        injected(text, **flags)
    lines = str(caught.value).splitlines()
    assert all(len(line) < 400 for line in lines)
    return lines


def loaded(text: str) -> list[Any]:
    """As another parser reads it, the one whose rules kubectl's are nearest to."""
    return list(yaml.safe_load_all(text.removeprefix("%YAML 1.2\n")))


def keeps(new: Any, old: Any) -> bool:
    """Whether all that was there is there, in its order; what was empty may have been filled."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(k in new and keeps(new[k], old[k]) for k in old)
    if isinstance(old, list):
        left = list(new) if isinstance(new, list) else []
        for item in old:
            while left and not keeps(left[0], item):
                left.pop(0)
            if not left:
                return False
            left.pop(0)
        return isinstance(new, list)
    return bool(old is None or new == old)


def pods(value: Any) -> list[Any]:
    """Every pod spec in a document."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if isinstance(value.get("containers"), list) else []
    return own + [pod for below in value.values() for pod in pods(below)]


def sidecars(text: str) -> list[Any]:
    """Every sidecar in an injected text."""
    first = [pod["initContainers"][0] for pod in pods(loaded(text)) if pod.get("initContainers")]
    return [one for one in first if one["name"] == "muster"]


def variables(container: Any) -> dict[str, Any]:
    """What a container's variables say: text, or where the text comes from."""
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in container.get("env") or []}
