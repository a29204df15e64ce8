# SPDX-License-Identifier: Apache-2.0
"""click options: one for each setting of a configuration, and those that several commands share.

The names of jobs and pods are completed by the shell: soon, or none, and never an error.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar, cast

import click

from agent.job_config import STORE_SETTINGS, AccessConfig, JobConfig, StoreConfig
from console.help import STORE_SECTION, SectionedOption, missing_extra
from console.whereabouts import (
    ClusterOptions,
    defaults_of_file,
    found_running,
    is_cluster_known,
    running_jobs,
    with_cluster_options,
)
from rdzv.errors import ConfigError, StoreUnavailable
from rdzv.sentences import named, variable_of
from rdzv.settings import Configuration, duration_s, load, settings_of

T = TypeVar("T")

PATIENCE_S = 2.0
"""Time until the shell gets the names that are known by then: a user waits for each of them."""

_SHORT = {"--namespace": "-n"}
"""Short forms of settings."""

IN_A_SIDECAR = "console.remote.passing:in_a_sidecar"
"""The function that runs a command about one job in a cluster."""

LISTENS_TIMEOUT_S = 1.0
"""Ends a look at a loopback address; even a process that is stopped is connected to at once."""


def job_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Return the jobs of ``muster local`` here and of the cluster's namespace that begin so."""
    local = [job.job for job in _or_nothing(running_jobs)]
    return _beginning(begun, [*local, *_in_time(lambda: _of_cluster(ctx, pods=False))])


def pod_names(ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Return the pods of the job, or of all jobs of the namespace, that begin so."""
    return _beginning(begun, _in_time(lambda: _of_cluster(ctx, pods=True)))


def _beginning(begun: str, names: list[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(begun)})


def _of_cluster(ctx: click.Context, *, pods: bool) -> list[str]:
    params = ctx.params
    if params.get("etcd_endpoints") or os.environ.get("MUSTER_ETCD_ENDPOINTS"):
        return []
    options = ClusterOptions(*(params.get(one) for one in ("kubeconfig", "context", "namespace")))
    options = options.completed(defaults_of_file(os.environ), os.environ)
    if not (options.kubeconfig or options.context or is_cluster_known(os.environ)):
        return []
    # Late, as it needs the client of the API server, and only here.
    names_in: Callable[..., list[str]] = import_module("console.remote.pods").names_in
    job = params.get("named") or params.get("job") or ""
    return names_in(options, job=str(job) if pods else "", pods=pods, timeout_s=PATIENCE_S)


def _or_nothing(look: Callable[[], list[T]]) -> list[T]:
    try:
        return look()
    except Exception:
        # A shell would print it amid what its user types; the command itself says what is wrong.
        return []


def _in_time(look: Callable[[], list[str]]) -> list[str]:
    """Return what ``look`` finds within ``PATIENCE_S``; it is left behind if it takes longer."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(_or_nothing(look)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return list(found)


C = TypeVar("C", bound=Configuration)
Command = Callable[..., Any]


def configured_by(
    kind: type[C], *, elsewhere: str = "", all_jobs_by: str = ""
) -> Callable[[Command], Command]:
    """Decorate a command with one option per setting, loaded into its argument ``config``.

    ``elsewhere``: the function, as ``module:name``, that runs the command about jobs in a cluster;
    of a command about one job it is ``IN_A_SIDECAR``. ``all_jobs_by``: the parameter with which a
    command that names no job is about all of the namespace; ``config`` is a ``StoreConfig`` then.
    """
    elsewhere = elsewhere or (IN_A_SIDECAR if kind is JobConfig else "")

    def decorate(command: Command) -> Command:
        settings = settings_of(kind)

        def read_settings(**arguments: Any) -> Any:
            flags = {name: arguments.pop(name) for name in settings}
            namespace = flags.get("namespace") or arguments.get("namespace")
            options = ClusterOptions(namespace=namespace)
            if elsewhere:
                options = ClusterOptions(
                    arguments.pop("kubeconfig"), arguments.pop("context"), namespace
                )
            if kind in (JobConfig, AccessConfig):
                named_job = arguments.get("named") or flags.get("job")
                flags, in_cluster = _located(flags, options, elsewhere, named_job)
                if in_cluster is not None:
                    return in_cluster(flags.get("job"))
                if not (flags["etcd_endpoints"] or os.environ.get("MUSTER_ETCD_ENDPOINTS")):
                    _check_usual_store(named_job, settings["etcd_endpoints"].default_text({}) or "")
            if kind is JobConfig and not (flags["job"] or os.environ.get("MUSTER_JOB")):
                if arguments.get(all_jobs_by):
                    return command(config=load(StoreConfig, flags, os.environ), **arguments)
                raise ConfigError(
                    f"no job is named: give its name, or set {named('--job')}; muster list shows"
                    " the jobs of the store"
                )
            config = load(kind, flags, os.environ)
            return command(config=config, **arguments)

        read: Command = functools.wraps(command)(read_settings)
        if elsewhere:
            read = with_cluster_options(read)
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
                shell_complete=job_names if setting.flag == "--job" else None,
                help=f"{setting.why}  {setting.brackets}",
            )
            read = option(read)
        return read

    return decorate


def _located(
    flags: Mapping[str, str | None], options: ClusterOptions, elsewhere: str, job: str | None
) -> tuple[dict[str, str | None], Callable[[str | None], Any] | None]:
    """Return ``flags`` completed with the store to use, or what runs the command in a cluster."""
    asks_cluster = options.kubeconfig is not None or options.context is not None
    if asks_cluster and flags["etcd_endpoints"]:
        raise ConfigError(
            "--etcd-endpoints is for a store, --kubeconfig and --context are for a cluster: give"
            " one"
        )
    if not asks_cluster:
        if flags["etcd_endpoints"] or os.environ.get("MUSTER_ETCD_ENDPOINTS"):
            return dict(flags), None
        with_local = _with_running_job(flags, options.namespace, job)
        if with_local != flags:
            return with_local, None
    chosen = defaults_of_file(os.environ)
    if not asks_cluster and "etcd_endpoints" in chosen:
        chosen = {name: text for name, text in chosen.items() if not _is_set(name)}
        return {name: value or chosen.get(name) for name, value in flags.items()}, None
    there = options.completed(chosen, os.environ)
    if elsewhere and (asks_cluster or there.kubeconfig or is_cluster_known(os.environ)):
        run = _in_cluster(elsewhere, required=asks_cluster)
        if run is not None:
            return dict(flags), functools.partial(run, there)
    return dict(flags), None


def _is_set(name: str) -> bool:
    return bool(os.environ.get(variable_of(f"--{name.replace('_', '-')}")))


def _in_cluster(elsewhere: str, *, required: bool) -> Callable[..., Any] | None:
    """Import what runs a command in a cluster; None, with a word on it, if a package is missing.

    Raises ``ConfigError`` if that is not installed and is ``required``.
    """
    module, _, name = elsewhere.partition(":")
    try:
        return cast(Callable[..., Any], getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        said = missing_extra(error)
        if not said:
            raise
        if required:
            raise ConfigError(said) from error
        click.echo(f"muster: {said}", err=True)
        return None


def _with_running_job(
    flags: Mapping[str, str | None], namespace: str | None, job: str | None
) -> dict[str, str | None]:
    """Return ``flags`` about a running ``muster local`` if they name no store and it fits; say so.

    Only names in ``flags`` are filled in. ``namespace`` and ``job``: as the user names them.
    """
    local = found_running({**flags, "namespace": namespace, "job": job}, os.environ)
    if local is None:
        return dict(flags)
    click.echo(f"muster: {local}", err=True)
    known = {"etcd_endpoints": local.endpoints, "namespace": local.namespace, "job": local.job}
    return {name: known.get(name, value) for name, value in flags.items()}


def _check_usual_store(job: str | None, endpoint: str) -> None:
    """Say what runs here instead if no store is named and ``job`` is of none of these runs.

    Raises ``StoreUnavailable`` if nothing listens at ``endpoint``, which is meant then.
    """
    jobs = ", ".join(one.job for one in running_jobs())
    here = f"muster local runs job {jobs} here" if jobs else "no muster local runs here"
    if not listens(endpoint):
        raise StoreUnavailable(
            f"{f'no job {job}: ' if job else ''}{here}, and no store is named (nothing listens at"
            f" {endpoint}): start a job by muster local, or name a store by"
            f" {named('--etcd-endpoints')}"
        )
    if jobs:
        what = f"{job} is" if job else "jobs are"
        click.echo(
            f"muster: {here}; {what} looked for at {endpoint}, as no --etcd-endpoints is given",
            err=True,
        )


def listens(endpoint: str) -> bool:
    """Return whether anything on this machine listens at a loopback endpoint."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as tried:
        tried.settimeout(LISTENS_TIMEOUT_S)
        return tried.connect_ex((host, int(port))) == 0


def job_named(command: Command) -> Command:
    """Decorate a command about one job: accept the job as an argument as well as by ``--job``."""

    @functools.wraps(command)
    def read(named: str | None, **arguments: Any) -> Any:
        return command(**{**arguments, "job": one_job(named, arguments["job"])})

    return click.argument("named", metavar="[JOB]", required=False, shell_complete=job_names)(read)


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
        read_s = duration_s(0.1, 3600)
        interval_s = 0.0 if interval is None else read_option("--interval", read_s, interval)
        return command(interval_s=interval_s, **arguments)

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

    The command gets ``as_json`` and, if these are among the forms, ``wide`` and ``as_yaml``.
    """

    @functools.wraps(command)
    def read(form: str | None, **arguments: Any) -> Any:
        named_forms = {"json": "as_json", "wide": "wide", "yaml": "as_yaml"}
        if "yaml" in forms:
            arguments["as_yaml"] = False
        if form is not None:
            arguments[named_forms[form]] = True
        return command(**arguments)

    choice = click.Choice(list(forms))
    says_form = f"The same as {' or '.join(f'--{form}' for form in forms)}."
    if "yaml" in forms:
        says_form = "A form for programs, or more columns."
    read = click.option("-o", "form", type=choice, help=says_form)(read)
    return click.option("--json", "as_json", is_flag=True, help=says)(read)


def read_option(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value of an option; raises ``ConfigError`` that names it."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is wrong: {error}") from error
