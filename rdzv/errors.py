# SPDX-License-Identifier: Apache-2.0
"""Every error that leaves a package of Muster on purpose.

::

    MusterError
    ├── ConfigError            a user's mistake: flag, variable, file            exit 2
    │   └── JobNotFound          the store has no such job                      exit 66
    ├── StoreError             the store did not do what was asked
    │   ├── StoreUnavailable     certainly not applied; try again                exit 69
    │   ├── StoreAmbiguous       may have been applied; re-read, then decide
    │   ├── StoreRefused         rights or a malformed request: an operator must act
    │   │   └── StoreFull          no space: likewise, and a write may have been applied
    │   ├── LeaseLost            the lease is gone: register again
    │   └── Compacted            the watched history is gone: re-list
    ├── MembershipError        the job's membership does not allow it
    │   └── Fenced               another pod holds this member's name or job
    ├── RecordError            bytes in the store that are no record of ours
    ├── ClusterError           the API server of Kubernetes did not do what was asked
    │   ├── ClusterUnavailable   no answer in time; what became of a write is unknown    exit 69
    │   └── ClusterRefused       it said no: rights, a conflict, no such object
    └── LauncherError          a launcher asked for something that it cannot have
        ├── WireError            bytes that are no c10d request within its limits
        └── StateError           a rendezvous state that torch could not have written
"""

from __future__ import annotations


class MusterError(Exception):
    """The base of every error that leaves a package of Muster on purpose."""


class ConfigError(MusterError):
    """The user's configuration is wrong; the message names what, where and what to do."""


class JobNotFound(ConfigError):
    """The store has no record of the job that was named."""


class StoreError(MusterError):
    """The store did not do what was asked."""


class StoreUnavailable(StoreError):
    """The store certainly did not apply the request (no connection, no leader, too busy)."""


class StoreAmbiguous(StoreError):
    """The outcome is unknown: the request was sent, and no answer came within its deadline."""


class StoreRefused(StoreError):
    """The store understood and refused: missing rights, no space, a malformed request."""


class StoreFull(StoreRefused):
    """The store has no space. The outcome of a write is unknown: re-read, then decide.

    etcd applies the write that takes the last room, and then refuses it with the error of those
    that follow.
    """


class LeaseLost(StoreError):
    """The lease has expired or was revoked; the keys attached to it are gone."""


class Compacted(StoreError):
    """The history from the wanted revision on is gone, or unavailable as it was: list again.

    ``compact_revision`` is the oldest revision the store still has.
    """

    def __init__(self, message: str, compact_revision: int) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class MembershipError(MusterError):
    """The job's membership does not allow what was asked."""


class Fenced(MembershipError):
    """Another pod has taken this member's name or job; this sidecar must write no more."""


class RecordError(MusterError):
    """Bytes found in the store are no record of ours (corrupt, or a schema we do not know)."""


class ClusterError(MusterError):
    """The API server of Kubernetes did not do what was asked."""


class ClusterUnavailable(ClusterError):
    """The API server did not answer in time, or not as one does: re-read, then decide."""


class ClusterRefused(ClusterError):
    """The API server refused; ``status`` is HTTP's: 403 rights, 404 not there, 409 a conflict."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class LauncherError(MusterError):
    """A launcher asked for something that it cannot have."""


class WireError(LauncherError):
    """Bytes that are no c10d request, or one beyond the protocol's limits."""


class StateError(LauncherError):
    """Bytes that are no rendezvous state torch could have written."""
