# SPDX-License-Identifier: Apache-2.0
"""A filter for lines that repeat while a job fails again and again in the same way. Pure."""

from __future__ import annotations

import re

from console.local.report.timeline import Moment

SHOWN_TIMES = 3

REPEATING = ("round", "loading", "error", "ended")
"""The moments that repeat: failing workers cause a new round, whose workers fail, too."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


class Repeats:
    """A filter of moments: it passes each one or leaves it out, and reports what it left out.

    Rounds and errors are equal if they differ only in numbers. Any other moment resets the
    filter: what comes after it is shown again.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}
        self._left_out = 0

    def lines(self, moment: Moment) -> list[str]:
        """Return the lines to print for the next moment."""
        if moment.what not in REPEATING:
            self._times.clear()
            return [*self._ending(moment.at_s), str(moment)]
        key = (moment.what, _NUMBER.sub("#", moment.detail))
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] <= SHOWN_TIMES:
            return [*self._ending(moment.at_s), str(moment)]
        self._left_out += 1
        return []

    def _ending(self, at_s: float) -> list[str]:
        """Return the line about what has been left out so far, if anything."""
        if not self._left_out:
            return []
        count, self._left_out = self._left_out, 0
        what = "1 more line like this" if count == 1 else f"{count} more lines like these"
        return [f"{at_s:7.1f} s  …          {what}"]
