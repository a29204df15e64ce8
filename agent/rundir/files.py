# SPDX-License-Identifier: Apache-2.0
"""The run directory: what the sidecar hands to the training container beside it.

The pod is one trust domain, with two different users: every file can be read by the other one, is
renamed into place whole, and holds no secret. What has to outlive the sidecar's process, but not
the pod, is kept here too. The other user may put anything in its place: nothing is read or written
through a link, and no read makes the sidecar wait.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agent.config import Config
from agent.rundir.channels import GatePage
from agent.rundir.programs import (
    EXEC_PROGRAMS,
    LIBRARY_HOME,
    PACKAGES,
    PROGRAMS,
    exec_program,
    program,
)
from agent.rundir.reports import (
    FailureReport,
    LaunchReport,
    read_failures,
    read_launch,
    read_plain_starts,
    read_ranks,
    read_stacks,
)
from launcher_shim.pod.launchers import CENTRAL
from launcher_shim.rundir import layout
from launcher_shim.rundir.layout import read_untrusted
from launcher_shim.rundir.rank_reports import StackFrame, StepLine, read_steps
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError, RecordError
from rdzv.members.registration import Held
from rdzv.records.codec import dump_record, load_record, take, take_name
from rdzv.records.progress import RankProgress
from rdzv.sentences import named

log = logging.getLogger(__name__)

LIBRARY = ("muster", "muster/data", "muster/world")
"""The packages that training scripts import, each with the files directly in it."""

CONTENT_MAX_BYTES = 1024 * 1024
"""Bound on a file that is read: far more than any file here has."""

MAX_RESTARTS = 10
"""The restart budget of a container that sets none: enough for a day with several losses; a script
that always fails still ends within minutes."""


@dataclass(frozen=True, slots=True)
class State:
    """The state that the pod's next sidecar must find: the pod's UID, and its registration.

    ``held`` is None for a pod that has never registered.
    """

    pod_uid: str
    held: Held | None = None

    def to_json(self) -> bytes:
        """Encode the state for the file."""
        held = self.held
        return dump_record(
            {
                "pod_uid": self.pod_uid,
                "generation": held.generation if held else 0,
                "incarnation": held.incarnation if held else 0,
            }
        )

    @classmethod
    def from_json(cls, name: str, content: bytes) -> State:
        """Decode the state; raise ``RecordError`` if it is malformed."""
        fields = load_record(name, content)
        generation = take(name, fields, "generation", int)
        incarnation = take(name, fields, "incarnation", int)
        held = Held(generation, incarnation) if incarnation else None
        return cls(take_name(name, fields, "pod_uid"), held)


class RunDir:
    """One run directory. Every method may block for as long as the disk does."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._page = GatePage(self.path / layout.GATE_PAGE)

    @property
    def c10d_socket(self) -> Path:
        """Path at which the rendezvous endpoint listens for a relay in the training container."""
        return self.path / layout.C10D_SOCKET

    def make(self) -> None:
        """Make the directory itself; raise ``ConfigError`` if it cannot be used."""
        with self._usable():
            self._make_dir(self.path, 0o755)
            no_programs = os.statvfs(self.path).f_flag & os.ST_NOEXEC
        if no_programs:
            raise ConfigError(
                f"{named('--run-dir')}: {self.path} is on a volume that is mounted noexec, so the"
                f" training container could not start {layout.PROGRAMS}/{layout.MUSTER_RUN} in it:"
                " mount one without noexec, such as an emptyDir"
            )

    def deliver(self, config: Config, host: str) -> None:
        """Write every file that does not depend on the store; raise ``ConfigError`` if that fails.

        ``host`` is this pod's name in the host list.
        """
        with self._usable():
            self._make_dir(self.path / layout.PROGRESS, 0o1777)
            self._make_dir(self.path / layout.LAUNCH, 0o1777)
            self._make_dir(self.path / layout.PLAIN_STARTS, 0o1777)
            self._make_dir(self.path / layout.RANK_ERRORS, 0o1777)
            self._page.make()
            self._make_dir(self.path / layout.MODULES, 0o755)
            for package in LIBRARY:
                self._make_dir(self.path / layout.MODULES / package, 0o755)
                for source in (LIBRARY_HOME / package).iterdir():
                    if source.name.endswith(".py") and source.name != "__main__.py":
                        name = f"{layout.MODULES}/{package}/{source.name}"
                        self._ensure(name, source.read_bytes(), 0o644)
            script = PACKAGES / "launcher_shim/pod" / layout.DISCOVER_HOSTS
            self._ensure(layout.DISCOVER_HOSTS, script.read_bytes(), 0o755)
            lines = [f"{key}={value}\n" for key, value in torch_environment(config).items()]
            # The relay has to know whether the port is free for it.
            lines.append(f"MUSTER_C10D_PORT={config.c10d_port}\n")
            lines.append(f"MUSTER_HOST={host}\n")
            # A central launcher gets more options: muster-run has to know whether this is its pod.
            lines += [f"MUSTER_ROLE={config.role}\n", f"MUSTER_SLOTS={config.slots}\n"]
            lines.append(f"MUSTER_LEASE_TTL={config.lease_ttl_s}\n")
            shown = self._page_in_force()
            self._ensure(layout.ENVIRONMENT, "".join(lines).encode(), 0o644)
            if shown is not None and self._page_in_force() is None:
                self.put_gate(shown)
            self._make_dir(self.path / layout.REMOTE_SHELL, 0o755)
            ssh = PACKAGES / "launcher_shim" / CENTRAL.agent / "ssh.sh"
            self._ensure(f"{layout.REMOTE_SHELL}/ssh", ssh.read_bytes(), 0o755)
            # Last: a program that is found finds all that it needs.
            self._make_dir(self.path / layout.PROGRAMS, 0o755)
            for name in PROGRAMS:
                self._ensure(f"{layout.PROGRAMS}/{name}", program(name), 0o755)
            for path in EXEC_PROGRAMS:
                self._ensure(path, exec_program(path), 0o755)
            # Where Python may keep what it has compiled: else each start of one would compile it.
            for folder in ("", "muster"):
                self._make_dir(self.path / layout.MODULES / folder / "__pycache__", 0o1777)
            startup = PACKAGES / "launcher_shim/pod" / layout.STARTUP
            self._ensure(f"{layout.MODULES}/{layout.STARTUP}", startup.read_bytes(), 0o644)

    def state(self, pod_uid: str) -> State:
        """Read what this pod's sidecar kept; for a fresh pod, make its state and keep it at once.

        ``pod_uid`` is empty if the platform gives none: then the directory, which lives as long as
        the pod, is given a UID of its own. Raises ``ConfigError`` if the directory cannot be used.
        """
        with self._usable():
            kept = self._kept()
            if kept is not None and pod_uid in ("", kept.pod_uid):
                return kept
            fresh = State(pod_uid or secrets.token_hex(8))
            self.keep(fresh)
            return fresh

    def keep(self, state: State) -> None:
        """Write the state that the pod's next sidecar must find, unless the file has it already."""
        self._ensure(layout.STATE, state.to_json(), 0o644)

    def hosts(self) -> str:
        """Read the host list as it was delivered last; empty if it never was."""
        content = self.content(layout.HOSTS)
        return "" if content is None else content.decode("ascii", errors="replace")

    def put(self, name: str, content: bytes) -> None:
        """Rename a file into place for the training container; raise ``OSError`` if that fails."""
        self._write(name, content, 0o644)

    def put_gate(self, content: bytes) -> None:
        """Show ranks another gate, without new space on the disk; raise ``OSError`` if it fails."""
        self._page.put(content, self._environment_ns())

    def gate(self) -> bytes | None:
        """Read the gate that was shown last; None if there is none. Raises ``OSError``.

        A sidecar of 0.1 writes ``gate.json`` alone.
        """
        page = self._page_in_force()
        return self.content(layout.GATE) if page is None else page

    def _page_in_force(self) -> bytes | None:
        page = self._page.content()
        return page[0] if page is not None and page[1] == self._environment_ns() else None

    def _environment_ns(self) -> int:
        """Return when the environment file was written; 0 if it is not there."""
        try:
            return (self.path / layout.ENVIRONMENT).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def content(self, name: str) -> bytes | None:
        """Read the file ``name``; None if it is absent or a link.

        Raises ``OSError`` if it cannot be read.
        """
        try:
            return read_untrusted(self.path / name, CONTENT_MAX_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link is no file of ours, whatever it points to
                return None
            raise

    def remove(self, name: str) -> None:
        """Delete the file ``name`` if it is there; raise ``OSError`` if that fails."""
        (self.path / name).unlink(missing_ok=True)

    def ranks(self) -> tuple[RankProgress, ...]:
        """Read the progress that the ranks of this pod have published, by local rank."""
        return read_ranks(self.path / layout.PROGRESS)

    def imported(self) -> str:
        """Read the name of the round whose ranks have imported Muster; empty for none."""
        try:
            content = self.content(layout.IMPORTED)
        except OSError:
            return ""
        return (content or b"").decode("ascii", errors="replace")

    def steps(self) -> tuple[StepLine, ...]:
        """Read the steps that the ranks of this pod have published."""
        return read_steps(self.path / layout.PROGRESS)

    def launch(self) -> LaunchReport | None:
        """Read the report of ``muster-run`` on its launcher; None if there is none."""
        return read_launch(self.path)

    def plain_starts(self) -> tuple[str, ...]:
        """Read why workers of this pod started without a zygote, by local rank."""
        return read_plain_starts(self.path)

    def failures(self) -> tuple[FailureReport, ...]:
        """Read the errors that the ranks of this pod have reported, the earliest first."""
        return read_failures(self.path / layout.RANK_ERRORS)

    def stacks(self, ask: str) -> dict[int, tuple[str, list[StackFrame]]] | None:
        """Read the answer to ``ask``: each process's state and stack; None if there is none yet."""
        return read_stacks(self.path, ask)

    def commands(self) -> int | None:
        """Count the worker commands of the job's launcher that run here; None if none ever came."""
        try:
            return sum(
                1 for path in (self.path / layout.WORKERS).iterdir() if path.suffix == ".json"
            )
        except OSError:
            return None  # absent, or not made by a launcher

    def deliver_hosts(self, text: str) -> None:
        """Rename a new host list into place; raise ``OSError`` if that fails."""
        self._write(layout.HOSTS, text.encode("ascii"), 0o644)

    def _kept(self) -> State | None:
        content = self.content(layout.STATE)
        if content is None:
            return None
        try:
            return State.from_json(layout.STATE, content)
        except RecordError as error:
            log.warning("starting as a fresh pod: %s", error, extra={"event": "state_unreadable"})
            return None

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{named('--run-dir')}: {self.path} cannot be used ({error.strerror}):"
                " mount a directory that this user may write to"
            ) from error

    def _make_dir(self, path: Path, mode: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and path != self.path:
            raise NotADirectoryError(errno.ENOTDIR, f"{path.name} is a link")
        if path.stat().st_uid == os.geteuid():
            path.chmod(mode)
        elif not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{path.name} may not be read by this user")

    def _ensure(self, name: str, content: bytes, mode: int) -> None:
        """Write a file unless it is there already, so that a sidecar restarts on a full disk."""
        if not self._has(name, content, mode):
            self._write(name, content, mode)

    def _has(self, name: str, content: bytes, mode: int) -> bool:
        """Return whether this user's file is there: of this mode and content, and no other name."""
        path = self.path / name
        try:
            found = path.lstat()
            shown = (found.st_mode, found.st_uid, found.st_nlink)
            if shown != (stat.S_IFREG | mode, os.geteuid(), 1):
                return False  # another user could still change it
            return read_untrusted(path, len(content) + 1) == content
        except OSError:
            return False

    def _write(self, name: str, content: bytes, mode: int) -> None:
        """Write a file atomically: under a temporary name, then renamed into place."""
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(temporary, "wb", opener=lambda path, _: os.open(path, flags, mode)) as file:
                os.fchmod(file.fileno(), mode)  # whatever the umask is
                file.write(content)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def torch_environment(config: Config) -> Mapping[str, str]:
    """Return the environment variables that torchrun in the training container needs.

    torch's own keep-alive is as good as switched off (5 s x 1000), as the leases tell which nodes
    are alive; torch never hosts a store; and each round has a worker store of its own, without
    which elastic scale-up is broken from torch 2.6 on. With torch's own default of no restart, the
    first node that dies would end every other torchrun; the container's own ``PET_MAX_RESTARTS``
    or ``--max-restarts`` takes precedence.
    """
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{config.c10d_port or config.relay_port}",
        "PET_RDZV_ID": config.job,
        "PET_RDZV_CONF": (
            f"is_host=0,read_timeout=300,last_call_timeout={max(1, round(config.last_call_s))},"
            "keep_alive_interval=5,keep_alive_max_attempt=1000"
        ),
        "PET_NNODES": f"{config.policy.min_nodes}:{config.policy.max_nodes}",
        "PET_LOCAL_ADDR": config.address,
        "PET_MAX_RESTARTS": f"{MAX_RESTARTS}",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "MUSTER_RUN_DIR": config.run_dir,
        "MUSTER_MEMBER": config.member,
        "MUSTER_GRACE_S": f"{config.grace_s:g}",
        "MUSTER_RESTART_STEPS": f"{config.restart_steps}",
        **({"MUSTER_WARM": "1"} if config.warm == "1" else {}),
    }
