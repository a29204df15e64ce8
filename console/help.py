# SPDX-License-Identifier: Apache-2.0
"""The layout of ``--help``: examples first, commands by task, exit statuses last.

With what to install where a command needs the packages of the extra ``controller``.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, cast

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
    EXIT_DEFECT: "a bug in Muster",
    EXIT_INTERRUPTED: "ended by Ctrl-C",
}
"""Exit statuses of every command."""

STORE_STATUSES = {
    EXIT_NO_JOB: "the store has no such job",
    EXIT_UNAVAILABLE: "the store cannot be reached",
}
"""Further exit statuses of a command that has settings of the store."""

CLUSTER_STATUSES = {
    EXIT_NO_JOB: "the namespace has no such job",
    EXIT_UNAVAILABLE: "the API server refuses, or cannot be reached",
}
"""Further exit statuses of a command that reaches a cluster and has no settings of the store."""

STORE_SECTION = "Store"
"""The heading of the settings that name the store and give access to it."""

CLUSTER_SECTION = "Cluster"
"""The heading of the settings by which a cluster is reached."""

STORE_TOPIC = "store-options"
"""The name of the help on them: ``muster help store-options``."""

_SHOWN = "--etcd-endpoints"
"""The one of them that the help of each command has."""

_EXAMPLES = re.compile(r"(?:\x08\n)?Examples?[:,].*?(?:\n\s*\n|\Z)", re.DOTALL)

PACKAGES = frozenset({"aiohttp", "kubernetes", "yaml"})
"""The names by which they are imported."""


class Entry(NamedTuple):
    """One command in the list of all: ``module:attribute``, and what it does in a line."""

    place: str
    says: str


def near(word: str, words: Iterable[str]) -> str:
    """Return the word of ``words`` that was meant, if one is close; else an empty text."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(words), n=1)), "")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Import without garbage collection, which costs a tenth of the time and finds nothing.

    Nor does it look at the modules later: they stay until the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _write_examples(epilog: str | None, formatter: click.HelpFormatter) -> None:
    """Write the examples of an epilog."""
    if found := _EXAMPLES.search(epilog or ""):
        formatter.write_paragraph()
        formatter.write_text(found[0].rstrip())


def _write_rest(epilog: str | None, formatter: click.HelpFormatter) -> None:
    """Write an epilog without its examples."""
    if rest := _EXAMPLES.sub("", epilog or "").strip():
        formatter.write_paragraph()
        formatter.write_text(rest)


class SectionedOption(click.Option):
    """An option that the help lists under a heading of its own, after the options without one."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class _ExamplesFirst(click.Command):
    """A command whose help begins with examples."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help, the examples before options and commands."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        _write_examples(self.epilog, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)


class Command(_ExamplesFirst):
    """A command whose help begins with examples, and ends with its exit statuses.

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
        of_clusters = CLUSTER_STATUSES if CLUSTER_SECTION in sections else {}
        self.statuses = {**STATUSES, **of_clusters, **of_stores, **(statuses or {})}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section; of those of the store one, and where the others are."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                section = getattr(parameter, "section", "Options")
                sections.setdefault(section, []).append(record)
        if (of_store := sections.get(STORE_SECTION)) is not None and ctx.info_name != STORE_TOPIC:
            others = ("--etcd-…", f"TLS, user, password: muster help {STORE_TOPIC}")
            of_store[:] = [row for row in of_store if row[0].startswith(_SHOWN)] + [others]
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the tables, the epilog without its examples, and the exit statuses."""
        for title, rows in self.tables.items():
            with formatter.section(title):
                formatter.write_dl(list(rows.items()))
        _write_rest(self.epilog, formatter)
        with formatter.section("Exit status"):
            formatter.write_dl(
                [(str(status), self.statuses[status]) for status in sorted(self.statuses)]
            )


class CommandsByTask(_ExamplesFirst, click.Group):
    """A group that imports a command only when it is asked for, and lists them by task.

    ``tasks``: task → name of a command → its entry; ``aliases``: another name → the name of a
    command.
    """

    def __init__(
        self,
        *args: Any,
        tasks: Mapping[str, Mapping[str, Entry]],
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
                module, _, name = commands[cmd_name].place.partition(":")
                with _no_collection():
                    return cast(click.Command, getattr(import_module(module), name))
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; raises ``UsageError`` with the nearest name if it does not exist."""
        names = [*self.list_commands(ctx), *self.aliases]
        if args and not args[0].startswith("-") and args[0] not in names:
            meant = near(args[0], names)
            hint = f"did you mean {meant!r}?" if meant else "muster --help lists them"
            raise click.UsageError(f"there is no command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each task."""
        width = max(map(len, self.list_commands(ctx)))
        for task, commands in self.tasks.items():
            with formatter.section(task):
                formatter.write_dl(
                    [(name.ljust(width), entry.says) for name, entry in commands.items()]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog without its examples."""
        _write_rest(self.epilog, formatter)


def missing_extra(error: ModuleNotFoundError) -> str:
    """Return what to install if the import of one of them has failed; empty for any other."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return ""
    return (
        f"the cluster cannot be asked without the package {package}: pip install"
        " 'muster-elastic[controller]'"
    )
