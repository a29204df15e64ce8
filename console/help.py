# SPDX-License-Identifier: Apache-2.0
"""The layout of ``--help``: commands by task, settings of the store last, then exit statuses."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast

import click

from launcher_shim.exit_status import (
    EXIT_DEFECT,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NO_JOB,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
)

STATUSES = {
    EXIT_DONE: "done",
    EXIT_USAGE: "an option, a setting or a file is wrong",
    EXIT_DEFECT: "a defect of Muster",
    EXIT_INTERRUPTED: "ended by Ctrl-C",
}
"""Exit statuses of every command."""

STORE_STATUSES = {
    EXIT_NO_JOB: "the store has no such job",
    EXIT_UNAVAILABLE: "the store cannot be reached",
}
"""Further exit statuses of a command that has settings of the store."""


STORE_SECTION = "Store"
"""The heading of the settings that name the store and give access to it."""


class SectionedOption(click.Option):
    """An option that the help lists under a heading of its own, after the options without one."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help ends with its settings of the store and its exit statuses.

    ``tables``: further tables of its help, by title; each maps a word to its explanation.
    """

    def __init__(
        self,
        *args: Any,
        statuses: Mapping[int, str] | None = None,
        tables: Mapping[str, Mapping[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.tables = tables or {}
        sections = {getattr(parameter, "section", "") for parameter in self.params}
        of_stores = STORE_STATUSES if STORE_SECTION in sections else {}
        self.statuses = {**STATUSES, **of_stores, **(statuses or {})}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                section = getattr(parameter, "section", "Options")
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the tables and the exit statuses before the examples."""
        for title, rows in self.tables.items():
            with formatter.section(title):
                formatter.write_dl(list(rows.items()))
        with formatter.section("Exit status"):
            formatter.write_dl(
                [(str(status), self.statuses[status]) for status in sorted(self.statuses)]
            )
        super().format_epilog(ctx, formatter)


class CommandsByTask(click.Group):
    """A group that imports a command only when it is asked for, and lists them by task.

    ``tasks``: task → name of a command → ``module:attribute``; ``aliases``: another name → the name
    of a command.
    """

    def __init__(
        self,
        *args: Any,
        tasks: Mapping[str, Mapping[str, str]],
        aliases: Mapping[str, str],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.tasks = tasks
        self.aliases = aliases

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of their tasks."""
        return [name for commands in self.tasks.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; None if there is no such command."""
        cmd_name = self.aliases.get(cmd_name, cmd_name)
        for commands in self.tasks.values():
            if cmd_name in commands:
                module, _, name = commands[cmd_name].partition(":")
                return cast(click.Command, getattr(import_module(module), name))
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; raises ``UsageError`` with the nearest name if it does not exist."""
        names = [*self.list_commands(ctx), *self.aliases]
        if args and not args[0].startswith("-") and args[0] not in names:
            near = get_close_matches(args[0], names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "muster --help lists them"
            raise click.UsageError(f"there is no command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each task."""
        width = max(map(len, self.list_commands(ctx)))
        for task, commands in self.tasks.items():
            rows = []
            for name in commands:
                command = self.get_command(ctx, name)
                assert command is not None
                limit = formatter.width - 6 - width
                rows.append((name.ljust(width), command.get_short_help_str(limit)))
            with formatter.section(task):
                formatter.write_dl(rows)
