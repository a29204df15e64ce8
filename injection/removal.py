# SPDX-License-Identifier: Apache-2.0
"""Removal of the sidecar from a text, and the check that no edit changes other nodes than its own.

A removal gives the text as it was before the injection. Other nodes may share a YAML anchor or a
merge key with those that an edit targets: one place in the text, two meanings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

from ruamel.yaml.nodes import Node, ScalarNode

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
from injection.failure_policy import DEFAULT_GRACE_S, GRACE, NEVER, POLICY, RESTART
from injection.settings import LABEL, TABLE, annotation
from injection.text_edits import Splices
from injection.workloads import Manifest, Place, Words, Workload, at, steps, walk
from injection.yaml_tree import MERGE, child, entry, fields, items, text_of, value_of
from rdzv.errors import ConfigError

_PREFIXES = (
    (sidecar.MUSTER_RUN, "--", sidecar.MUSTER_EXEC, "--"),
    (sidecar.MUSTER_RUN, "--"),
)
_OURS = {"labels": {LABEL}, "annotations": {ANNOTATION, *map(annotation, TABLE)}}


def removed(manifest: Manifest, places: Collection[Place] | None = None) -> str:
    """Return the text without what the records of its templates, or of those at ``places``, name.

    It is the text itself if there is no record.
    """
    splices = Splices(manifest.text)
    found: dict[int, tuple[Node, Node | None]] = {}
    for workload in manifest.objects:
        for template, path in injected(workload.node):
            around = at(workload.node, path.rpartition(".")[0])
            found[id(template)] = template, around[-1][0] if around else None
    if places is not None:
        objects = manifest.objects
        meant = {id(node) for n, path in places for node, _ in at(objects[n].node, path)}
        found = {key: one for key, one in found.items() if key in meant}
    for template, beside in found.values():
        record = Record.of(template)
        assert record is not None
        _Removal(splices, record, beside).run(template)
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


Part = tuple[Words, Node]

_BESIDE = (RESTART, POLICY)
"""The keys of the entries that are put beside a template."""

UNSAFE_EDIT = (
    "this is written in a way in which nothing can be put into it safely, such as an anchor"
    " on a line of its own: write it more plainly"
)
_OUR_PARTS = {"initContainers": {sidecar.NAME}, "volumes": sidecar.VOLUMES}


def check_unintended(
    before: Sequence[Workload],
    after: Sequence[Workload],
    numbers: Iterable[int],
    touched: Mapping[Place, int],
) -> None:
    """Raise ``ConfigError`` if more has changed in the objects of these numbers than was meant.

    ``touched`` are the templates that were meant, each with the index of its training container.
    """
    for number in numbers:
        ours = {path: index for (n, path), index in touched.items() if n == number}
        was = _parts(before[number].node, ours)
        now = _parts(after[number].node, ours)
        changed = _difference(was, now)
        if changed is not None:
            there = after if any(words == changed for words, _ in now) else before
            raise _spread(there, number, changed)


def shared(used: str, home: str) -> ConfigError:
    """Return the error for a place whose text is written at another.

    Other nodes may share a YAML anchor or a merge key with them: one place in the text, two
    meanings.
    """
    return ConfigError(
        f"{used} is written at {home}, by an anchor or a merge key, and would change with it:"
        " write it out in its own place"
    )


def place_name(workload: Workload, path: str) -> str:
    """Return the name of a place in an object, for messages."""
    return f"{workload.label}: {path}" if path else workload.label


def _parts(node: Node, ours: Mapping[str, int]) -> list[Part]:
    """Return every part of an object, in order, except what inject changes in templates ``ours``.

    ``ours`` has the index of the training container of each.
    """
    around = {path.rpartition(".")[0] for path in ours}

    def below(words: Words, one: Node) -> Iterable[Part]:
        path = ".".join(words)
        for name, inner in steps(one):
            if path in around and name in _BESIDE:
                continue
            if path not in ours or name not in ("spec", "metadata"):
                yield (name,), inner
            elif name == "spec":
                yield from _parts_of_pod(inner, ours[path])

    return list(walk(node, below))


def _parts_of_pod(pod: Node, index: int) -> Iterator[Part]:
    for name, below in steps(pod):
        if name in _OUR_PARTS:
            others = [i for i in items(below) if text_of(child(i, "name")) not in _OUR_PARTS[name]]
            for number, item in enumerate(others):
                yield ("spec", name, text_of(child(item, "name")) or str(number)), item
        elif name == "containers":
            for number, (container, item) in enumerate(steps(below)):
                if number != index:
                    yield ("spec", name, container), item
        elif name not in (GRACE, RESTART, "imagePullSecrets"):
            yield ("spec", name), below


def _difference(before: Sequence[Part], after: Sequence[Part]) -> Words | None:
    """Return the path to the first part that has been added, changed or removed, or None."""
    left = {words for words, _ in after}
    for old, new in zip_longest(before, after):
        if old is None or (new is not None and old[0] != new[0] and old[0] in left):
            assert new is not None
            return new[0]
        if new is None or old[0] != new[0] or _own(old[1]) != _own(new[1]):
            return old[0]
    return None


def _own(node: Node) -> Any:
    """Return a node's own content, without the nodes below it."""
    return value_of(node) if isinstance(node, ScalarNode) else type(node)


def _spread(objects: Sequence[Workload], number: int, changed: Words) -> ConfigError:
    """Return the error that names the place where the text of a changed part is."""
    places: dict[int, list[tuple[int, Words]]] = {}
    for n, workload in enumerate(objects):
        for words, node in _parts(workload.node, {}):
            places.setdefault(id(node), []).append((n, words))
    nodes = dict(_parts(objects[number].node, {}))
    for length in range(len(changed) + 1):
        used = changed[:length]
        if used not in nodes:
            break
        # The text is at the first place; the change was made there, or through another place.
        (home, written), *others = places[id(nodes[used])]
        if (home, written) == (number, used):
            if not others:
                continue
            number, used = others[0]
            nodes = dict(_parts(objects[number].node, {}))
        if used and fields(nodes[used[:-1]]) and entry(nodes[used[:-1]], used[-1]) is None:
            used, written = (*used[:-1], MERGE), written[:-1]
        return shared(
            place_name(objects[number], ".".join(used)),
            place_name(objects[home], ".".join(written)),
        )
    return ConfigError(UNSAFE_EDIT)
