# SPDX-License-Identifier: Apache-2.0
"""click options: one for each setting of a configuration, and those that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from agent.config.table import Configuration, Setting, load, settings_of

C = TypeVar("C", bound=Configuration)
Command = Callable[..., Any]


def configured_by(kind: type[C]) -> Callable[[Command], Command]:
    """Decorate a command: one option for each setting, read into its argument ``config``."""

    def decorate(command: Command) -> Command:
        settings = settings_of(kind)

        @functools.wraps(command)
        def read(**arguments: Any) -> Any:
            flags = {name: arguments.pop(name) for name in settings}
            return command(config=load(kind, flags, os.environ), **arguments)

        for name, setting in reversed(settings.items()):
            option = click.option(setting.flag, name, metavar=setting.metavar, help=_help(setting))
            read = option(read)
        return read

    return decorate


def shown_with(command: Command) -> Command:
    """Decorate a command that shows state: ``--json`` and ``--watch``."""
    command = click.option("--watch", is_flag=True, help="Follow it until Ctrl-C.")(command)
    return click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")(command)


def _help(setting: Setting) -> str:
    if setting.default is None:
        note = " [required]"
    elif isinstance(setting.default, str) and setting.default:
        note = f" [default: {setting.default}]"
    else:
        note = ""
    return f"{setting.why}{note} [{setting.variable}]"
