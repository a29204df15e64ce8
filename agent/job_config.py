# SPDX-License-Identifier: Apache-2.0
"""The settings of commands that look at a job, and of the sidecar, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rdzv import settings as texts
from rdzv.dataclass import dataclass
from rdzv.errors import ConfigError
from rdzv.settings import Setting, field
from rdzv.store.access import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Settings of the access to the store: its endpoints, TLS files, credentials and driver."""

    etcd_endpoints: tuple[str, ...] = field(
        Setting(
            "--etcd-endpoints",
            texts.endpoints,
            "127.0.0.1:2379",
            "HOST:PORT,…",
            "Members of the etcd cluster, with https:// for TLS; any one of them is enough to"
            " start.",
            texts.without_user,
        )
    )
    etcd_cacert: str = field(
        Setting(
            "--etcd-cacert",
            texts.file,
            "",
            "FILE",
            "Certificate authority that signed the store's certificates; with https://.",
        )
    )
    etcd_cert: str = field(
        Setting(
            "--etcd-cert",
            texts.file,
            "",
            "FILE",
            "Client certificate; the store may use its name (CN) as the user.",
        )
    )
    etcd_key: str = field(
        Setting("--etcd-key", texts.file, "", "FILE", "Private key of the client certificate.")
    )
    etcd_user: str = field(
        Setting(
            "--etcd-user",
            texts.free_text,
            "",
            "NAME",
            "User of the store, if it authenticates by password.",
            texts.unspelled,
        )
    )
    etcd_password_file: str = field(
        Setting(
            "--etcd-password-file",
            texts.file,
            "",
            "FILE",
            "File with that user's password. All these files are read again when they change.",
            texts.unspelled,
        )
    )
    store_driver: Literal["http2", "etcd3", "etcd"] = field(
        Setting(
            "--store-driver",
            texts.one_of("http2", "etcd3", "etcd"),
            "http2",
            "http2|etcd3",
            "Client of the store: Muster's own (http2; etcd is its former name), or the package"
            " etcd3, from Muster's extra etcd3.",
        )
    )

    @property
    def access(self) -> Access:
        """The access to the store."""
        return _access({name: getattr(self, name) for name in _ACCESS})

    @staticmethod
    def faults(values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each fault between settings, and in the files that they name."""
        if any(name not in values for name in _ACCESS):
            return
        try:
            access = _access(values)
        except ConfigError as error:
            yield from str(error).splitlines()
        else:
            yield from access.file_faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(AccessConfig):
    """Settings of the access to the store, and the namespace to look at."""

    namespace: str = field(
        Setting("--namespace", texts.name, "default", "NAME", "Namespace of the job.")
    )


_ACCESS = {
    "etcd_endpoints": "endpoints",
    "etcd_cacert": "cacert",
    "etcd_cert": "cert",
    "etcd_key": "key",
    "etcd_user": "user",
    "etcd_password_file": "password_file",
    "store_driver": "driver",
}

STORE_SETTINGS = frozenset(_ACCESS)
"""Names of the settings of the access to the store."""


def _access(values: Mapping[str, Any]) -> Access:
    return Access(**{parameter: values[name] for name, parameter in _ACCESS.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig(StoreConfig):
    """Settings of one job and of the access to its store."""

    job: str = field(
        Setting("--job", texts.name, None, "NAME", "Name of the job; also torch's run id.")
    )
