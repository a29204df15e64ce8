# SPDX-License-Identifier: Apache-2.0
"""The user's own defaults for commands: the file ``~/.config/muster/config.yaml``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.config import parsers
from agent.config.job import AccessConfig
from agent.config.table import settings_of
from rdzv.errors import ConfigError

NAMES = ("namespace", "context", "kubeconfig")
"""Keys besides the settings of the store, which have the names of their flags."""


def place_of(environ: Mapping[str, str]) -> Path:
    """Return the path of the file, which need not exist."""
    given = environ.get("XDG_CONFIG_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".config"
    return base / "muster" / "config.yaml"


def defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the file: the defaults of flags, by the names of the settings; empty without a file.

    Raises ``ConfigError``, in one sentence, if its content is wrong.
    """
    path = place_of(environ)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return {
        name: os.path.expanduser(value) if name == "kubeconfig" else value
        for name, value in _entries(path, text)
    }


def _entries(path: Path, text: str) -> list[tuple[str, str]]:
    # It costs a command a tenth of its start: most users have no such file.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        read = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f", line {line + 1}"
        raise ConfigError(f"{path}{where}: it is no YAML") from error
    if read is None:
        return []
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: expected lines of NAME: VALUE, as in namespace: team-a")
    return [_entry(path, str(key), value) for key, value in read.items()]


def _entry(path: Path, key: str, value: Any) -> tuple[str, str]:
    store = {one.flag.removeprefix("--"): name for name, one in settings_of(AccessConfig).items()}
    if key not in (*NAMES, *store):
        from console.help import near

        meant = near(key, (*NAMES, *store))
        hint = f"did you mean {meant}?" if meant else f"it may have {', '.join((*NAMES, *store))}"
        raise ConfigError(f"{path}: there is no setting {key!r}: {hint}")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ConfigError(f"{path}: {key}: expected a text")
    parse: Callable[[str], Any] = parsers.free_text
    if key in store:
        parse = settings_of(AccessConfig)[store[key]].parse
    elif key == "namespace":
        parse = parsers.name
    try:
        parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{path}: {key}: {str(value)!r} is wrong: {error}") from error
    return store.get(key, key), str(value)
