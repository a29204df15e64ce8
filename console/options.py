# SPDX-License-Identifier: Apache-2.0
"""click options made from a configuration's table."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from agent.settings import Configuration, load, settings_of

C = TypeVar("C", bound=Configuration)
Command = Callable[..., Any]


def configured_by(kind: type[C]) -> Callable[[Command], Command]:
    """Decorate a command: one option for each setting, read into its argument ``config``."""

    def decorate(command: Command) -> Command:
        names = settings_of(kind)

        def read(**arguments: Any) -> Any:
            flags = {name: arguments.pop(name) for name in names}
            return command(config=load(kind, flags, os.environ), **arguments)

        read.__doc__ = command.__doc__
        read.__name__ = command.__name__
        read.__click_params__ = list(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
        for name, setting in reversed(names.items()):
            default = f" [default: {setting.default}]" if isinstance(setting.default, str) else ""
            if setting.default in (None, ""):
                default = " [required]" if setting.default is None else ""
            help_text = f"{setting.why}{default} [{setting.variable}]"
            read = click.option(setting.flag, name, metavar=setting.metavar, help=help_text)(read)
        return read

    return decorate
