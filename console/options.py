# SPDX-License-Identifier: Apache-2.0
"""click options: one for each setting of a configuration, and those that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click

from agent.config.parsers import duration_s
from agent.config.sidecar import STORE_SETTINGS, AccessConfig, JobConfig
from agent.config.table import Configuration, load, settings_of
from console.help import STORE_SECTION, SectionedOption
from console.running import found, running
from rdzv.errors import ConfigError
from rdzv.flags import named

_SHORT = {"--namespace": "-n"}
"""Short forms of settings."""

C = TypeVar("C", bound=Configuration)
Command = Callable[..., Any]


def configured_by(kind: type[C]) -> Callable[[Command], Command]:
    """Decorate a command with one option per setting, loaded into its argument ``config``."""

    def decorate(command: Command) -> Command:
        settings = settings_of(kind)

        @functools.wraps(command)
        def read(**arguments: Any) -> Any:
            flags = {name: arguments.pop(name) for name in settings}
            if kind in (JobConfig, AccessConfig):
                flags = _with_running_job(flags, arguments.get("namespace"))
            if kind is JobConfig and not (flags["job"] or os.environ.get("MUSTER_JOB")):
                raise ConfigError(
                    f"no job is named: give its name, or set {named('--job')}; muster list shows"
                    " the jobs of the store"
                )
            config = load(kind, flags, os.environ)
            if kind is JobConfig and isinstance(config, JobConfig):
                store = flags["etcd_endpoints"] or os.environ.get("MUSTER_ETCD_ENDPOINTS")
                if not store:
                    _say_what_runs_instead(config)
            return command(config=config, **arguments)

        for name, setting in reversed(settings.items()):
            section = STORE_SECTION if name in STORE_SETTINGS else "Options"
            if kind is JobConfig and name == "job":
                setting = replace(setting, otherwise="JOB, or the one of muster local here")
            short = [_SHORT[setting.flag]] if setting.flag in _SHORT else []
            option = click.option(
                *(*short, setting.flag, name),
                cls=SectionedOption,
                section=section,
                metavar=setting.metavar,
                help=f"{setting.why}  {setting.brackets}",
            )
            read = option(read)
        return read

    return decorate


def _with_running_job(
    flags: Mapping[str, str | None], namespace: str | None
) -> dict[str, str | None]:
    """Return ``flags`` about a running ``muster local`` if they name no store and it fits; say so.

    Only names in ``flags`` are filled in. ``namespace``: of a command whose settings have none.
    """
    job = found({"namespace": namespace, **flags}, os.environ)
    if job is None:
        return dict(flags)
    click.echo(f"muster: {job}", err=True)
    known = {"etcd_endpoints": job.endpoints, "namespace": job.namespace, "job": job.job}
    return {name: known.get(name, value) for name, value in flags.items()}


def _say_what_runs_instead(config: JobConfig) -> None:
    """Name the jobs of ``muster local`` here if ``config``, in the default store, is of another."""
    if jobs := ", ".join(one.job for one in running()):
        click.echo(
            f"muster: muster local runs job {jobs} here; {config.job} is looked for at"
            f" {','.join(config.etcd_endpoints)}, as no --etcd-endpoints is given",
            err=True,
        )


def job_named(command: Command) -> Command:
    """Decorate a command about one job: accept the job as an argument as well as by ``--job``."""

    @functools.wraps(command)
    def read(named: str | None, **arguments: Any) -> Any:
        return command(**{**arguments, "job": one_job(named, arguments["job"])})

    return click.argument("named", metavar="[JOB]", required=False)(read)


def one_job(named: str | None, option: str | None) -> str | None:
    """Return the job named by the argument or ``--job``; raises ``ConfigError`` if they differ."""
    if named is not None and option not in (None, named):
        raise ConfigError(f"two jobs are named, {named} and, by --job, {option}: name one")
    return option if named is None else named


def shown_with(command: Command, *, forms: Sequence[str] = ("json",)) -> Command:
    """Decorate a command that shows state with ``--json``, ``--watch`` and ``--interval``.

    The command gets ``interval_s``: the minimum time from one output to the next, in seconds.
    """

    @functools.wraps(command)
    def read(interval: str | None, **arguments: Any) -> Any:
        if interval is not None and not arguments["watch"]:
            raise ConfigError("--interval is for --watch: give both, or neither")
        return command(interval_s=_interval_s(interval), **arguments)

    read = click.option(
        "--interval",
        metavar="TIME",
        show_default="at each change",
        help="With --watch: show it at most this often.",
    )(read)
    read = click.option("-w", "--watch", is_flag=True, help="Follow it until Ctrl-C.")(read)
    return printed(read, forms=forms)


def printed(
    command: Command, *, forms: Sequence[str] = ("json",), says: str = "One JSON object a line."
) -> Command:
    """Decorate a command with ``--json``, and ``-o`` for each of ``forms``, as of kubectl.

    The command gets ``as_json`` and, if that is one of the forms, ``wide``.
    """

    @functools.wraps(command)
    def read(form: str | None, **arguments: Any) -> Any:
        named_forms = {"json": "as_json", "wide": "wide"}
        if form is not None:
            arguments[named_forms[form]] = True
        return command(**arguments)

    choice = click.Choice(list(forms))
    shown = " or ".join(f"--{form}" for form in forms)
    read = click.option("-o", "form", type=choice, help=f"The same as {shown}.")(read)
    return click.option("--json", "as_json", is_flag=True, help=says)(read)


def _interval_s(text: str | None) -> float:
    try:
        return 0.0 if text is None else duration_s(0.1, 3600)(text)
    except ValueError as error:
        raise ConfigError(f"--interval: {text!r} is wrong: {error}") from error
