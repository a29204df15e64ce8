# SPDX-License-Identifier: Apache-2.0
"""Removal of the sidecar: gives the text as it was before the injection."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set

from ruamel.yaml.nodes import Node

from injection import sidecar
from injection.annotations import (
    ANNOTATION,
    WHOLE_COMMAND,
    Record,
    beside_word,
    container_word,
    injected,
    pull_secret_word,
    variable_word,
)
from injection.failure_policy import NEVER, RESTART
from injection.grace import DEFAULT_GRACE_S, GRACE
from injection.settings import LABEL, TABLE, annotation
from injection.text_edits import Splices
from injection.workloads import Place, at, workloads
from injection.yaml_tree import child, documents, entry, items, text_of, value_of

_PREFIXES = (
    (sidecar.MUSTER_RUN, "--", sidecar.MUSTER_EXEC, "--"),
    (sidecar.MUSTER_RUN, "--"),
)
_OURS = {"labels": {LABEL}, "annotations": {ANNOTATION, *map(annotation, TABLE)}}


def removed(text: str, places: Collection[Place] | None = None) -> str:
    """Take out of every template, or only of those at ``places``, what its record names.

    Returns ``text`` itself if there is no record. Raises ``ConfigError`` if it is no YAML.
    """
    splices = Splices(text)
    objects = list(workloads(documents(text)))
    found = {id(node): node for workload in objects for node, _ in injected(workload.node)}
    around = {
        id(node): beside
        for workload in objects
        for node, path in injected(workload.node)
        for beside, _ in at(workload.node, path.rpartition(".")[0])
    }
    if places is not None:
        meant = {id(node) for number, path in places for node, _ in at(objects[number].node, path)}
        found = {key: node for key, node in found.items() if key in meant}
    for template in found.values():
        record = Record.of(template)
        assert record is not None
        _Removal(splices, record, around.get(id(template))).run(template)
    return splices.result()


class _Removal:
    """The removal from one template."""

    def __init__(self, splices: Splices, record: Record, around: Node | None) -> None:
        self._around = around
        self._splices = splices
        self._added = frozenset(record.added)
        self._users = frozenset(record.users)

    def run(self, template: Node) -> None:
        """Take out everything that the record names."""
        pod = child(template, "spec")
        if pod is not None:
            container = self._container(pod)
            if container is not None:
                self._from_container(container)
            gone = self._from_list(pod, "initContainers", lambda item: _named(item, {sidecar.NAME}))
            gone |= self._from_list(pod, "volumes", lambda item: _named(item, sidecar.VOLUMES))
            gone |= self._from_list(pod, "imagePullSecrets", self._is_added_secret)
            ours = {GRACE: str(DEFAULT_GRACE_S), RESTART: NEVER}
            gone |= {k for k, v in ours.items() if k in self._added and text_of(child(pod, k)) == v}
            self._splices.drop_entries(pod, lambda key, _: key in gone)
        self._from_metadata(template)
        if self._around is not None:
            self._splices.drop_entries(self._around, self._is_beside)

    def _is_beside(self, key: str, node: Node) -> bool:
        return beside_word(key, value_of(node)) in self._added

    def _container(self, pod: Node) -> Node | None:
        """Find the training container: by its name or, if a user changed that, by its mount."""
        found = items(child(pod, "containers"))
        words = {container_word(str(value_of(child(c, "name")))): c for c in found}
        named = [words[word] for word in words if word in self._added]
        mounting = [c for c in found if any(map(_is_run_mount, items(child(c, "volumeMounts"))))]
        return next(iter([*named, *mounting]), None)

    def _from_container(self, container: Node) -> None:
        command = child(container, "command")
        whole = WHOLE_COMMAND in self._added
        emptied = False
        if (whole or "command" in self._added) and command is not None:
            for prefix in _PREFIXES:
                words = items(command)[: len(prefix)]
                if [text_of(word) for word in words] == [*prefix]:
                    ours = {id(word) for word in words}
                    emptied = self._splices.drop_items(command, lambda item: id(item) in ours)  # noqa: B023
                    break
        gone = self._from_list(container, "volumeMounts", _is_run_mount)
        gone |= self._from_list(container, "env", self._is_added_variable)
        gone |= {"command"} if whole and emptied else set()
        lifecycle = child(container, "lifecycle")
        if (
            "preStop" in self._added
            and lifecycle is not None
            and value_of(child(lifecycle, "preStop")) == sidecar.HOLD_HOOK
            and self._splices.drop_entries(lifecycle, lambda key, _: key == "preStop")
        ):
            gone |= self._added & {"lifecycle"}
        self._splices.drop_entries(container, lambda key, _: key in gone)

    def _is_added_variable(self, item: Node) -> bool:
        value = value_of(item)
        return isinstance(value, Mapping) and variable_word(value) in self._added

    def _is_added_secret(self, item: Node) -> bool:
        return pull_secret_word(text_of(child(item, "name"))) in self._added

    def _from_list(self, mapping: Node, key: str, ours: Callable[[Node], bool]) -> set[str]:
        """Take Muster's items out; return ``key`` if the list was added and none is left."""
        written = entry(mapping, key)
        if written is None:
            return set()
        emptied = self._splices.drop_items(written[1], ours)
        return {key} & self._added if emptied else set()

    def _from_metadata(self, template: Node) -> None:
        metadata = child(template, "metadata")
        if metadata is None:
            return
        gone: set[str] = set()
        for part in ("labels", "annotations"):
            written = entry(metadata, part)
            if written is not None and self._splices.drop_entries(
                written[1],
                lambda key, _, part=part: (  # type: ignore[misc]
                    key in _OURS[part] and f"{part}/{key}" not in self._users
                ),
            ):
                gone |= self._added & {part}
        if self._splices.drop_entries(metadata, lambda key, _: key in gone):
            self._splices.drop_entries(
                template, lambda key, _: key == "metadata" and "metadata" in self._added
            )


def _named(item: Node, names: Set[str]) -> bool:
    return text_of(child(item, "name")) in names


def _is_run_mount(item: Node) -> bool:
    return bool(value_of(item) == sidecar.RUN_MOUNT)
