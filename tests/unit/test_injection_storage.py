# SPDX-License-Identifier: Apache-2.0
"""Where a container can save so that the next pod finds it, as far as its manifest shows."""

from __future__ import annotations

from typing import Any

import pytest

from injection.cautions import NO_STORAGE
from tests.support.injection.corpus import CORPUS
from tests.support.injection.injecting import injected, manifest
from tests.support.sources import ROOT


def warned(text: str) -> bool:
    levels = [note.level for note in injected(text).notes if "no volume that outlives" in note]
    assert set(levels) <= {"warning"}
    return bool(levels)


def mounting(**volume: Any) -> str:
    mount = {"name": "v", "mountPath": "/v"}
    return manifest(
        command=["torchrun"], volumeMounts=[mount], pod={"volumes": [{"name": "v", **volume}]}
    )


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (manifest(command=["torchrun", "t.py"]), True),
        (mounting(emptyDir={"medium": "Memory"}), True),
        (mounting(ephemeral={"volumeClaimTemplate": {}}), True),
        (mounting(configMap={"name": "c"}), True),
        (mounting(csi={"driver": "secrets-store.csi.k8s.io"}), True),
        (mounting(hostPath={"path": "/dev/shm"}), True),
        # A StatefulSet's own claim: no other pod has it.
        (manifest("StatefulSet", command=["a"], volumeMounts=[{"name": "claimed"}]), True),
        (manifest(command=["a"], pod={"volumes": [{"name": "v", "nfs": {}}]}), True),
        (mounting(persistentVolumeClaim={"claimName": "c"}), False),
        (mounting(nfs={"server": "s"}), False),
        (mounting(csi={"driver": "gcsfuse.csi.storage.gke.io"}), False),
        (mounting(hostPath={"path": "/mnt/lustre"}), False),
        (manifest(command=["sh", "-c", "torchrun t.py --to s3://bucket/x"]), False),
        (manifest(command=["a"], env=[{"name": "TO", "value": "gs://bucket"}]), False),
        (manifest(command=["a"], env=[{"name": "PROXY", "value": "http://p"}]), True),
        # Horovod's commits are in memory.
        (CORPUS["elastic-mpi"], False),
    ],
)
def test_a_checkpoint_that_goes_with_its_pod_is_warned_of(text: str, lost: bool) -> None:
    assert warned(text) == lost
    if lost:
        assert any(NO_STORAGE.format(name="c") in note for note in injected(text).notes)


def test_the_page_has_the_sentence() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert NO_STORAGE.format(name="NAME") in page
