# SPDX-License-Identifier: Apache-2.0
"""``muster store``, ``muster store-role``: a store for laptops, and a job's rights in etcd."""

from __future__ import annotations

import asyncio
import shlex
import signal

import click

from agent.job_config import StoreConfig
from console.help import Command
from console.options import configured_by, one_job
from rdzv import settings
from rdzv.errors import ConfigError
from rdzv.keys import JobKeys
from rdzv.store.access import Access, password_in
from rdzv.store.etcd.admin import WRITE_TIMEOUT_S, JobRole, Rights, auth_enabled
from rdzv.store.memory.server import EmbeddedServer


@click.command(
    cls=Command,
    epilog="Example: muster store --listen 127.0.0.1:2379",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:2379",
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
def store(listen: str) -> None:
    """Serve the embedded store over etcd's v3 gRPC API; etcdctl works on it."""
    asyncio.run(_serve(listen))


async def _serve(listen: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with EmbeddedServer(listen) as server:
        click.echo(f"The store listens on {server.endpoint}.")
        click.echo("It keeps nothing across a restart: for a job that matters, use etcd.")
        await stop.wait()


@click.command(
    "store-role",
    cls=Command,
    epilog="""\b
Examples:
  muster store-role digits
  muster store-role digits --apply --new-password-file digits.password \\
      --etcd-user root --etcd-password-file root.password

With --apply, the --etcd-* settings need the right to manage users: root.
""",
)
@configured_by(StoreConfig)
@click.argument("named", metavar="[JOB]", required=False)
@click.option("--job", metavar="NAME", help="Name of the job, if JOB is not given.")
@click.option(
    "--user", metavar="NAME", help="The job's user, as a sidecar or its certificate names itself."
)
@click.option(
    "--new-password-file",
    metavar="FILE",
    help="The user's password. With --apply, an existing user gets it, too.",
)
@click.option(
    "--no-password",
    is_flag=True,
    help="The user has a client certificate of that name, and no password.",
)
@click.option("--apply", is_flag=True, help="Create or update them in the store.")
def store_role(
    config: StoreConfig,
    named: str | None,
    job: str | None,
    user: str | None,
    new_password_file: str | None,
    no_password: bool,
    apply: bool,
) -> None:
    """Give JOB a user and its rights, for a store with authentication.

    The user may read and write what is under the job's own prefix, and nothing else. A sidecar
    needs no more.
    """
    job = one_job(named, job)
    if job is None:
        raise ConfigError("JOB is missing: the name of the job whose user and rights these are")
    try:
        role = JobRole(JobKeys(config.namespace, settings.name(job)), _user_named(user))
    except ValueError as error:
        raise ConfigError(f"JOB or --user is wrong: {error}") from error
    if no_password and new_password_file:
        raise ConfigError("--no-password and --new-password-file exclude each other: give one")
    if not apply:
        for line in _commands(role, new_password_file, no_password=no_password):
            click.echo(line)
        return
    if not (no_password or new_password_file):
        raise ConfigError(
            "--apply needs the user's password: give --new-password-file, or --no-password for a"
            " user who comes by a client certificate"
        )
    password = _password(new_password_file) if new_password_file else None
    if not config.access.tls:
        click.echo(
            "muster: the endpoints are not https://: passwords go to the store in plain text",
            err=True,
        )
    asks = asyncio.run(_apply(config.access, role, password))
    click.echo(f"{role.user_name} may read and write what is under {role.keys.prefix}")
    if not asks:
        click.echo(
            "Authentication is off: until etcdctl auth enable is run, any client that reaches this"
            " etcd can do everything."
        )


def _user_named(name: str | None) -> str:
    if name is None:
        return ""
    if not name or ":" in name:
        raise ValueError("a user has a name, without a colon")
    return settings.free_text(name)


def _password(path: str) -> str:
    password = password_in(path, "--new-password-file")
    if any(character.isspace() for character in password):
        raise ConfigError(
            "the password of --new-password-file has a blank in it, which etcdctl would end it at:"
            " choose one without"
        )
    return password


async def _apply(access: Access, role: JobRole, password: str | None) -> bool:
    """Create or complete the role and its user; return whether authentication is on."""
    rights = Rights(access)
    try:
        await rights.make(role, password)
    finally:
        await rights.close()
    return await auth_enabled(access, timeout_s=WRITE_TIMEOUT_S)


def _commands(role: JobRole, password_file: str | None, *, no_password: bool) -> list[str]:
    """Return the etcdctl commands to run, each line quoted for a shell."""
    user_add = ["user", "add", role.user_name]
    if no_password:
        user_add.append("--no-password")
    elif password_file:
        user_add.append("--interactive=false")
    grant = ["role", "grant-permission", "--prefix=true", role.name, "readwrite", role.keys.prefix]
    lines = [
        _command("role", "add", role.name),
        _command(*grant),
        _command(*user_add) + (f" < {shlex.quote(password_file)}" if password_file else ""),
        _command("user", "grant-role", role.user_name, role.name),
    ]
    if not (no_password or password_file):
        lines[2] += "  # asks for the password"
    return ["# as root of the store, with the ETCDCTL_ variables that lead there", *lines]


def _command(*words: str) -> str:
    return shlex.join(["etcdctl", *words])
