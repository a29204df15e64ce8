# SPDX-License-Identifier: Apache-2.0
"""The policy of a job: the settings that all of its pods go by, with the sizes of its worlds.

A field is all that makes a setting: its parser, its flags with their texts for ``--help``, and the
name under which the records keep it. A decision that goes by it reads it from ``JobPolicy``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from rdzv import settings as texts
from rdzv.dataclass import dataclass
from rdzv.records.codec import Ordinal, Seconds, decode, taking
from rdzv.sentences import named
from rdzv.settings import SETTING, Setting, settings_of

NODES = texts.count(1, 100_000)


take_sizes = taking(
    list,
    lambda sizes: all(type(size) is int and size > 0 for size in sizes),
    "numbers from 1 on",
    tuple,
)
"""Takes numbers of nodes."""


def _policy(
    setting: Setting,
    stored: str,
    default: Any = dataclasses.MISSING,
    **commands: Mapping[str, str | None],
) -> Any:
    """Make the field of ``setting``; it is called ``stored`` in records.

    ``commands``: what differs in the ``Setting`` of other commands that have the flag: ``inject``,
    ``change`` (``muster set``) and ``local``.
    """
    table = {SETTING: setting, "stored": stored}
    for command, differing in commands.items():
        changes: dict[str, Any] = {"default": None, **differing}
        table[command] = dataclasses.replace(setting, **changes)
    return dataclasses.field(default=default, metadata=table)


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """The settings that all pods of a job go by; a pod's own are the job's template.

    A world's number of nodes is one of ``sizes``, from ``min_nodes`` to ``max_nodes``; if ``sizes``
    is empty, a multiple of ``unit``. A job that has no size at all within its bounds never trains;
    ``fault`` says so. ``gather_s``: how long newcomers beside a world that trains wait for others
    to join it with them, in seconds. Longer: fewer worlds, each of which costs all ranks a restart.
    Shorter: less time without the newcomers' work. At least the last measured start, also at 0.
    """

    min_nodes: int = _policy(
        Setting(
            "--min",
            NODES,
            None,
            "N",
            "Fewest nodes the job can train with; other values than the job's change it.",
        ),
        "min",
        inject={
            "why": "Fewest pods the job can train with.",
            "otherwise": "as an elastic object says",
        },
        change={"why": "Smallest world."},
    )
    max_nodes: int = _policy(
        Setting(
            "--max",
            NODES,
            None,
            "N",
            "Most nodes the job takes; more wait on standby; likewise.",
        ),
        "max",
        inject={"why": "Most pods the job takes.", "otherwise": "as an elastic object says"},
        change={"why": "Largest world; extra pods stand by."},
    )
    sizes: Annotated[tuple[int, ...], take_sizes] = _policy(
        Setting(
            "--sizes",
            texts.sizes,
            "",
            "N,…",
            "Numbers of nodes that a world may have, from min to max; by default any.",
        ),
        "sizes",
        (),
        inject={
            "why": "Numbers of pods that may train together.",
            "otherwise": "any from min to max",
        },
        change={"why": "World sizes that are allowed.", "metavar": "N,…|any"},
        local={
            "why": "Numbers of nodes that may train together.",
            "default": "",
            "otherwise": "any from min to max",
        },
    )
    unit: Ordinal = _policy(
        Setting(
            "--unit",
            NODES,
            "1",
            "N",
            "A world has a multiple of so many nodes; the rest wait on standby.",
        ),
        "unit",
        1,
        inject={"why": "Train with a multiple of so many pods.", "otherwise": "1"},
        change={"why": "World size must be a multiple of N."},
        local={"why": "Train with a multiple of so many nodes.", "default": "1"},
    )
    gather_s: Seconds = _policy(
        Setting(
            "--gather",
            texts.duration_s(0, 86_400),
            "60s",
            "TIME",
            "How long the first newcomer to a world that trains waits for others, which are then"
            " let in with it, by one save and one restart; at least the last measured start, also"
            " at 0.",
        ),
        "gather_s",
        0.0,
        inject={
            "why": "How long the first newcomer waits for others to be let in with it, at least"
            " the last measured start.",
            "otherwise": "60s",
        },
        change={"why": "Collect newcomers this long, and admit them together."},
        local={
            "why": "How long the first newcomer waits for others to be let in with it: short, as"
            " here all start at once and a new world costs a second.",
            "default": "2s",
        },
    )

    def largest(self, nodes: int) -> int:
        """Return the largest size that ``nodes`` nodes are enough for; 0 if there is none."""
        room = min(nodes, self.max_nodes)
        if self.sizes:
            return max((size for size in self.sizes if self.min_nodes <= size <= room), default=0)
        size = room - room % self.unit
        return size if size >= self.min_nodes else 0

    @property
    def smallest(self) -> int:
        """The smallest size that is allowed; ``min_nodes`` if there is none."""
        least = self.min_nodes
        if self.sizes:
            return min((size for size in self.sizes if size >= least), default=least)
        return -(-least // self.unit) * self.unit

    @property
    def full(self) -> int:
        """The largest size that is allowed; 0 if there is none."""
        return self.largest(self.max_nodes)

    @property
    def fault(self) -> str:
        """The reason why no world could form; empty if one can."""
        least, most = self.min_nodes, self.max_nodes
        if least > most:
            return f"min is {least}, more than max, which is {most}: raise max or lower min"
        if self.full:
            return ""
        of = f"none of the sizes {', '.join(map(str, self.sizes))}"
        if not self.sizes:
            of = f"no multiple of {self.unit}"
        return f"{of} lies between min {least} and max {most}: no world could form"

    @property
    def bounds_alone(self) -> JobPolicy:
        """The policy of a sidecar of 0.1.0, and of launchers: the bounds, and nothing else."""
        return JobPolicy(self.min_nodes, self.max_nodes)

    @property
    def sizes_in_words(self) -> str:
        """The bounds and the sizes between them, for a sentence."""
        text = f"min {self.min_nodes} and max {self.max_nodes}"
        if self.sizes:
            return f"{text}, in sizes {', '.join(map(str, self.sizes))}"
        return text if self.unit == 1 else f"{text}, in multiples of {self.unit}"

    @property
    def stored(self) -> dict[str, object]:
        """The values by their names in records, and for programs."""
        values = ((one, getattr(self, one.name)) for one in dataclasses.fields(JobPolicy))
        return {
            one.metadata["stored"]: list(value) if isinstance(value, tuple) else value
            for one, value in values
        }

    @property
    def spelled(self) -> dict[str, str]:
        """The values as texts, by the names of their flags."""
        return {
            setting.plain: spelled(name, getattr(self, name))
            for name, setting in POLICY_TABLE.items()
        }

    @property
    def template(self) -> str:
        """The policy as text, as records keep a pod's: equal ones are spelled alike.

        Defaults are left out.
        """
        texts_of = zip(dataclasses.fields(JobPolicy), self.spelled.items(), strict=True)
        return " ".join(
            f"{name}={text}"
            for one, (name, text) in texts_of
            if getattr(self, one.name) != one.default
        )

    def changed(self, given: Mapping[str, Any]) -> Self:
        """Return the policy with other values; sizes replace a unit, and a unit replaces sizes."""
        values = dict(given)
        if given.get("sizes"):
            values["unit"] = 1
        elif given.get("unit", 1) > 1:
            values["sizes"] = ()
        return dataclasses.replace(self, **values)

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield one sentence for each fault; a setting that is missing or None was not given."""
        sizes, unit = values.get("sizes") or (), values.get("unit") or 1
        if sizes and unit > 1:
            yield (
                f"{named('--sizes')} and {named('--unit')} are both given: give --sizes alone,"
                " which names every size that is allowed"
            )
            return
        match values:
            case {"min_nodes": int(least), "max_nodes": int(most)}:
                pass
            case _:
                return
        if least > most:
            yield (
                f"{named('--min')} is {least}, more than {named('--max')}, which is {most}: raise"
                " max or lower min"
            )
        elif fault := JobPolicy(least, most, sizes, unit).fault:
            yield f"{named('--sizes' if sizes else '--unit')}: {fault}"


POLICY_TABLE = settings_of(JobPolicy)
"""The settings of the sidecar that make a policy, by the names of their fields."""


def spelled(name: str, value: Any) -> str:
    """Return the text of which the parser of the setting ``name`` makes ``value``."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}s" if name.endswith("_s") else str(value)


def variables_of(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the sidecar's variables for values by the names of fields; None for one not given."""
    texts_of = {name: values.get(name) for name in POLICY_TABLE}
    return {
        POLICY_TABLE[name].variable: None if value in (None, ()) else spelled(name, value)
        for name, value in texts_of.items()
    }


def take_policy(key: str, fields: Mapping[str, Any], _name: str) -> JobPolicy:
    """Take the policy whose values are fields of the record itself."""
    return decode(JobPolicy, key, fields)
