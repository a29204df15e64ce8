# SPDX-License-Identifier: Apache-2.0
"""Checks that an edit changes the meaning only of the nodes it targets.

Other nodes may share a YAML anchor or a merge key with them: one place in the text, two meanings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ruamel.yaml.nodes import Node, ScalarNode

from injection import sidecar
from injection.failure_policy import POLICY, RESTART
from injection.grace import GRACE
from injection.workloads import Place, Workload, steps
from injection.yaml_tree import MERGE, child, entry, items, keys, text_of, value_of
from rdzv.errors import ConfigError

Words = tuple[str, ...]
"""The words of a path."""
Part = tuple[Words, Node]

_BESIDE = (RESTART, POLICY)
"""The keys of the entries that are put beside a template."""

UNSAFE = (
    "this is written in a way in which nothing can be put into it safely, such as an anchor"
    " on a line of its own: write it more plainly"
)
_OURS = {"initContainers": {sidecar.NAME}, "volumes": sidecar.VOLUMES}


def check(
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
        was = list(_parts(before[number].node, ours))
        now = list(_parts(after[number].node, ours))
        changed = _difference(was, now)
        if changed is not None:
            there = after if any(words == changed for words, _ in now) else before
            raise _spread(there, number, changed)


def shared(used: str, home: str) -> ConfigError:
    """Return the error for a place whose text is written at another."""
    return ConfigError(
        f"{used} is written at {home}, by an anchor or a merge key, and would change with it:"
        " write it out in its own place"
    )


def place_name(workload: Workload, path: str) -> str:
    """Return the name of a place in an object, for messages."""
    return f"{workload.label}: {path}" if path else workload.label


def _parts(node: Node, ours: Mapping[str, int], words: Words = ()) -> Iterator[Part]:
    """Yield every part of an object, in order, except what inject changes in templates ``ours``."""
    yield words, node
    index = ours.get(".".join(words))
    for name, below in steps(node):
        where = (*words, name)
        if name in _BESIDE and any(_is_around(words, path) for path in ours):
            continue
        if index is None:
            yield from _parts(below, ours, where)
        elif name == "spec":
            yield from _parts_of_pod(below, index, where)
        elif name != "metadata":
            yield from _parts(below, {}, where)


def _is_around(words: Words, path: str) -> bool:
    """Return whether the template at ``path`` is a value of the mapping at these words."""
    return ".".join(words) == path.rpartition(".")[0]


def _parts_of_pod(pod: Node, index: int, words: Words) -> Iterator[Part]:
    for name, below in steps(pod):
        where = (*words, name)
        if name in _OURS:
            others = [i for i in items(below) if text_of(child(i, "name")) not in _OURS[name]]
            for number, item in enumerate(others):
                name = text_of(child(item, "name")) or str(number)
                yield from _parts(item, {}, (*where, name))
        elif name == "containers":
            for number, (name, item) in enumerate(steps(below)):
                if number != index:
                    yield from _parts(item, {}, (*where, name))
        elif name not in (GRACE, RESTART, "imagePullSecrets"):
            yield from _parts(below, {}, where)


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
        if used and keys(nodes[used[:-1]]) and entry(nodes[used[:-1]], used[-1]) is None:
            used, written = (*used[:-1], MERGE), written[:-1]
        return shared(
            place_name(objects[number], ".".join(used)),
            place_name(objects[home], ".".join(written)),
        )
    return ConfigError(UNSAFE)
