# SPDX-License-Identifier: Apache-2.0
"""The record of a plan: what it adds to a template, for a later removal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from injection.annotations import (
    LETS_GO,
    WHOLE_COMMAND,
    Record,
    beside_word,
    container_word,
    pull_secret_word,
    variable_word,
)
from injection.plan import InjectionPlan


def record_of(template: Mapping[str, Any], plan: InjectionPlan) -> Record:
    """Record what ``template`` does not have yet; an entry that exists, if empty, is the user's."""
    pod: Mapping[str, Any] = template["spec"]
    container: Mapping[str, Any] = pod["containers"][plan.container_index]
    metadata = template.get("metadata", {})
    added = [LETS_GO] if plan.lets_go_below_min else []
    added += [key for key in ("initContainers", "volumes") if key not in pod]
    added += [pull_secret_word(one["name"]) for one in plan.pull_secrets]
    if plan.pull_secrets and "imagePullSecrets" not in pod:
        added.append("imagePullSecrets")
    added += plan.pod
    added += [container_word(plan.container), *map(variable_word, plan.env)]
    ours = {"env": plan.env, "volumeMounts": plan.mounts}
    added += [key for key, new in ours.items() if new and key not in container]
    if plan.command_prefix:
        added.append("command")
    if plan.command:
        added.append(WHOLE_COMMAND)
    added += [beside_word(key, value) for key, value in plan.beside.items()]
    if plan.pre_stop is not None:
        added += ["preStop", *(["lifecycle"] if "lifecycle" not in container else [])]
    if "metadata" not in template:
        added.append("metadata")
    # The record itself is an annotation, so annotations are added in any case.
    parts = ["labels", "annotations"] if plan.labels else ["annotations"]
    added += [part for part in parts if part not in (metadata or {})]
    return Record(added, list(plan.users))
