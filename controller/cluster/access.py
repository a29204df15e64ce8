# SPDX-License-Identifier: Apache-2.0
"""Access to the API server, by a kubeconfig as kubectl reads it, or as a pod of the cluster.

The package ``kubernetes`` reads and renews both; its faults become one sentence, without secrets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger
from yaml import YAMLError

from rdzv.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which the kubelet mounts a pod's token and the cluster's authority."""
VARIABLE = "KUBECONFIG"
PLUGIN_TIMEOUT_S = 60.0
"""Timeout of a credential plug-in that a kubeconfig names; it may prompt its user."""
RENEW_S = 60.0
"""Interval at which credentials of a kubeconfig are read again, if they may expire: a plug-in runs
again only near the end that it gave."""

LINE_MAX = 4 * 2**20
"""Maximum size of one watch event, in bytes; etcd, which stores the object, allows no more."""

_faults: ContextVar[list[str] | None] = ContextVar("faults", default=None)
"""The faults of the plug-in that the present load runs; None outside of one."""


def _hear(record: logging.LogRecord) -> bool:
    """Take in a plug-in's fault: the package logs it, and goes on without credentials."""
    faults = _faults.get()
    if faults is None or record.levelno < logging.ERROR:
        return True
    faults.append(record.getMessage())
    return False


logging.getLogger("kubernetes.aio.config.kube_config").addFilter(_hear)


class _Loader(KubeConfigLoader):
    """The package's reader, which refreshes no token of OIDC.

    It would send the user's secrets to an issuer whose certificate it does not verify, and keep
    the new refresh token to itself, which kubectl then lacks.
    """

    async def _refresh_oidc(self, provider: object) -> None:
        raise ConfigException("its OIDC token has expired: run kubectl get pods, which renews it")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The API server, the user's credentials and how to renew them; and the user's namespace."""

    configuration: Configuration
    namespace: str


def access_of(
    environ: Mapping[str, str], kubeconfig: str | None = None, context: str | None = None
) -> ClusterAccess:
    """Return the access by the kubeconfig; in a pod, if none is named, the pod's own.

    It reads files and may run a plug-in: call it in a thread without an event loop. Raises
    ``ConfigError``.
    """
    named = kubeconfig or environ.get(VARIABLE)
    if not named and not context and (FOLDER / "token").is_file():
        return access_of_pod(environ)
    return _by_kubeconfig(named or str(Path.home() / ".kube" / "config"), context)


def access_of_pod(environ: Mapping[str, str], folder: Path = FOLDER) -> ClusterAccess:
    """Return the access of a pod's service account, whose token is renewed as the kubelet does.

    Raises ``ConfigError`` outside of a cluster.
    """
    configuration = _configuration()
    try:
        InClusterConfigLoader(
            token_filename=str(folder / "token"),
            cert_filename=str(folder / "ca.crt"),
            environ=environ,
        ).load_and_set(configuration)
        file = folder / "namespace"
        namespace = file.read_text(encoding="utf-8").strip() if file.is_file() else "default"
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"this is no pod with a service account: {str(error).rstrip('.')}; muster controller"
            " runs in one: install the chart, charts/muster, and leave"
            " automountServiceAccountToken on"
        ) from error
    return ClusterAccess(configuration, namespace)


def _configuration() -> Configuration:
    """Return the package's settings but for the API server and its user."""
    found = Configuration(host="")
    # A watch holds a connection for as long as it goes on: a bound would keep calls waiting.
    found.connection_pool_maxsize = 0
    found.client_session_kwargs = {"read_bufsize": LINE_MAX}
    found.trace_configs = [_without_redirects()]
    return found


def _without_redirects() -> aiohttp.TraceConfig:
    """Refuse every redirect: a pod's page, read through the API server, could name any address."""

    async def refuse(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        asked: aiohttp.TraceRequestRedirectParams,
    ) -> None:
        raise aiohttp.ClientError(f"it redirects, with {asked.response.status}")

    found = aiohttp.TraceConfig()
    found.on_request_redirect.append(refuse)
    return found


def _by_kubeconfig(named: str, context: str | None) -> ClusterAccess:
    """Read a kubeconfig, or several with a colon between them, as one."""
    if not any(Path(one).expanduser().is_file() for one in named.split(os.pathsep) if one):
        raise ConfigError(f"--kubeconfig: {named} cannot be read: No such file or directory")
    configuration = _configuration()
    with _in_one_sentence(named):
        loader = _Loader(
            config_dict=KubeConfigMerger(named).config,
            active_context=context,
            config_base_path=None,  # each file's paths are relative to itself
        )
        asyncio.run(_load(loader, configuration))
        namespace = (loader.current_context["context"] or {}).get("namespace") or "default"
    read_s = time.monotonic()

    async def renew(_: Configuration) -> None:
        nonlocal read_s
        if time.monotonic() - read_s < RENEW_S:
            return
        read_s = time.monotonic()
        try:
            with _in_one_sentence(named):
                await asyncio.to_thread(asyncio.run, _load(loader, configuration))
        except ConfigError as error:  # the API server says whether the ones before still count
            log.warning("%s", error, extra={"event": "credentials_not_renewed"})

    configuration.refresh_api_key_hook = renew
    return ClusterAccess(configuration, str(namespace))


async def _load(loader: KubeConfigLoader, configuration: Configuration) -> None:
    """Read, or renew, the credentials; raises ``ConfigException`` also for a plug-in's fault.

    It blocks: it is run in an event loop of its own.
    """
    faults: list[str] = []
    _faults.set(faults)  # of this event loop's context alone
    async with asyncio.timeout(PLUGIN_TIMEOUT_S):
        await loader.load_and_set(configuration)
    if faults:
        raise ConfigException(f"its plug-in gave no credentials: {_reason(faults[-1])}")
    if not configuration.host:
        raise ConfigException("its cluster names no server")
    if token := configuration.api_key.get("BearerToken"):
        configuration.api_key["BearerToken"] = token.strip()  # a tokenFile ends with its line


@contextmanager
def _in_one_sentence(named: str) -> Iterator[None]:
    """Turn whatever the package makes of a damaged kubeconfig into ``ConfigError``."""
    try:
        yield
    except YAMLError as error:
        raise ConfigError(f"--kubeconfig: {named} cannot be read: it is no YAML") from error
    except TimeoutError as error:
        raise ConfigError(
            f"--kubeconfig: {named} gives no credentials: its plug-in took longer than"
            f" {PLUGIN_TIMEOUT_S:g} s"
        ) from error
    except ConfigException as error:
        # The rest of such a sentence has the entry, with all that is secret in it.
        why = re.sub(r"Invalid kube-config file\. (.*?) in .*", r"\1", str(error), flags=re.DOTALL)
        raise ConfigError(
            f"--kubeconfig: {named} cannot be used: {why}; see kubectl config view --minify"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--kubeconfig: {named} cannot be used: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--kubeconfig: {named} is not whole: see kubectl config view --minify"
        ) from error


def _reason(fault: str) -> str:
    """Return the fault with the last line of the plug-in's stderr, which is shown as bytes."""
    said, is_shown, shown = fault.partition(". b")
    last = shown.strip("'\"").rpartition(r"\n")[2]
    return f"{said}: {last}" if is_shown else said
