# SPDX-License-Identifier: Apache-2.0
"""The encoding of a record in the store: JSON with the version of its schema.

A reader ignores fields that it does not know; a record of another schema, or one that is no JSON at
all, raises ``RecordError`` and is left out of the snapshot with its reason, so that one corrupt key
cannot stop a job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, field, is_dataclass
from dataclasses import fields as fields_of
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rdzv.errors import RecordError
from rdzv.keys import last_name
from rdzv.store import KeyValue

SCHEMA = 1

MAX_S = 1e9
"""Upper bound on a duration in a record: some 30 years."""

INT64_MAX = 2**63 - 1

LAST_UNIX_S = 253_402_300_799
"""The end of the year 9999: the last second that a calendar date can show."""

CURSOR_MAX_BYTES = 1024
"""The longest data cursor, in JSON: that of ``muster.saved_steps``."""

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


Taking = Callable[[str, Mapping[str, Any], str], Any]
"""Takes one field: the record's key, its fields, and the name of the field."""


def taking(
    kind: type[Any],
    fits: Callable[[Any], bool],
    expected: str,
    made: Callable[[Any], Any] = lambda value: value,
) -> Taking:
    """Return what takes a field of ``kind`` that ``fits``, and returns what is ``made`` of it.

    It raises ``RecordError`` with what was ``expected``, also if it cannot be made.
    """

    def taken(key: str, fields: Mapping[str, Any], name: str) -> Any:
        value = fields.get(name)
        if type(value) is not kind:
            value = take(key, fields, name, kind)
        try:
            if fits(value):
                return made(value)
        except (ValueError, TypeError) as error:
            raise RecordError(f"{key}: {name!r} is {value!r}: {error}") from error
        raise RecordError(f"{key}: {name!r} is {str(value)[:100]!r}, expected {expected}")

    return taken


take_name = taking(str, bool, "a name")
"""Takes the name of a member, or the UID of a pod."""

take_ordinal = taking(int, lambda number: number >= 1, "a number from 1 on")

take_cursor = taking(
    str, lambda text: len(text) <= CURSOR_MAX_BYTES, f"no more than {CURSOR_MAX_BYTES} bytes"
)
"""Takes one data cursor."""

take_tag = taking(str, lambda text: TAG.fullmatch(text) is not None, "a save tag")

take_samples = taking(str, lambda text: SAMPLES.fullmatch(text) is not None, "a verdict on samples")
"""Takes what a save says of the samples."""


def take_own_name(key: str, fields: Mapping[str, Any], name: str) -> str:
    """Take the name that is also in the record's key; raise ``RecordError`` for another."""
    text: str = take_name(key, fields, name)
    if text != last_name(key):
        raise RecordError(f"{key}: {name!r} is {text!r}, which is not the name in its key")
    return text


def take_count(key: str, fields: Mapping[str, Any], name: str) -> int:
    """Take a number that a client of torch's store can hold, from 0 on."""
    value = fields.get(name)
    if type(value) is int and 0 <= value <= INT64_MAX:
        return value
    raise RecordError(f"{key}: {name!r} is {value!r}, expected a number from 0 on")


def take_seconds(key: str, fields: Mapping[str, Any], name: str) -> float:
    """Take one duration; raise ``RecordError`` if it is missing, negative or not finite."""
    value = fields.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_S:
        return float(value)
    raise RecordError(f"{key}: {name!r} is {value!r}, expected a number of seconds")


def take_unix_s(key: str, fields: Mapping[str, Any], name: str) -> float:
    """Take one wall-clock time; raise ``RecordError`` if it is no time."""
    value = fields.get(name)
    if isinstance(value, int | float) and 0 <= value <= LAST_UNIX_S:
        return float(value)
    raise RecordError(f"{key}: {name!r} is {value!r}, which is no time")


# --- the codec of a record, derived from its class ---

Count = Annotated[int, take_count]
Ordinal = Annotated[int, take_ordinal]
Seconds = Annotated[float, take_seconds]
UnixTime = Annotated[float, take_unix_s]
Name = Annotated[str, take_name]
OwnName = Annotated[str, take_own_name]
Cursor = Annotated[str, take_cursor]
Tag = Annotated[str, take_tag]
Samples = Annotated[str, take_samples]
"""Types of fields that say how they are taken."""

OF_KEY = {
    "mod_revision": "mod_revision",
    "created_revision": "create_revision",
    "lease": "lease",
}
"""The fields that are not in the record, as the store knows them of its key."""


def encode(
    record: Any, *, without: Collection[str] = (), sparse: Collection[str] = (), **instead: object
) -> bytes:
    """Encode the fields of a record, but for ``without``, and ``sparse`` ones at their default.

    Older versions do not know a sparse field. ``instead``: what to write for a field, or beside it.
    """
    return dump_record(fields_of_record(record, without=without, sparse=sparse) | instead)


def fields_of_record(
    record: Any, *, without: Collection[str] = (), sparse: Collection[str] = ()
) -> dict[str, object]:
    """Return the fields that ``encode`` writes, in order; those ``OF_KEY`` are never among them."""
    values: dict[str, object] = {}
    for name, stored, default in _defaults(type(record)):  # type: ignore[arg-type]
        if name not in without:
            value = getattr(record, name)
            if value != default or name not in sparse:
                values[stored] = value
    return values


@cache
def _defaults(cls: type) -> Sequence[tuple[str, str, object]]:
    own = (one for one in fields_of(cls) if one.init and one.name not in OF_KEY)
    return [(one.name, _stored(one), one.default) for one in own]


def decode_record(cls: type[T], kv: KeyValue, required: Collection[str] = (), /, **known: Any) -> T:
    """Decode the record at one key, as ``decode``; what is ``OF_KEY`` is taken from that."""
    of_key = {name: getattr(kv, attribute) for name, attribute in _of_key(cls)}  # type: ignore[arg-type]
    return decode(cls, kv.key, load_record(kv.key, kv.value), required, **of_key, **known)


@cache
def _of_key(cls: type) -> Sequence[tuple[str, str]]:
    names = {one.name for one in fields_of(cls)}
    return [(name, attribute) for name, attribute in OF_KEY.items() if name in names]


def decode(
    cls: type[T],
    key: str,
    fields: Mapping[str, Any],
    required: Collection[str] = (),
    /,
    **known: Any,
) -> T:
    """Build a record of ``cls``: each field is taken as its annotation says, or is ``known``.

    One that has a default may be missing, unless it is ``required``: an older writer does not know
    it. Raises ``RecordError``, which names ``key``.
    """
    values: dict[str, Any] = {}
    for name, stored, taken, is_optional in _takings(cls):  # type: ignore[arg-type]
        if name not in known and (stored in fields or name in required or not is_optional):
            values[name] = taken(key, fields, stored)
    return cls(**values, **known)


@cache
def _takings(cls: type) -> Sequence[tuple[str, str, Taking, bool]]:
    """Return each field of ``cls``, its name in the record, how it is taken, if it may miss."""
    kinds = get_type_hints(cls, include_extras=True)
    found: list[tuple[str, str, Taking, bool]] = []
    for one in fields_of(cls):
        if one.init and one.name not in OF_KEY:
            is_optional = one.default is not MISSING
            found.append((one.name, _stored(one), _taking(kinds[one.name]), is_optional))
    return found


def stored_as(name: str) -> Any:
    """Make a field that has another ``name`` in the record."""
    return field(metadata={"stored": name})


def _stored(one: Field[Any]) -> str:
    return str(one.metadata.get("stored", one.name))


def _taking(kind: Any) -> Taking:
    origin, (first, *others) = get_origin(kind), get_args(kind) or (None,)
    if origin is Annotated:
        return others[0]  # type: ignore[no-any-return]
    if origin is Literal:
        return partial(_take_choice, choices=get_args(kind))
    if origin is tuple:
        return partial(_take_all, kind=first)
    if origin in (Union, UnionType):
        return partial(_take_if_any, taken=_taking(first))
    return partial(take_part if is_dataclass(kind) else take, kind=origin or kind)


def _take_choice(
    key: str, fields: Mapping[str, Any], name: str, *, choices: Collection[Any]
) -> Any:
    value = fields.get(name)
    if value not in choices:
        raise RecordError(f"{key}: {name!r} is {value!r}, expected one of {choices}")
    return value


def _take_all(key: str, fields: Mapping[str, Any], name: str, *, kind: type) -> tuple[Any, ...]:
    values = take(key, fields, name, list)
    if not all(type(value) is kind for value in values):
        raise RecordError(f"{key}: {name!r} is {values!r}, expected a list of {kind.__name__}")
    return tuple(values)


def _take_if_any(key: str, fields: Mapping[str, Any], name: str, *, taken: Taking) -> Any:
    return None if fields.get(name) is None else taken(key, fields, name)


def take_part(key: str, fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Take a record within a record."""
    return decode(kind, key, take(key, fields, name, dict))
