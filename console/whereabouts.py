# SPDX-License-Identifier: Apache-2.0
"""The place of a job whose user names no store: on this machine, or in a cluster.

In this order: a running ``muster local``, the user's file, the cluster of the kubeconfig or of this
pod; and the default store, if there is none of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from console.help import CLUSTER_SECTION, SectionedOption
from rdzv.dataclass import dataclass

VARIABLE = "KUBECONFIG"

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""The credentials of a pod, if its service account has any."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The kubeconfig, its context and the namespace, each as given or None."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None

    def completed(self, chosen: Mapping[str, str], environ: Mapping[str, str]) -> ClusterOptions:
        """Return them with what is not given: from the environment, and from the user's file."""
        namespace = self.namespace or environ.get("MUSTER_NAMESPACE") or chosen.get("namespace")
        return ClusterOptions(
            self.kubeconfig or chosen.get("kubeconfig"),
            self.context or chosen.get("context"),
            namespace,
        )


def is_cluster_known(environ: Mapping[str, str]) -> bool:
    """Return whether there is a kubeconfig, or whether this is a pod with credentials."""
    if listed := [one for one in environ.get(VARIABLE, "").split(os.pathsep) if one]:
        return any(Path(one).is_file() for one in listed)
    if environ.get("KUBERNETES_SERVICE_HOST") and TOKEN.is_file():
        return True
    return (Path.home() / ".kube" / "config").is_file()


def with_cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with ``--kubeconfig`` and ``--context``."""
    for flag, metavar, says in (
        ("--context", "NAME", "Context of the kubeconfig.  [default: (the current one)]"),
        (
            "--kubeconfig",
            "FILE",
            "How to reach the cluster.  [env var: KUBECONFIG; default: (~/.kube/config)]",
        ),
    ):
        option = click.option(
            flag, cls=SectionedOption, section=CLUSTER_SECTION, metavar=metavar, help=says
        )
        command = option(command)
    return command
