# SPDX-License-Identifier: Apache-2.0
"""The quick start for a cluster, as its page has it: a pod is deleted, and no step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster.lab import Kubelab
from tests.support.cluster.quickstart import Quickstart

pytestmark = [pytest.mark.kubelab, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
"""For a world to form: each process imports torch, on cores that are shared."""


def test_the_pod_that_the_page_deletes_is_drained_and_no_step_is_lost(
    kubelab: Kubelab, sidecar_in_lab: str, tmp_path: Path
) -> None:
    with Quickstart(kubelab, tmp_path) as quick:
        for manifest in ("etcd", "storage"):
            quick.kubectl(f"kubectl apply -f examples/kubernetes/quickstart/{manifest}.yaml")
        quick.kubectl("kubectl rollout status statefulset/etcd")
        quick.inject_and_apply()
        quick.until(lambda: list(quick.checkpoints.iterdir()), PATIENCE_S, "an epoch is saved")
        quick.until(quick.all_train, PATIENCE_S, "three ranks train")
        trained = len(quick.starts())

        quick.kubectl("kubectl delete pod")
        (drain,) = [entry for entry in quick.history() if entry["what"] == "drain"]
        assert drain["details"]["outcome"] == "committed"
        quick.until(lambda: len(quick.starts()) > trained, PATIENCE_S, "the others train on")
        _, step = quick.starts()[trained]
        assert step == drain["details"]["step"] > 0

        quick.until(quick.all_train, PATIENCE_S, "another pod has joined")
