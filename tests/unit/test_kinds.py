# SPDX-License-Identifier: Apache-2.0
"""A kind of object is one row: it is injected, admitted, counted, scaled and read by that alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from console.remote.scaled_owner import scaled_owner
from controller.admission.decision import decide
from controller.cluster import paths
from controller.owner_kinds import owner_of, replicas_of
from injection import kinds
from injection.counts import of_replicas
from injection.injection import Request, inject
from injection.kinds import Kind, PodSigns, Scaling
from rdzv.errors import ConfigError
from tests.support.injection.injecting import FLAGS, environ, loaded

ROOT = Path(__file__).resolve().parents[2]
VERSION = "fleet.example.org/v1"
CREW = "fleet.example.org/crew"
FLEET = Kind(
    ("spec.crews.*.template",),
    plural="fleets",
    shown=(
        PodSigns(path="spec.crews.{part}.template", parts=("fleet.example.org/crew",), read=True),
    ),
    counts=of_replicas("spec.crews.*"),
    scaled=Scaling(("spec.crews.rowers.replicas",), index=re.compile(r"-(\d+)\Z")),
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, ("fleet.example.org", "Fleet"), FLEET)


def template() -> dict[str, Any]:
    container = {"name": "c", "image": "i", "command": ["torchrun", "--nnodes=1:4", "t.py"]}
    return {"metadata": {}, "spec": {"containers": [container]}}


def fleet() -> dict[str, Any]:
    crews = {"rowers": {"replicas": 3, "template": template()}}
    metadata = {"name": "f", "uid": "u"}
    return {"apiVersion": VERSION, "kind": "Fleet", "metadata": metadata, "spec": {"crews": crews}}


def pod() -> dict[str, Any]:
    owner = {"apiVersion": VERSION, "kind": "Fleet", "name": "f", "uid": "u", "controller": True}
    labels = {CREW: "rowers"}
    return {
        "metadata": {"name": "f-rowers-0", "labels": labels, "ownerReferences": [owner]},
        "spec": template()["spec"],
    }


def test_a_row_injects() -> None:
    injected = inject(json.dumps(fleet()), Request(FLAGS, {}))
    assert '"name": "muster"' in json.dumps(loaded(injected.text))


def test_a_row_admits() -> None:
    owner = owner_of(pod())
    assert owner is not None
    assert (owner.path, owner.obstacle) == ("spec.crews.rowers.template", None)
    verdict = decide(pod(), "team", owner, fleet(), environ(FLAGS))
    assert verdict.injected, verdict.reason


def test_a_row_counts_and_is_read() -> None:
    assert replicas_of(fleet()) == 3
    assert paths.owner(VERSION, "Fleet", "team", "f") == (
        "/apis/fleet.example.org/v1/namespaces/team/fleets/f"
    )


def test_a_row_scales() -> None:
    owner = scaled_owner(owner_of(pod()), "/f", fleet())
    assert owner.count == 3
    assert owner.change(4) == ("/f", {"spec": {"crews": {"rowers": {"replicas": 4}}}})


def test_without_a_row_nothing_is_read_or_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.KINDS, ("fleet.example.org", "Fleet"))
    assert paths.owner(VERSION, "Fleet", "team", "f") is None
    with pytest.raises(ConfigError, match="kubectl edit fleet/f"):
        scaled_owner(owner_of(pod()), None, fleet())


def test_the_chart_gives_the_rights_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.KINDS, ("fleet.example.org", "Fleet"))
    script = [sys.executable, "scripts/generate-chart-docs", "--print-kinds"]
    made = subprocess.run(script, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert (ROOT / "charts" / "muster" / "files" / "kinds.yaml").read_text() == made
    assert "pytorchjobs" in made
