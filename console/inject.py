# SPDX-License-Identifier: Apache-2.0
"""``muster inject``: adds the sidecar to a manifest, or removes it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from console.help import Command
from console.styling import remark
from injection import injection
from injection.injection import Request
from injection.remarks import Remark
from injection.settings import TABLE
from rdzv.errors import ConfigError
from rdzv.sentences import counted

_BOM = "\ufeff"
_SWITCHES = ("wrap", "pod_failure_policy")
"""The settings that a flag without a value gives."""


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, setting in reversed(TABLE.items()):
        note = f"{setting.why}  {setting.brackets}"
        if name in _SWITCHES:
            flags = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
            option = click.option(flags, name, default=None, help=note)
        else:
            option = click.option(setting.flag, name, metavar=setting.metavar, help=note)
        command = option(command)
    return command


@click.command(
    cls=Command,
    epilog="""\b
Example:
  muster inject train.yaml --min 2 --max 8 --etcd-endpoints etcd:2379 \\
      --image example.org/muster-sidecar:0.1.0 | kubectl apply -f -
""",
)
@click.argument("file", default="-", metavar="[FILE|-]")
@_settings
@click.option(
    "--object",
    "objects",
    multiple=True,
    metavar="KIND/NAME",
    help="Object to inject, if there are several; * and ? are wildcards; may be given again.",
)
@click.option(
    "--template-path",
    metavar="PATH",
    help="Where an object of an unknown kind has its pod template, as in spec.template; * is every"
    " entry or item, and an item of a list goes by its name.",
)
@click.option("--diff", is_flag=True, help="Print what would change, and nothing else.")
@click.option("--remove", is_flag=True, help="Take the sidecar out again.")
@click.option(
    "--allow-bypass",
    is_flag=True,
    help="Inject even what is refused, as a launcher that bypasses Muster.",
)
def inject(
    file: str,
    objects: tuple[str, ...],
    template_path: str | None,
    diff: bool,
    remove: bool,
    allow_bypass: bool,
    **flags: Any,
) -> int:
    """Read objects with a pod template (YAML or JSON), and print them with the sidecar added.

    Comments, order and layout stay as they are. Flags are stored on the object as annotations, so
    injecting again is safe, and one flag changes one setting. Skipped objects are reported on
    stderr.
    """
    flags |= {name: str(flags[name]).lower() for name in _SWITCHES if flags[name] is not None}
    name, text = _read(file)
    bare = text.removeprefix(_BOM)
    try:
        if remove:
            outcome = injection.take_out(bare, objects, template_path)
            if outcome.text == bare and not outcome.notes:
                click.echo(f"muster: note: {name}: there is no sidecar in it", err=True)
        else:
            request = Request(flags, os.environ, objects, template_path, allow_bypass)
            outcome = injection.inject(bare, request)
        for one in outcome.notes:
            remark(one.level, str(one))
        if not remove:
            summary = _totals(outcome.chosen, outcome.notes, outcome.left)
            click.echo(f"muster: {summary}", err=True)
    except ConfigError as error:
        raise ConfigError(f"{name}: " + str(error).replace("\n", f"\n{name}: ")) from error
    made = text[: len(text) - len(bare)] + outcome.text
    shown = _difference(name, text, made) if diff else made
    # Write bytes, so that the output does not depend on the terminal's encoding.
    sys.stdout.buffer.write(shown.encode())
    return 0


def _read(file: str) -> tuple[str, str]:
    name = "stdin" if file == "-" else file
    if file == "-" and sys.stdin.isatty():
        click.echo("muster: reading a manifest from the terminal; Ctrl-D ends it", err=True)
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return name, content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is no UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error


def _difference(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, name
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _totals(injected: int, remarks: Iterable[Remark], left: int) -> str:
    """Return one line with the number of objects injected, of warnings and of notes."""
    levels = [one.level for one in remarks]
    counts = [
        counted(levels.count(level), noun)
        for level, noun in (("warning", "warning"), ("note", "note"))
        if level in levels
    ]
    done = f"{counted(injected, 'object')} injected" + (f", {left} left as is" if left else "")
    return "; ".join([done, ", ".join(counts)] if counts else [done])
