# SPDX-License-Identifier: Apache-2.0
"""Asks a job's store through a sidecar: it runs the same command there, next to its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from console.remote.pods import JobPod
from controller.cluster.api import ClusterApi
from controller.cluster.executed import Ran, Wrote
from rdzv.errors import ClusterRefused, ClusterUnavailable

NOT_FOUND = 404

SHELL = (
    'while [ "$1" != -- ]; do export "$1"; shift; done; shift; '
    "exec 3<&0 </dev/null; { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; "
    'muster "$@" 3<&- & p=$!; '
    "{ read -r _; kill $p; } <&3 >/dev/null 2>&1 & w=$!; "
    "exec 3<&-; wait $p; s=$?; { kill $w; wait $w; } 2>/dev/null; exit $s"
)
"""Variables, ``--``, and the words of the command are its arguments.

If the container runs out of memory, the kernel ends the command, and never the sidecar. Its stdin
is open for as long as somebody is connected: the command ends with it. A container's runtime does
not end a command whose connection is gone. The shell waits for both children: the first process of
the container is the sidecar, which reaps none.
"""

WITHOUT_ANSWER_MOST = 3
"""The most pods that are tried: more would keep the user waiting for one outage."""


async def ask(
    api: ClusterApi,
    pods: Sequence[JobPod],
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    wrote: Wrote | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``muster ARGV`` in a sidecar of the job; in the next pod's if one does not answer.

    ``pods``: the job's. ``environ``: more variables. Once a pod's output has gone to ``wrote``, no
    other pod is tried.
    Raises ``ClusterUnavailable`` if no sidecar can be asked, and ``ClusterRefused`` as ``run_in``.
    """
    asked = able(pods)
    if not asked:
        raise ClusterUnavailable(f"no pod has a running sidecar that could be asked{_why(pods)}")
    began = False

    def heard(is_stderr: bool, text: str) -> None:
        nonlocal began
        began = True
        assert wrote is not None
        wrote(is_stderr, text)

    failures: list[str] = []
    for pod in asked:
        try:
            return await ask_one(
                api,
                pod,
                argv,
                timeout_s=timeout_s,
                wrote=heard if wrote else None,
                environ=environ,
            )
        except ClusterUnavailable as error:
            if began:
                raise
            failures.append(str(error))
    raise ClusterUnavailable(f"no sidecar of the job answers: {failures[-1]}")


async def ask_one(
    api: ClusterApi,
    pod: JobPod,
    argv: Sequence[str],
    *,
    timeout_s: float | None,
    wrote: Wrote | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``muster ARGV`` in the sidecar of one pod, with more variables.

    It ends there if the caller is cancelled or ends.
    Raises ``ClusterUnavailable`` if it gives no answer, and ``ClusterRefused`` as ``run_in``.
    """
    variables = [f"{name}={value}" for name, value in (environ or {}).items()]
    words = ["sh", "-c", SHELL, "muster", *variables, "--", *argv]
    try:
        return await api.run_in(
            pod.namespace, pod.name, pod.sidecar, words, timeout_s=timeout_s, wrote=wrote, held=True
        )
    except ClusterRefused as error:
        if error.status != NOT_FOUND:
            raise
        raise ClusterUnavailable(f"pod {pod.name} is gone") from error


def able(pods: Sequence[JobPod], *, last: str = "") -> list[JobPod]:
    """Return the pods whose sidecars can be asked, the best first; a few, of many.

    ``last``: the name of a pod that is about to go.
    """
    runs = [one for one in pods if one.sidecar_runs]
    order = sorted(runs, key=lambda pod: (pod.deleting, pod.name == last, not pod.ready))
    return order[:WITHOUT_ANSWER_MOST]


def _why(pods: Sequence[JobPod]) -> str:
    """Return what is known of why, for the end of a sentence."""
    if not pods:
        return ": the job has no pods"
    waiting = next((f": {one.name}: {one.why_pending}" for one in pods if one.why_pending), "")
    return waiting or f": {', '.join(f'{one.name} ({one.phase})' for one in pods[:3])}"
