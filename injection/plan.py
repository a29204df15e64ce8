# SPDX-License-Identifier: Apache-2.0
"""The plan by which a pod template becomes a member of a job: a pure function of the template.

The user's own entries stay: if Muster would need another value, a remark says so; if the job cannot
work with it at all, an error does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from injection import facts, remarks, sidecar
from injection.annotations import Former
from injection.cautions import cautions, on_launches, world_of_its_own
from injection.facts import SIDECAR_MEMORY, check_shape
from injection.failure_policy import (
    DEFAULT_GRACE_S,
    GRACE,
    NEVER,
    POLICY,
    RESTART,
    SHORT_S,
    added_policy,
    granted_s,
    remarks_on_failures,
)
from injection.kinds import Kind, job_label
from injection.launches import role_of
from injection.member_spec import Demand, demand
from injection.remarks import Remark, warning
from injection.settings import DOMAIN, LABEL, TABLE, Told, annotation
from injection.sidecar import SidecarContainer
from injection.workloads import Role, Template, Workload, at
from injection.yaml_tree import child, value_of
from launcher_shim.pod.launchers import CENTRAL
from rdzv.errors import ConfigError
from rdzv.sentences import named


@dataclass(slots=True)
class InjectionPlan:
    """The additions to one template.

    ``users`` are Muster's names that were there before, and stay when all else is taken out.
    ``command`` is a whole one, for a container that had none; ``beside`` are entries beside the
    template.
    """

    container: str
    container_index: int
    sidecar: Mapping[str, Any]
    sidecar_index: int
    volumes: Sequence[Mapping[str, Any]]
    pull_secrets: Sequence[Mapping[str, str]]
    mounts: Sequence[Mapping[str, Any]]
    env: list[Mapping[str, Any]] = field(default_factory=list)
    command_prefix: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    lets_go_below_min: bool = False
    pre_stop: Mapping[str, Any] | None = None
    pod: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a note: something that is worth knowing."""
        self.notes.append(Remark(sentence))

    def warn(self, sentence: str) -> None:
        """Add a warning: something may not be as its user expects."""
        self.notes.append(Remark(sentence, "warning"))


def plan(
    workload: Workload,
    template: Template,
    told: Told,
    users_annotations: Mapping[str, str],
    former: Former,
    *,
    owner_is_made: bool = False,
) -> InjectionPlan:
    """Plan one template; raises ``ConfigError`` if injection is impossible.

    ``users_annotations`` are those of Muster's that the user wrote; ``former`` is what an earlier
    call left. ``owner_is_made``: only a pod can be changed, and nothing beside its template.
    """
    path = f"{template.path}.spec" if template.path else "spec"
    value = value_of(template.node)
    check_shape(value, template.path)
    pod: Mapping[str, Any] = value.get("spec") or {}
    index = _container_index(workload, template, pod, path, told.settings.container)
    container = pod["containers"][index]
    role = role_of(workload, template, told.settings.role)
    want = _demanded(workload, pod, container, told, role)
    remarks.refuse_conflicts(pod, path, container, want)
    granted = granted_s(pod, path)
    wrapped, prefix, command = _wrapping(workload, container, told.settings.wrap, role)
    beside = {} if owner_is_made else _beside(workload, template, pod, container, told, role)
    late = POLICY in beside or workload.replaces_late(template)
    chosen = "commit" if late and not former.says_below_min else None
    below_min = told.settings.below_min or chosen
    lets_go = below_min == "commit"
    made = SidecarContainer(
        want=want,
        role=role or template.role,
        grace_s=granted or DEFAULT_GRACE_S,
        wrapped=wrapped,
        resources=remarks.checked_resources(pod, path, former, told.settings.resources),
        lease_ttl_s=former.told("lease_ttl_s"),
        start_timeout_s=former.told("start_timeout_s"),
        # The sidecar's own default need not be written, unless a user has written another value.
        below_min=below_min if lets_go or former.says_below_min else None,
    )
    result = InjectionPlan(
        container=str(container.get("name")),
        container_index=index,
        sidecar=former.carried_into(made.container()),
        sidecar_index=facts.starts_before(pod),
        volumes=made.volumes(),
        pull_secrets=_pull_secrets(pod, told.settings.pull_secrets or ()),
        mounts=[sidecar.RUN_MOUNT],
        command_prefix=prefix,
        command=command,
        beside=beside,
        lets_go_below_min=lets_go,
    )
    _plan_pod(result, pod, granted)
    _plan_hook(result, container, made)
    _plan_variables(result, container, made)
    _plan_annotations(result, told.annotations, users_annotations)
    _plan_label(result, value.get("metadata") or {}, want)
    result.notes += map(Remark, former.taken_out())
    alone = owner_is_made
    result.notes += [
        *cautions(workload, template, pod, container, want, wrapped=wrapped, owner_is_made=alone),
        *remarks_on_failures(workload, template, added=POLICY in beside, owner_is_made=alone),
    ]
    _note_pod(result, pod, path, want, owner_is_made=alone)
    _note_command(result, told.settings.wrap, wrapped=wrapped)
    result.notes += on_launches(workload, container, want, wrapped=wrapped)
    return result


def _plan_pod(result: InjectionPlan, pod: Mapping[str, Any], granted: float | None) -> None:
    """Give the pod a grace where it has none, and the restart policy that an added policy needs."""
    if granted is None:
        result.pod[GRACE] = DEFAULT_GRACE_S
    if POLICY in result.beside and RESTART not in pod:
        result.pod[RESTART] = NEVER


def _demanded(
    workload: Workload,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    told: Told,
    role: Role | None,
) -> Demand:
    """Return what the job asks for; a launcher that can never work is the first of the faults."""
    try:
        return demand(workload, pod, container, told.settings, role)
    except ConfigError as error:
        first = world_of_its_own(workload, container)
        raise ConfigError("\n".join(filter(None, (first, str(error))))) from error


def _container_index(
    workload: Workload, template: Template, pod: Mapping[str, Any], path: str, wanted: str | None
) -> int:
    found = {
        str(container.get("name")): index
        for index, container in enumerate(facts.listed(pod, "containers"))
    }
    names = [name for name in found if name not in facts.PROXIES]
    kind = workload.known or Kind(())
    if not names:
        raise ConfigError(f"{path}.containers is empty or missing: give the container that trains")
    if wanted in names:
        return found[wanted]
    # A launcher and its workers seldom name their containers alike.
    if len(names) == 1 and (wanted is None or kind.launcher is not None):
        return found[names[0]]
    if wanted is None and kind.main_container in names:
        return found[kind.main_container]
    missing = "" if wanted is None else f"{wanted} is not in {path}; "
    if wanted in facts.PROXIES:
        missing = f"{wanted} is a mesh's proxy; "
    raise ConfigError(
        f"{named('--container')}: {missing}name the one that trains among {', '.join(names)}"
    )


def _pull_secrets(pod: Mapping[str, Any], wanted: Sequence[str]) -> list[Mapping[str, str]]:
    held = {one.get("name") for one in facts.listed(pod, "imagePullSecrets")}
    return [{"name": name} for name in dict.fromkeys(wanted) if name not in held]


def _beside(
    workload: Workload,
    template: Template,
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    told: Told,
    role: Role | None,
) -> dict[str, Any]:
    """Return the entries needed beside the template so that a pod's end does not end the job.

    A key that is there stays as it is. Raises ``ConfigError`` if one that is asked for cannot be.
    """
    beside: dict[str, Any] = {}
    kind = workload.known or Kind(())
    if kind.lasting is not None and role == "worker":
        key, value = kind.lasting
        around = next(node for node, _ in at(workload.node, template.path.rpartition(".")[0]))
        if child(around, key) is None:
            beside[key] = value
    if told.settings.pod_failure_policy:
        policy = added_policy(workload, template, pod, str(container.get("name")))
        if policy is not None:
            beside[POLICY] = policy
    return beside


def _wrapping(
    workload: Workload, container: Mapping[str, Any], wanted: bool | None, role: Role | None
) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Return whether muster-run is before the command, its prefix to add, and a whole command.

    Raises ``ConfigError`` if the command has to be known and is not.
    """
    command = facts.listed(container, "command")
    if role is not None and wanted is False:
        raise ConfigError(
            f"{named('--no-wrap')}: {CENTRAL.name} and its workers are started by muster-run: leave"
            " --no-wrap out"
        )
    if command and str(command[0]).endswith("/muster-run"):
        return True, (), ()
    if role == "worker":
        ours = (sidecar.MUSTER_RUN, "--", sidecar.MUSTER_EXEC)
        return (True, (*ours, "--"), ()) if command else (True, (), (*ours, "--"))
    if command:
        if wanted is not False:
            return True, (sidecar.MUSTER_RUN, "--"), ()
    elif role == "launcher":
        raise ConfigError(
            f"container {container.get('name')} has no command, and what its image runs is not"
            f" known: give the command with {CENTRAL.name} in it"
        )
    elif wanted:
        raise ConfigError(
            f"{named('--wrap')}: container {container.get('name')} has no command, and what its"
            " image runs is not known: give its command, or --no-wrap"
        )
    if (teller := (workload.known or Kind(())).tells_torch) is not None:
        raise ConfigError(
            f"{named('--no-wrap')}: {teller} gives container {container.get('name')} PET_*"
            " variables that win over all others, and only muster-run overrules them: give the"
            " container its command, and leave --no-wrap out"
        )
    return False, (), ()


def _plan_hook(result: InjectionPlan, container: Mapping[str, Any], made: SidecarContainer) -> None:
    if "preStop" in (container.get("lifecycle") or {}):
        result.warn(
            f"container {result.container} has a preStop hook: kept; it runs before SIGTERM, and"
            " its time comes out of the grace"
            if made.wrapped
            else f"container {result.container} has a preStop hook: kept, so nothing holds its end"
            f" back; call {sidecar.MUSTER_HOLD} at the end of that hook"
        )
    elif not made.wrapped:
        result.pre_stop = sidecar.HOLD_HOOK


def _plan_variables(
    result: InjectionPlan, container: Mapping[str, Any], made: SidecarContainer
) -> None:
    held = {variable.get("name"): variable for variable in facts.listed(container, "env")}
    for variable in made.delivered():
        name = variable["name"]
        if name not in held:
            result.env.append(variable)
        elif held[name] != variable:
            result.warn(
                f"container {result.container} sets {name}: kept, where Muster would have"
                f" {variable.get('value', 'it from the pod')!r}"
            )


def _plan_annotations(
    result: InjectionPlan, wanted: Mapping[str, str], users_annotations: Mapping[str, str]
) -> None:
    for name, text in wanted.items():
        users = users_annotations.get(name)
        if users is None:
            result.annotations[name] = text
        elif users != text:
            raise ConfigError(
                f"the annotation {name} says {users!r}, and --{name.removeprefix(DOMAIN)} says"
                f" {text!r}: change or remove one"
            )
    result.users += [f"annotations/{name}" for name in users_annotations]
    names = {annotation(name) for name in TABLE}
    result.notes += [
        warning(f"the annotation {name} is kept, but nothing reads it")
        for name in users_annotations
        if name not in names
    ]


def _plan_label(result: InjectionPlan, metadata: Mapping[str, Any], want: Demand) -> None:
    if LABEL in (metadata.get("labels") or {}):
        result.users.append(f"labels/{LABEL}")
    else:
        # For an object that creates one job after the other: the name that they have in common.
        result.labels[LABEL] = job_label(want.job)


def _note_pod(
    result: InjectionPlan, pod: Mapping[str, Any], path: str, want: Demand, *, owner_is_made: bool
) -> None:
    grace = pod.get(GRACE)
    if grace is not None and grace < SHORT_S:
        result.warn(f"{path}.{GRACE} is {grace}: kept, though few saves are that fast")
    if "resources" not in result.sidecar and facts.asks_as_a_whole(pod):
        result.note(
            f"{path}.resources are for all containers of the pod, so the sidecar asks for none of"
            f" its own: leave {SIDECAR_MEMORY} of memory for it"
        )
    elif "resources" not in result.sidecar:
        result.warn(
            f"{path}: no container asks for CPU or memory, so the sidecar does not either: the pod"
            " stays BestEffort, the first to be evicted"
        )
    if want.kind.endless:
        result.warn(
            f"{path}: its containers are started again also when training has ended well, and then"
            " find the run closed for good: for training that ends, take a Job; to train again,"
            " scale to 0 first"
        )
    if want.on_host_network:
        tunnel = f", {want.tunnel_port} (commands of {CENTRAL.name}, there)"
        result.note(
            f"{path}.hostNetwork: the sidecar takes ports {want.http_port} (health, on the node's"
            f" address){tunnel if want.role == 'worker' else ''} and {want.relay_port}"
            " (rendezvous, on its loopback); no two pods of the job fit on one node"
        )
    if result.pull_secrets and not pod.get("imagePullSecrets") and not owner_is_made:
        result.warn(
            f"{path}.imagePullSecrets is added: a pod that has them gets none of its"
            " ServiceAccount's: give those by --pull-secrets, too, if its images need them"
        )


def _note_command(result: InjectionPlan, wrap: bool | None, *, wrapped: bool) -> None:
    name = result.container
    if wrapped and not result.command_prefix and not result.command:
        result.note(f"container {name}: muster-run is before its command already: kept")
    if not wrapped and wrap is None:
        result.note(
            f"container {name} has no command, and what its image runs is not known: muster-hold as"
            " its preStop hook holds its end back, and torchrun gets its settings as variables;"
            " with a command, muster-run would do both"
        )
