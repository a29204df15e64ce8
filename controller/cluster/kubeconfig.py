# SPDX-License-Identifier: Apache-2.0
"""Access to the API server for a person: the current context of a kubeconfig, as for kubectl."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rdzv.errors import ConfigError

VARIABLE = "KUBECONFIG"
PLUGIN_TIMEOUT_S = 60.0
"""Timeout of the credential plugin that a kubeconfig names; it may prompt its user."""


@dataclass(frozen=True, slots=True)
class KubeconfigAccess:
    """The URL of the API server, and the cluster and user of the current context."""

    url: str
    cluster: Mapping[str, Any]
    user: Mapping[str, Any]
    folder: Path
    namespace: str = "default"

    @classmethod
    def of(
        cls, environ: Mapping[str, str], named: str | None = None, context_name: str | None = None
    ) -> KubeconfigAccess:
        """Read the ``named`` kubeconfig, else that of ``KUBECONFIG``, else ``~/.kube/config``.

        Raises ``ConfigError`` if ``KUBECONFIG`` names several, or if the file is unreadable or
        incomplete.
        """
        listed = [one for one in environ.get(VARIABLE, "").split(os.pathsep) if one]
        if not named and len(listed) > 1:
            raise ConfigError(
                f"{VARIABLE} names {len(listed)} files: say by --kubeconfig which one, or make one"
                " of them by kubectl config view --flatten"
            )
        found = named or next(iter(listed), None)
        path = Path.home() / ".kube" / "config" if found is None else Path(found)
        try:
            read = YAML(typ="safe").load(path)
        except (OSError, YAMLError) as error:
            why = getattr(error, "strerror", None) or "it is no YAML"
            raise ConfigError(f"--kubeconfig: {path} cannot be read: {why}") from error
        try:
            chosen = context_name or read["current-context"]
            context = _entry(read, "contexts", "context", chosen)
            cluster = _entry(read, "clusters", "cluster", context["cluster"])
            user = _entry(read, "users", "user", context["user"])
            url = str(cluster["server"]).rstrip("/")
        except (KeyError, TypeError, StopIteration) as error:
            raise ConfigError(
                f"--kubeconfig: {path} has no current context that is whole: see kubectl config"
                " view --minify"
            ) from error
        return cls(url, cluster, user, path.parent, str(context.get("namespace") or "default"))

    def token(self) -> str:
        """Return the current token; empty without one, as with a client certificate."""
        if text := self.user.get("token"):
            return str(text)
        if name := self.user.get("tokenFile"):
            try:
                return (self.folder / str(name)).read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise ConfigError(f"--kubeconfig: its tokenFile cannot be read: {error}") from error
        plugin = self.user.get("exec")
        return _from_plugin(plugin) if isinstance(plugin, Mapping) else ""

    def trusted(self) -> ssl.SSLContext:
        """Build a TLS context for the cluster, with the client certificate if there is one."""
        context = ssl.create_default_context()
        if authority := _content(self.cluster, "certificate-authority", self.folder):
            context = ssl.create_default_context(cadata=authority.decode())
        if self.cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        certificate = _content(self.user, "client-certificate", self.folder)
        key = _content(self.user, "client-key", self.folder)
        if certificate and key:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "both"
                file.touch(mode=0o600)
                file.write_bytes(certificate + b"\n" + key)
                context.load_cert_chain(file)
        return context


def _entry(read: Any, plural: str, kind: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(one for one in read[plural] if one["name"] == name)[kind]
    return found


def _content(of: Mapping[str, Any], key: str, folder: Path) -> bytes | None:
    """Return an entry's inline data, or the content of its file; None without both."""
    try:
        if text := of.get(f"{key}-data"):
            return base64.b64decode(text)
        return (folder / str(of[key])).read_bytes() if of.get(key) else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--kubeconfig: its {key} cannot be read: {error}") from error


def _from_plugin(plugin: Mapping[str, Any]) -> str:
    """Run the credential plugin, as for hosted clusters, and return its token."""
    command = [str(plugin.get("command")), *map(str, plugin.get("args") or [])]
    told = {str(one["name"]): str(one["value"]) for one in plugin.get("env") or []}
    request: dict[str, Any] = {
        "apiVersion": plugin.get("apiVersion"),
        "kind": "ExecCredential",
        "spec": {},
    }
    environ = {**os.environ, **told, "KUBERNETES_EXEC_INFO": json.dumps(request)}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, check=True, timeout=PLUGIN_TIMEOUT_S
        )
        return str(json.loads(done.stdout)["status"]["token"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--kubeconfig: {command[0]}, which it names, gave no token: {_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    """Return why the plugin failed, without its arguments, which may be secret.

    The reason is the last line of its stderr, as "log in again", the timeout, or the error.
    """
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {PLUGIN_TIMEOUT_S:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{lines[-1] if lines else 'no word'} (exit status {error.returncode})"
    return str(error)
