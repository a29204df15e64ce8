# SPDX-License-Identifier: Apache-2.0
"""The place of a job whose user names no store: on this machine, or in a cluster.

In this order: a running ``muster local``, the user's file ``~/.config/muster/config.yaml``, the
cluster of the kubeconfig or of this pod; and the default store, if there is none of these. Each
running job has a file in the user's state directory, which the run holds a lock on. One without a
lock is stale: its run was killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import click

from agent.job_config import AccessConfig
from console.help import CLUSTER_SECTION, SectionedOption
from rdzv import settings
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.sentences import named, variable_of
from rdzv.settings import settings_of

VARIABLE = "KUBECONFIG"

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
"""The credentials of a pod, if its service account has any."""

FILE_NAMES = ("namespace", "context", "kubeconfig")
"""Keys besides the settings of the store, which have the names of their flags."""

ATTEMPTS = 10
PAUSE_S = 0.05
"""A command that looks for jobs holds each lock for a moment: a run tries again."""

ENDED = "ended"
"""The directory of the files of jobs that have ended."""

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Answers of a file system without locks, such as Lustre, or NFS without its lock daemon."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The kubeconfig, its context and the namespace, each as given or None."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None

    def completed(self, chosen: Mapping[str, str], environ: Mapping[str, str]) -> ClusterOptions:
        """Return them with what is not given: from the environment, and from the user's file."""
        namespace = self.namespace or environ.get("MUSTER_NAMESPACE") or chosen.get("namespace")
        return ClusterOptions(
            self.kubeconfig or chosen.get("kubeconfig"),
            self.context or chosen.get("context"),
            namespace,
        )


def is_cluster_known(environ: Mapping[str, str]) -> bool:
    """Return whether there is a kubeconfig, or whether this is a pod with credentials."""
    if listed := [one for one in environ.get(VARIABLE, "").split(os.pathsep) if one]:
        return any(Path(one).is_file() for one in listed)
    if environ.get("KUBERNETES_SERVICE_HOST") and TOKEN.is_file():
        return True
    return (Path.home() / ".kube" / "config").is_file()


def with_cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with ``--kubeconfig`` and ``--context``."""
    for flag, metavar, says in (
        ("--context", "NAME", "Context of the kubeconfig.  [default: (the current one)]"),
        (
            "--kubeconfig",
            "FILE",
            "How to reach the cluster.  [env var: KUBECONFIG; default: (~/.kube/config)]",
        ),
    ):
        option = click.option(
            flag, cls=SectionedOption, section=CLUSTER_SECTION, metavar=metavar, help=says
        )
        command = option(command)
    return command


def place_of(environ: Mapping[str, str]) -> Path:
    """Return the path of the file, which need not exist."""
    given = environ.get("XDG_CONFIG_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".config"
    return base / "muster" / "config.yaml"


def defaults_of_file(environ: Mapping[str, str]) -> dict[str, str]:
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
    if key not in (*FILE_NAMES, *store):
        from console.help import near

        meant = near(key, (*FILE_NAMES, *store))
        hint = (
            f"did you mean {meant}?" if meant else f"it may have {', '.join((*FILE_NAMES, *store))}"
        )
        raise ConfigError(f"{path}: there is no setting {key!r}: {hint}")
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ConfigError(f"{path}: {key}: expected a text")
    parse: Callable[[str], Any] = settings.free_text
    if key in store:
        parse = settings_of(AccessConfig)[store[key]].parse
    elif key == "namespace":
        parse = settings.name
    try:
        parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{path}: {key}: {str(value)!r} is wrong: {error}") from error
    return store.get(key, key), str(value)


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that ``muster local`` runs, and the process that does. ``logs``: the directory.

    What has ended is kept, one run of each job, as its logs are.
    """

    endpoints: str
    namespace: str
    job: str
    pid: int
    logs: str = ""

    @property
    def file(self) -> Path:
        """Its file; a run of the same job in the same store has the same one."""
        return running_directory() / _file_name(self.endpoints, self.namespace, self.job)

    def __str__(self) -> str:
        return f"job {self.job} of muster local, pid {self.pid}, in its store at {self.endpoints}"


def running_directory() -> Path:
    """Return the directory of the files, which need not exist."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "muster" / "local"


@contextmanager
def published_run(job: RunningJob) -> Iterator[bool]:
    """Let other commands find ``job``; yield whether they can.

    Raises ``ConfigError`` if another run has the same job in the same store.
    """
    in_use = f"job {job.job} in namespace {job.namespace} at {job.endpoints}"
    with ExitStack() as stack:
        try:
            job.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = locked(job.file, json.dumps(asdict(job)), in_use, "choose another --job")
            known = stack.enter_context(lock)
        except OSError:
            known = False  # a home that takes no writes: the endpoint has to be given
        try:
            yield known
        finally:
            if known:
                _keep(job)  # its logs stay


@contextmanager
def locked(path: Path, content: str, what: str, otherwise: str) -> Iterator[bool]:
    """Hold a lock on a file with ``content``, which has its holder's ``pid``; remove it after use.

    Yields whether the file system has locks: if not, nothing is held. Raises ``ConfigError``, which
    says that ``what`` is in use and what to do ``otherwise``.
    """
    held = True
    try:
        file = _lock(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        file, held = None, False
    if not held:
        path.unlink(missing_ok=True)
        yield False
        return
    if file is None:
        holder = _read_job(path).get("pid", "")
        raise ConfigError(f"{what} is in use by muster local, pid {holder}: {otherwise}")
    with file:
        file.truncate(0)
        file.write(content)
        file.flush()
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """Return the jobs that run, by name; remove the files of those that were killed."""
    try:
        paths = list(running_directory().glob("*.json"))
    except OSError:
        return []
    jobs = filter(None, map(_running_job, paths))
    return sorted(jobs, key=lambda job: (job.job, job.pid))


def found_running(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> RunningJob | None:
    """Return the running job that a command is about if its user names no store; None for none.

    ``flags``: endpoints, namespace and job as given, by the names of the settings. Raises
    ``ConfigError`` if several fit.
    """

    def given(name: str) -> str | None:
        return flags.get(name) or environ.get(variable_of(f"--{name.replace('_', '-')}")) or None

    if given("etcd_endpoints"):
        return None
    job, namespace = given("job"), given("namespace")
    fitting = [
        one
        for one in running_jobs()
        if job in (None, one.job) and namespace in (None, one.namespace)
    ]
    if len(fitting) > 1:
        names = ", ".join(f"{one.job} (pid {one.pid}, {one.endpoints})" for one in fitting)
        raise ConfigError(
            f"several jobs of muster local run here, {names}: name the job, or the store by"
            f" {named('--etcd-endpoints')}"
        )
    return fitting[0] if fitting else None


def ended_run(job: str | None, namespace: str | None) -> RunningJob | None:
    """Return the job that ended last here, whose logs are there; None for none."""
    try:
        kept = sorted(
            (running_directory() / ENDED).glob("*.json"), key=lambda one: one.stat().st_mtime
        )
    except OSError:
        return None
    for one in filter(None, map(_job_in, reversed(kept))):
        fits = job in (None, one.job) and namespace in (None, one.namespace)
        if fits and one.logs and Path(one.logs).is_dir():
            return one
    return None


def _keep(job: RunningJob) -> None:
    """Note a job that has ended, in place of the run of the same name before it."""
    if not job.logs:
        return
    path = running_directory() / ENDED / _file_name(job.namespace, job.job)
    with suppress(OSError):  # its directory of logs was printed, too
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_text(json.dumps(asdict(job)))


def _file_name(*words: str) -> str:
    return f"{hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:16]}.json"


def _lock(path: Path) -> TextIO | None:
    for _ in range(ATTEMPTS):
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file meanwhile.
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            file.close()
            raise
        file.close()
        time.sleep(PAUSE_S)
    return None


def _running_job(path: Path) -> RunningJob | None:
    try:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if (killed := _job_in(path)) is not None:
                _keep(killed)
            path.unlink(missing_ok=True)  # nobody holds it
            return None
    except BlockingIOError:
        return _job_in(path)
    except OSError:
        return None


def _job_in(path: Path) -> RunningJob | None:
    fields = _read_job(path)
    try:
        return RunningJob(
            str(fields["endpoints"]),
            str(fields["namespace"]),
            str(fields["job"]),
            int(str(fields["pid"])),
            str(fields.get("logs", "")),
        )
    except (KeyError, ValueError):
        return None  # it is being written


def _read_job(path: Path) -> Mapping[str, object]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
