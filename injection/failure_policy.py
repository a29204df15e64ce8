# SPDX-License-Identifier: Apache-2.0
"""The end of a pod: the grace that it is granted, and whether a batch Job counts it as a failure.

A drained container ends with a status that is not 0. Without a policy that ignores it, each counts
among the failures of the Job, and with ``backoffLimit: 0`` the first one ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from injection import facts
from injection.kinds import Kind
from injection.remarks import Remark, warning
from injection.workloads import Template, Workload, at
from injection.yaml_tree import value_of
from launcher_shim.exit_status import EXIT_TERMINATED
from rdzv.errors import ConfigError
from rdzv.sentences import named

POLICY = "podFailurePolicy"
RESTART = "restartPolicy"
NEVER = "Never"
"""The restartPolicy without which Kubernetes takes no podFailurePolicy."""

NO_POLICY = (
    "{path} has no podFailurePolicy: each pod that was drained counts as a failure of the job, for"
    " it ends with {status}: add one that ignores DisruptionTarget and exit code {status}, with"
    " restartPolicy: Never"
)
OFFER = ", or let --pod-failure-policy add it"
POLICY_COUNTS = (
    "{path}.podFailurePolicy does not ignore exit code {status}, with which a drained container"
    " ends: each counts as a failure of the job: add a rule that does"
)
ADDED = "{path}.podFailurePolicy is added: pods that are evicted or drained are no failures"
FIRST_ENDS = (
    "{path}.backoffLimit is 0, so the first pod that is evicted ends the whole job:"
    " --pod-failure-policy adds a podFailurePolicy that ignores it"
)
FIRST_ENDS_BY_POLICY = (
    "{path}.backoffLimit is 0, and its podFailurePolicy does not ignore DisruptionTarget, so the"
    " first pod that is evicted ends the whole job: add a rule that does"
)
OF_OWNER = "{path}.backoffLimit is 0: all save when a pod is evicted, and then the whole job ends"


def policy_for(container: str) -> Mapping[str, Any]:
    """Return the policy that is added, as an API server shows it again."""
    codes = {"containerName": container, "operator": "In", "values": [EXIT_TERMINATED]}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [disrupted]},
            {"action": "Ignore", "onExitCodes": codes},
        ]
    }


def added_policy(
    workload: Workload, template: Template, pod: Mapping[str, Any], container: str
) -> Mapping[str, Any] | None:
    """Return the policy to add to a template's Job; None if it has one already.

    Raises ``ConfigError`` if none can be added.
    """
    flag = named("--pod-failure-policy")
    if not (workload.known or Kind(())).of_jobs:
        raise ConfigError(f"{flag}: there is no Job in it that could have one: leave it out")
    if _job(workload, template).get(POLICY) is not None:
        return None
    restart = pod.get(RESTART)
    if restart not in (None, NEVER):
        path = f"{template.path}.spec.{RESTART}"
        raise ConfigError(f"{flag}: {path} is {restart}, and has to be {NEVER}: change it")
    return policy_for(container)


def remarks_on_failures(
    workload: Workload, template: Template, *, added: bool, owner_is_made: bool
) -> Iterator[Remark]:
    """Yield the remarks on a Job that counts evicted or drained pods among its failures."""
    kind = workload.known or Kind(())
    if not kind.of_jobs:
        return
    job = _job(workload, template)
    values = {"path": template.path.rpartition(".")[0], "status": EXIT_TERMINATED}
    if added:
        yield Remark(ADDED.format(**values))
        return
    policy = job.get(POLICY)
    rules = facts.listed(policy, "rules") if isinstance(policy, Mapping) else []
    lives_on = workload.stated(kind.job_restarts) not in ("", "0")
    lives_on |= any(map(_ignores_an_eviction, rules)) or any(map(_ignores_a_drain, rules))
    if job.get("backoffLimit") == 0 and not lives_on:
        if owner_is_made:
            yield warning(OF_OWNER.format(**values))
        else:
            sentence = FIRST_ENDS if policy is None else FIRST_ENDS_BY_POLICY
            yield Remark(sentence.format(**values), "error")
    elif not isinstance(policy, Mapping):
        yield warning((NO_POLICY + ("" if owner_is_made else OFFER)).format(**values))
    elif not any(map(_ignores_a_drain, rules)):
        yield warning(POLICY_COUNTS.format(**values))


def _job(workload: Workload, template: Template) -> Mapping[str, Any]:
    """Return the spec of the Job that a template belongs to."""
    path = template.path.rpartition(".")[0]
    found = next((value_of(node) for node, _ in at(workload.node, path)), None)
    return found if isinstance(found, Mapping) else {}


def _ignores_an_eviction(rule: Any) -> bool:
    if not isinstance(rule, Mapping) or rule.get("action") != "Ignore":
        return False
    return any(
        one.get("type") == "DisruptionTarget" and facts.is_true(one.get("status", "true"))
        for one in facts.listed(rule, "onPodConditions")
        if isinstance(one, Mapping)
    )


def _ignores_a_drain(rule: Any) -> bool:
    codes = rule.get("onExitCodes") if isinstance(rule, Mapping) else None
    if not isinstance(codes, Mapping) or rule.get("action") != "Ignore":
        return False
    listed = EXIT_TERMINATED in facts.listed(codes, "values")
    return listed == (codes.get("operator") == "In")


GRACE = "terminationGracePeriodSeconds"

DEFAULT_GRACE_S = 60
"""The grace if the spec sets none. Kubernetes' 30 s leave 25 s for two steps and a save: little.
Not longer, because a job that is deleted as a whole may wait for replacements for all its grace."""

SHORT_S = 10
"""A shorter grace than this requires saves that take less than a few seconds."""


def granted_s(pod: Mapping[str, Any], path: str) -> int | None:
    """Return the grace that the pod spec at ``path`` sets, in seconds; raises ``ConfigError``.

    None if it sets none.
    """
    grace = pod.get(GRACE)
    if grace is None:
        return None
    if type(grace) is not int:
        raise ConfigError(
            f"{path}.{GRACE} is {grace!r}, and it has to be a whole number of seconds: write it in"
            f" digits alone, as in {GRACE}: {DEFAULT_GRACE_S}"
        )
    if grace < 1:
        raise ConfigError(
            f"{path}.{GRACE} is {grace}, which leaves no time to save: give some seconds, or leave"
            f" it out for {DEFAULT_GRACE_S}"
        )
    return grace
