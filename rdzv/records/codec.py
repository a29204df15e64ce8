# SPDX-License-Identifier: Apache-2.0
"""The encoding of a record in the store: JSON with the version of its schema.

A reader ignores fields that it does not know; a record of another schema, or one that is no JSON at
all, raises ``RecordError`` and is left out of the snapshot with its reason, so that one corrupt key
cannot stop a job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.store import KeyValue

SCHEMA = 1

MAX_S = 1e9
"""Upper bound on a duration in a record: some 30 years."""

LAST_UNIX_S = 253_402_300_799
"""The end of the year 9999: the last second that a calendar date can show."""

CURSOR_MAX_BYTES = 1024
"""The longest data cursor, in JSON: that of ``muster.cursor``."""

TAG = re.compile(r"[a-z0-9-]{0,40}")
"""The form of a save tag; empty for none."""

KEPT = "kept"
SAMPLES = re.compile(rf"|{KEPT}|not kept: [ -~]{{1,80}}")
"""The form of what a save says of the samples; empty for nothing."""

T = TypeVar("T")


def dump_record(fields: Mapping[str, object]) -> bytes:
    """Encode a record: compact JSON with the schema version."""
    return json.dumps({"schema": SCHEMA, **fields}, separators=(",", ":")).encode()


def load_record(key: str, value: bytes) -> dict[str, Any]:
    """Decode a record; raise ``RecordError`` if it is none of Muster's."""
    try:
        # Decoded here, so that json need not detect the encoding.
        text = value.decode()
        fields = json.loads(text)
        if "\\u" in text:
            # An escape can be half of a surrogate pair, of which no key and no file can be made.
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{key}: not JSON ({error})") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise RecordError(f"{key}: not a record of schema {SCHEMA}")
    return fields


def by_last_name(
    kvs: Iterable[KeyValue], prefix: str, decode: Callable[[KeyValue], T]
) -> dict[str, T]:
    """Decode the records below ``prefix``, by the last name of their keys; skip malformed ones."""
    found: dict[str, T] = {}
    for kv in kvs:
        if kv.key.startswith(prefix):
            with suppress(RecordError):
                found[last_name(kv.key)] = decode(kv)
    return found


def take(
    key: str, fields: Mapping[str, Any], name: str, kind: type[T], missing: T | None = None
) -> T:
    """Take one field, or ``missing`` if an older writer has not written it.

    Raises ``RecordError`` if it is of another type, or absent without a ``missing``.
    """
    value = fields.get(name, missing)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecordError(f"{key}: {name!r} is {value!r}, expected {kind.__name__}")
    return value


def take_name(key: str, fields: Mapping[str, Any], name: str) -> str:
    """Take the name of a member or the UID of a pod; raise ``RecordError`` for an empty one."""
    text = take(key, fields, name, str)
    if not text:
        raise RecordError(f"{key}: {name!r} is empty")
    return text


def take_own_name(key: str, fields: Mapping[str, Any], name: str) -> str:
    """Take the name that is also in the record's key; raise ``RecordError`` for another."""
    text = take_name(key, fields, name)
    if text != last_name(key):
        raise RecordError(f"{key}: {name!r} is {text!r}, which is not the name in its key")
    return text


def take_cursor(key: str, fields: Mapping[str, Any], name: str = "cursor") -> str:
    """Take one data cursor, empty if it is missing; raise ``RecordError`` for one too long."""
    text = take(key, fields, name, str, "")
    if len(text) > CURSOR_MAX_BYTES:
        raise RecordError(f"{key}: {name!r} is longer than {CURSOR_MAX_BYTES} bytes")
    return text


def take_tag(key: str, fields: Mapping[str, Any]) -> str:
    """Take the save tag, empty if it is missing; raise ``RecordError`` for another text."""
    text = take(key, fields, "tag", str, "")
    if TAG.fullmatch(text) is None:
        raise RecordError(f"{key}: 'tag' is {text[:80]!r}, which is no save tag")
    return text


def take_samples(key: str, fields: Mapping[str, Any]) -> str:
    """Take what a save says of the samples, empty if it is missing; raise ``RecordError``."""
    text = take(key, fields, "samples", str, "")
    if SAMPLES.fullmatch(text) is None:
        raise RecordError(f"{key}: 'samples' is {text[:100]!r}, which is no verdict on samples")
    return text


def take_seconds(key: str, fields: Mapping[str, Any], name: str) -> float:
    """Take one duration; raise ``RecordError`` if it is missing, negative or not finite."""
    value = fields.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_S:
        return float(value)
    raise RecordError(f"{key}: {name!r} is {value!r}, expected a number of seconds")


def take_unix_s(key: str, fields: Mapping[str, Any], name: str) -> float:
    """Take one wall-clock time, 0.0 if it is missing; raise ``RecordError`` if it is no time."""
    value = fields.get(name, 0.0)
    if isinstance(value, int | float) and 0 <= value <= LAST_UNIX_S:
        return float(value)
    raise RecordError(f"{key}: {name!r} is {value!r}, which is no time")
