# SPDX-License-Identifier: Apache-2.0
"""Parsers of the settings of ``muster inject`` that nothing else has, and faults between them.

Every parser takes text and raises ``ValueError`` that says what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

from injection.facts import RESOURCES, Asked, quantity
from rdzv import settings as texts
from rdzv.sentences import named

TEXT_LENGTH = 4096
"""Maximum length of a setting's text: room for the endpoints of a large store. An annotation may
have 256 KiB, and every user who may create a pod may write one."""

SECRET_KEYS = ("ca.crt", "tls.crt", "tls.key", "username", "password")

_FIELD_PART = re.compile(r"\{metadata\.(labels|annotations)\['[A-Za-z0-9._/-]+'\]\}", re.ASCII)
"""A part of a topology that each pod reads from itself, in the syntax of the downward API."""

IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", re.ASCII)


def image(text: str) -> str:
    """Parse the name of an image."""
    if not IMAGE.fullmatch(text):
        raise ValueError("expected an image such as example.org/muster-sidecar:0.2.0")
    return text


def yes_or_no(text: str) -> bool:
    """Parse true or false."""
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


def secret_keys(text: str) -> tuple[str, ...]:
    """Parse keys of a Secret, separated by commas."""
    keys = tuple(key.strip() for key in text.split(","))
    if not set(keys) <= set(SECRET_KEYS):
        raise ValueError(f"expected some of {','.join(SECRET_KEYS)}")
    for one, other in (("tls.crt", "tls.key"), ("username", "password")):
        if (one in keys) != (other in keys):
            raise ValueError(f"{one} and {other} go together")
    return keys


def topology(text: str) -> tuple[str, ...]:
    """Parse a path of names, and of parts in braces that each pod reads from itself."""
    parts: list[str] = []
    for piece in text.split("/") if text else ():
        # A slash between braces belongs to a label's key.
        if parts and "{" in parts[-1] and "}" not in parts[-1]:
            parts[-1] += f"/{piece}"
        else:
            parts.append(piece)
    for part in parts:
        if not part.startswith("{"):
            texts.topology(part)
        elif not _FIELD_PART.fullmatch(part):
            raise ValueError(
                "a part in braces is {metadata.labels['KEY']} or {metadata.annotations['KEY']}"
            )
    return tuple(parts)


def names(text: str) -> tuple[str, ...]:
    """Parse names, separated by commas."""
    return tuple(texts.name(one.strip()) for one in text.split(","))


def user(text: str) -> int | Literal["none"]:
    """Parse the number of a user other than root, or ``none``."""
    return "none" if text == "none" else texts.count(1, 999_999_999)(text)


def resources(text: str) -> Asked:
    """Parse requests and limits of the sidecar, such as ``cpu=125m:500m,memory=128Mi``."""
    asked: dict[str, tuple[str, str | None]] = {}
    for part in text.split(","):
        name, _, amounts = part.strip().partition("=")
        request, colon, limit = amounts.partition(":")
        least, most = quantity(request), quantity(limit if colon else request)
        if name not in RESOURCES or name in asked:
            raise ValueError(f"expected each of {', '.join(RESOURCES)} once at most, not {name!r}")
        if least is None or most is None or not 0 < least <= most:
            raise ValueError(f"expected {name}=REQUEST or {name}=REQUEST:LIMIT, as in cpu=50m:500m")
        asked[name] = (request, limit or None)
    return asked


def store_faults(
    endpoints: Sequence[str], secret: str | None, keys: Sequence[str]
) -> Iterator[str]:
    """Yield one sentence for each fault between the store's endpoints and its Secret."""
    given = named("--etcd-endpoints")
    encrypted = {endpoint.startswith("https://") for endpoint in endpoints}
    if len(encrypted) > 1:
        yield f"{given}: some are https:// and some are not: write all alike"
    elif encrypted == {True} and (secret is None or "ca.crt" not in keys):
        yield (
            f"{given} are https://: name a Secret with --etcd-secret, and ca.crt among its"
            " --etcd-secret-keys"
        )
    elif encrypted == {False} and secret is not None and {"ca.crt", "tls.crt"} & {*keys}:
        yield (
            f"{given} are not https://, so the certificates of --etcd-secret would serve nothing:"
            " write https://host:port, or --etcd-secret-keys username,password"
        )
