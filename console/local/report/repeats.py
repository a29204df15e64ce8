# SPDX-License-Identifier: Apache-2.0
"""Leaves out what repeats while a job fails again and again in the same way. Pure."""

from __future__ import annotations

import re

from console.local.report.timeline import Moment

SHOWN_TIMES = 3

REPEATING = ("round", "error")
"""Workers that fail bring a round, whose workers fail."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


class Repeats:
    """Decides for each moment what is printed: itself, nothing, or what was left out before it.

    Rounds and errors are equal if they differ in numbers alone. Anything else that happens begins
    anew: what comes after it is shown again.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], int] = {}
        self._left_out = 0

    def lines(self, moment: Moment) -> list[str]:
        """Give the lines to print for the next moment."""
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
        """Give the line about what was left out until now."""
        if not self._left_out:
            return []
        count, self._left_out = self._left_out, 0
        what = "1 more line like this" if count == 1 else f"{count} more lines like these"
        return [f"{at_s:7.1f} s  …          {what}"]
