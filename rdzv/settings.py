# SPDX-License-Identifier: Apache-2.0
"""Settings, each read from its flag, its variable, or its default; and parsers of their texts.

A component's configuration is one frozen dataclass. Each of its fields carries a ``Setting``: that
table alone makes the flags, the variables, ``--help`` and the messages. All faults are found at
once. A parser takes text and raises ``ValueError`` that says what was expected.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar, cast
from urllib.parse import urlsplit

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


NAME_LENGTH = 253
"""The longest name that Kubernetes gives a pod."""

SIZES_MAX = 100
"""Bound on listed sizes, as records are small; a longer list should be ``--unit`` instead."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", re.ASCII)
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def name(text: str) -> str:
    """Parse a name that is also safe as a host of a list, which goes unquoted into a shell line."""
    if not _NAME.fullmatch(text) or len(text) > NAME_LENGTH:
        raise ValueError(
            f"a name has letters, digits, '.', '_' and '-', starts with a letter or digit,"
            f" and is no longer than {NAME_LENGTH}"
        )
    return text


def free_text(text: str) -> str:
    """Parse any printable text of at most ``NAME_LENGTH`` characters."""
    if not text.isprintable() or len(text) > NAME_LENGTH:
        raise ValueError(f"expected printable text, no longer than {NAME_LENGTH}")
    return text


def topology(text: str) -> str:
    """Parse a path of names, each of them empty if it is unknown; strip the slashes at its end."""
    if not re.fullmatch(r"[A-Za-z0-9._:/-]*", text, re.ASCII) or len(text) > NAME_LENGTH:
        raise ValueError(
            "expected a path such as block/rack, the most general part first, of letters, digits,"
            f" '.', '_', ':' and '-', no longer than {NAME_LENGTH}"
        )
    return text.rstrip("/")


def directory(text: str) -> str:
    """Parse a path that needs no quotes in a shell; resolve a relative one, as a shell does."""
    path = _from_here(text)
    if not re.fullmatch(r"/[A-Za-z0-9_./+@%=:,-]*", path, re.ASCII):
        where = "" if path == text else f"; it is {path!r} from here"
        raise ValueError(f"expected a path without blanks or quotes{where}")
    return path


def _from_here(path: str) -> str:
    """Return ``path``, made absolute and normalised.

    Only for a relative path is the system asked for the working directory, which may take a while.
    """
    return os.path.normpath(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))


def duration_s(least_s: float, most_s: float) -> Callable[[str], float]:
    """Return a parser of times such as ``10``, ``10s``, ``500ms`` or ``1m``, in seconds."""

    def parse(text: str) -> float:
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise ValueError("expected a time such as 10s, 500ms or 1m")
        seconds = float(match[1]) * _UNIT_S[match[2]]
        if not least_s <= seconds <= most_s:
            raise ValueError(f"expected {least_s:g}s to {most_s:g}s")
        return seconds

    return parse


def whole_duration_s(least_s: int, most_s: int) -> Callable[[str], int]:
    """Return a parser of times such as ``10s``, in whole seconds, rounded up."""
    exact_s = duration_s(least_s, most_s)

    def parse(text: str) -> int:
        return math.ceil(exact_s(text))

    return parse


def count(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
            raise ValueError("expected a whole number")
        number = int(text)
        if not least <= number <= most:
            raise ValueError(f"expected {least} to {most}")
        return number

    return parse


def sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of nodes, smallest first; return none if the text is empty or ``any``."""
    if text.strip() in ("", "any"):
        return ()
    numbers = {count(1, 100_000)(part) for part in text.split(",")}
    if len(numbers) > SIZES_MAX:
        raise ValueError(f"expected at most {SIZES_MAX} sizes, or --unit")
    return tuple(sorted(numbers))


def index(text: str) -> int:
    """Parse a number from 0 on; return -1 for no text, as of a pod that has no such label."""
    return count(0, 999_999_999)(text) if text else -1


def port(text: str) -> int:
    """Parse a TCP port, or 0."""
    if text.startswith(("tcp://", "udp://")):
        raise ValueError(
            "expected a port; Kubernetes made this variable for a Service of that name:"
            " set enableServiceLinks: false in the pod, or name the Service otherwise"
        )
    return count(0, 65535)(text)


def real_port(text: str) -> int:
    """Parse a TCP port other than 0."""
    number = port(text)
    if number == 0:
        raise ValueError("expected 1 to 65535")
    return number


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts one of ``choices``."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return text

    return parse


def address(text: str) -> str:
    """Parse the IP address of one interface."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("expected an IP address such as 10.1.2.3 or fd00::5") from None
    if ip.is_unspecified or ip.is_multicast:
        raise ValueError("expected the address of one interface, not of all or of a group")
    return text


def endpoints(text: str) -> tuple[str, ...]:
    """Parse one or more ``host:port``, with ``https://`` for TLS, separated by commas."""
    addresses = tuple(_endpoint(part.strip()) for part in text.split(",") if part.strip())
    if not addresses:
        raise ValueError("expected host:port, or several with commas between")
    return addresses


def file(text: str) -> str:
    """Parse the path of a file, or empty text for none; resolve a relative one, as a shell does."""
    if not text.isprintable():
        raise ValueError("expected the path of a file")
    return _from_here(text) if text else text


def unspelled(text: str) -> str:
    """Return "the text" in place of a text that may be a secret."""
    return "the text"


def without_user(text: str) -> str:
    """Quote endpoints, or return "the text" if a password may be among them."""
    return "the text" if "@" in text else repr(text)


def _endpoint(text: str) -> str:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if "@" in parts.netloc:
        raise ValueError(
            "an endpoint holds no user and no password: give --etcd-user and --etcd-password-file"
        )
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{text!r}: use http:// or https://")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{text!r}: expected host:port and nothing else")
    try:
        number = parts.port
    except ValueError:
        number = None
    if not parts.hostname or not number:
        raise ValueError(f"{text!r}: expected host:port, for example etcd-0.etcd:2379")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if not re.fullmatch(r"\[[0-9a-f:.%]+\]|[a-z0-9]([a-z0-9._-]*[a-z0-9])?", host, re.ASCII):
        raise ValueError(f"{text!r}: {parts.hostname!r} is no host name")
    return f"{'https://' if parts.scheme == 'https' else ''}{host}:{number}"
