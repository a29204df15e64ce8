# SPDX-License-Identifier: Apache-2.0
"""Settings, each read from its flag, else its variable, else its default; all faults at once.

A component's configuration is one frozen dataclass. Each of its fields carries a ``Setting``: that
table alone makes the flags, the variables, ``--help`` and the messages.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar, cast

from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.sentences import PREFIX, named, variable_of

SETTING = "setting"
"""The name in a field's metadata for its ``Setting``; for a nested configuration, that of the
table to take of it."""

_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")
"""Suffixes of the variables that Kubernetes adds for each Service, as for one called muster."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    ``parse`` turns text into the value and raises ``ValueError`` with what was expected.
    ``default`` is the text of the default, a function from the environment to it, or None for a
    setting that must be given. ``why`` is a sentence for ``--help``; ``metavar`` names the unit.
    ``quote`` spells a wrong text in a message, but not one that may hold a secret. ``otherwise``
    describes the default in words for ``--help``; if it is None, ``default`` is shown.
    """

    flag: str
    parse: Callable[[str], Any]
    default: str | Callable[[Mapping[str, str]], str | None] | None
    metavar: str
    why: str
    quote: Callable[[str], str] = repr
    otherwise: str | None = None

    @property
    def plain(self) -> str:
        """The flag without its dashes."""
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str:
        """The environment variable that means the same as the flag."""
        return variable_of(self.flag)

    @property
    def brackets(self) -> str:
        """The variable and the default, or that it is required, as click ends its help texts."""
        if self.otherwise:
            note = f"default: ({self.otherwise})"
        elif self.otherwise is None and self.default is None:
            note = "required"
        else:
            note = f"default: {self.default}" if isinstance(self.default, str) else ""
            note = note if self.default else ""
        return f"[{'; '.join(filter(None, (f'env var: {self.variable}', note)))}]"

    def default_text(self, environ: Mapping[str, str]) -> str | None:
        """Return the default in this environment, or None if the setting must be given."""
        return self.default(environ) if callable(self.default) else self.default


def field(setting: Setting) -> Any:
    """Make the dataclass field that holds ``setting``'s value."""
    return dataclasses.field(metadata={SETTING: setting})


def part(kind: type[Any], table: str = SETTING) -> Any:
    """Make the dataclass field that holds a part of the settings, which has a class of its own.

    ``table``: the name of each setting in the metadata of its field. Any but ``SETTING``: some may
    not be given, so the part is a mapping.
    """
    return dataclasses.field(metadata={"part": kind, "table": table})


class Configuration(Protocol):
    """A frozen dataclass whose fields are settings."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each fault between settings; ``values`` lacks the wrong ones."""
        ...


C = TypeVar("C", bound=Configuration)


def settings_of(kind: type[Configuration], table: str = SETTING) -> dict[str, Setting]:
    """Return the table of a configuration: attribute name to setting; parts are unfolded."""
    found: dict[str, Setting] = {}
    for item in dataclasses.fields(kind):
        if "part" in item.metadata:
            found |= settings_of(item.metadata["part"], item.metadata["table"])
        elif table in item.metadata:
            found[item.name] = cast(Setting, item.metadata[table])
    return found


def built(kind: type[C], values: Mapping[str, Any]) -> C:
    """Build a configuration of the values of its settings, those of its parts among them."""
    own: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if "part" in item.metadata:
            inner, table = item.metadata["part"], item.metadata["table"]
            of_part = {name: values[name] for name in settings_of(inner, table)}
            own[item.name] = built(inner, of_part) if table == SETTING else of_part
        else:
            own[item.name] = values[item.name]
    return kind(**own)


def load(kind: type[C], flags: Mapping[str, str | None], environ: Mapping[str, str]) -> C:
    """Read a configuration; ``flags`` maps attribute names to the texts given, or None.

    Raises ``ConfigError`` with all faults, one a line, each with its flag and variable.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, setting in settings_of(kind).items():
        given = flags.get(name)
        text, source = (given, setting.flag) if given is not None else (None, setting.variable)
        if text is None:
            # Manifests often set a variable to "" where they mean that it is not set.
            text = environ.get(setting.variable) or setting.default_text(environ)
        if text is None:
            faults.append(f"{named(setting.flag)} is missing: {setting.why}")
            continue
        try:
            values[name] = setting.parse(text)
        except ValueError as error:
            shown = setting.quote(text)
            wrong = f"{shown} from {source} is wrong" if given is None else f"{shown} is wrong"
            sentence = str(error) if str(error).startswith(shown) else f"{wrong}: {error}"
            faults.append(f"{named(setting.flag)}: {sentence}")
    faults += kind.faults(values)
    if faults:
        raise ConfigError("\n".join(faults))
    return built(kind, values)


def unknown_variables(
    environ: Mapping[str, str], table: Mapping[str, Setting], others: frozenset[str]
) -> list[str]:
    """Return a sentence, with a near name, for each ``MUSTER_*`` variable that nothing reads."""
    # Only a sidecar asks: commands start faster without it.
    import difflib

    names = {setting.variable for setting in table.values()} | others
    sentences = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in names or _SERVICE_LINK.search(name):
            continue
        own_part = name.removeprefix(PREFIX)
        near = difflib.get_close_matches(own_part, [n.removeprefix(PREFIX) for n in names], n=1)
        hint = f": did you mean {PREFIX}{near[0]}?" if near else ""
        sentences.append(f"{name} is set, but nothing reads it{hint}")
    return sentences
