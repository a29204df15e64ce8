# SPDX-License-Identifier: Apache-2.0
"""The outages of the store, as moments with their times. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Outages:
    """A follower of the store: it reports each outage once, and its end."""

    _since_s: float | None = None

    def see(self, now_s: float, why: str) -> tuple[str, str] | None:
        """Take in the reason why the store does not answer, empty if it does; return the news.

        The news are what happened, in a word, and a sentence; None if nothing has changed.
        """
        if why and self._since_s is None:
            self._since_s = now_s
            return "outage", f"the store does not answer ({why}); worlds that have formed train on"
        if not why and self._since_s is not None:
            took_s, self._since_s = now_s - self._since_s, None
            return "back", f"the store answers again after {took_s:.0f} s"
        return None
