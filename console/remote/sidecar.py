# SPDX-License-Identifier: Apache-2.0
"""Asks a job's store through a sidecar: it runs the same command there, next to its settings."""

from __future__ import annotations

from collections.abc import Sequence

from console.remote.pods import JobPod
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran, Wrote
from rdzv.errors import ClusterUnavailable

_SHELL = '{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; exec muster "$@"'
"""If the container runs out of memory, the kernel ends the command, and never the sidecar."""

WITHOUT_ANSWER_MOST = 3
"""The most pods that are tried: more would keep the user waiting for one outage."""


async def ask(
    api: ClusterApi,
    pods: Sequence[JobPod],
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    wrote: Wrote | None = None,
) -> Ran:
    """Run ``muster ARGV`` in a sidecar of the job; in the next pod's if one does not answer.

    ``pods``: the job's. Once a pod's output has gone to ``wrote``, no other pod is tried.
    Raises ``ClusterUnavailable`` if no sidecar can be asked, and ``ClusterRefused`` as ``run_in``.
    """
    able = sorted((one for one in pods if one.sidecar_runs), key=_last_to_ask)
    if not able:
        raise ClusterUnavailable(f"no pod has a running sidecar that could be asked{_why(pods)}")
    began = False

    def heard(is_stderr: bool, text: str) -> None:
        nonlocal began
        began = True
        assert wrote is not None
        wrote(is_stderr, text)

    failures: list[str] = []
    for pod in able[:WITHOUT_ANSWER_MOST]:
        try:
            return await api.run_in(
                pod.namespace,
                pod.name,
                pod.sidecar,
                ["sh", "-c", _SHELL, "muster", *argv],
                timeout_s=timeout_s,
                wrote=heard if wrote else None,
            )
        except ClusterUnavailable as error:
            if began:
                raise
            failures.append(str(error))
    raise ClusterUnavailable(f"no sidecar of the job answers: {failures[-1]}")


def _last_to_ask(pod: JobPod) -> tuple[bool, bool]:
    return pod.deleting, not pod.ready


def _why(pods: Sequence[JobPod]) -> str:
    """Return what is known of why, for the end of a sentence."""
    if not pods:
        return ": the job has no pods"
    waiting = next((f": {one.name}: {one.why_pending}" for one in pods if one.why_pending), "")
    return waiting or f": {', '.join(f'{one.name} ({one.phase})' for one in pods[:3])}"
