# SPDX-License-Identifier: Apache-2.0
"""The registration that every write of a sidecar rests on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from rdzv.errors import LeaseLost
from rdzv.store import Compare, KeyValue, Range


@dataclass(frozen=True, slots=True)
class Registered:
    """This sidecar's member record, and the lease that it is to hang on.

    ``lease`` is asked anew for each write: a sidecar whose lease was lost registers again, and
    what its launcher waits for is then written under the new one. None: it is not registered now.
    ``again`` waits until it is.
    """

    member_key: str
    lease: Callable[[], int | None]
    again: Callable[[], Awaitable[object]]

    def holds(self) -> Compare:
        """Holds in the store while this sidecar is the one that is registered under its name.

        Raises ``LeaseLost`` while it knows itself that it is not.
        """
        lease = self.lease()
        if lease is None:
            raise LeaseLost("the member is not registered")
        return Compare(self.member_key, "lease", "=", lease)

    def look(self) -> Range:
        """Read the member record; ``check`` takes the answer."""
        return Range(self.member_key)

    def check(self, kvs: Iterable[KeyValue]) -> None:
        """Raise ``LeaseLost`` where it was the registration that did not hold."""
        if self.lease() not in [kv.lease for kv in kvs]:
            raise LeaseLost("the member record is gone, or on another lease")
