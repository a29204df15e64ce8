# SPDX-License-Identifier: Apache-2.0
"""The registration guard: the compare that every write of a registered sidecar carries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from rdzv.dataclass import dataclass
from rdzv.errors import LeaseLost
from rdzv.store import Compare, KeyValue, Range


@dataclass(frozen=True, slots=True)
class Registered:
    """The registration of this sidecar's member."""

    member_key: str
    """The store key of its record."""
    lease: Callable[[], int | None]
    """A function that returns its present lease, None while it is not registered. It is called for
    each write: after a loss the sidecar registers again, and pending writes use the new lease."""
    again: Callable[[], Awaitable[object]]
    """A function that waits until it is registered."""

    def holds(self) -> Compare:
        """Return the compare that holds while this sidecar is registered under its name.

        Raises ``LeaseLost`` if it is known not to be.
        """
        lease = self.lease()
        if lease is None:
            raise LeaseLost("the member is not registered")
        return Compare(self.member_key, "lease", "=", lease)

    def fence(self) -> tuple[Compare, ...] | None:
        """Return the compares that hold while it is registered; None while it is known not to."""
        return None if self.lease() is None else (self.holds(),)

    def look(self) -> Range:
        """Return the read of the member record; ``check`` takes the answer."""
        return Range(self.member_key)

    def check(self, kvs: Iterable[KeyValue]) -> None:
        """Raise ``LeaseLost`` if the guard does not hold by the read member record."""
        if self.lease() not in [kv.lease for kv in kvs]:
            raise LeaseLost("the member record is gone, or on another lease")
