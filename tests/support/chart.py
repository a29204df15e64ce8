# SPDX-License-Identifier: Apache-2.0
"""The chart, as helm renders it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sidecar_image.engine import CACHE
from tests.support.programs import ran
from tests.support.sources import ROOT

CHART = ROOT / "charts" / "muster"
BUILD_TIMEOUT_S = 1500.0
"""The first time, helm is built."""


@cache
def helm_program() -> Path:
    """The real helm, which is built where it is not there."""
    program = ROOT / "scripts" / "toolchain" / "helm"
    done = ran(program, timeout_s=BUILD_TIMEOUT_S, MUSTER_CACHE=str(CACHE))
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()) / "helm"


def helm(*arguments: str, kubeconfig: Path | None = None, timeout_s: float = 300.0) -> str:
    """Run helm; raises ``HelmFailed`` with what it said."""
    cluster = str(kubeconfig or os.devnull)
    done = ran(helm_program(), *arguments, timeout_s=timeout_s, KUBECONFIG=cluster)
    if done.returncode != 0:
        raise HelmFailed(f"{done.stderr}{done.stdout}".strip())
    return done.stdout


class HelmFailed(Exception):
    """helm ended with a status other than 0."""


def rendered(*values: str, version: str = "1.36.0") -> list[dict[str, Any]]:
    """The objects of a release ``muster`` in ``muster-system``; each value is KEY=VALUE."""
    given = [word for value in values for word in ("--set", value)]
    text = helm(
        *("template", "muster", str(CHART), "--namespace", "muster-system"),
        *("--kube-version", version, *given),
    )
    return [one for one in yaml.safe_load_all(text) if one]
