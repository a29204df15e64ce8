# SPDX-License-Identifier: Apache-2.0
"""torchrun's command line: read here, and only here, as torchrun reads it.

``-`` and ``_`` are the same in names, and a unique prefix stands for the whole name. A torch that
is newer than the table of options may know others. Such an option without ``=`` is a switch, or it
takes the next word, which might also be the script: the line is not read from there on.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from launcher_shim.pod.torchrun_options import OPTIONS, Option

_LONG = {option.name: option for option in OPTIONS}
_SHORT = {option.short: option for option in OPTIONS if option.short}
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""torchrun takes it for a value, or for the script."""


class Given(NamedTuple):
    """One option of a line: its full name, its value, and its words as they were.

    The value of a switch is "1"; without one it is empty. The name of an unknown option begins with
    its dashes.
    """

    name: str
    value: str
    words: Tuple[str, ...]


class TorchrunLine(NamedTuple):
    """A line: the options before the script, and the words from there on."""

    options: Tuple[Given, ...]
    rest: Tuple[str, ...]
    whole: bool = True
    """Whether all options were read."""

    @property
    def script(self) -> Optional[Tuple[str, ...]]:
        """The script with its own arguments; None if an unknown option hides it."""
        if not self.whole:
            return None
        return self.rest[1:] if self.rest[:1] == ("--",) else self.rest

    def values(self) -> Dict[str, str]:
        """Return the value of each option by its name: the last one counts."""
        return {given.name: given.value for given in self.options}

    def words(self) -> List[str]:
        """Return the words of the line."""
        return [word for given in self.options for word in given.words] + [*self.rest]


def read_line(words: Sequence[str]) -> TorchrunLine:
    """Read torchrun's arguments."""
    options: List[Given] = []
    rest = list(words)
    while rest and _is_option(rest[0]):
        given = _first(rest)
        if given is None:
            return TorchrunLine(tuple(options), tuple(rest), whole=False)
        options.append(given)
        del rest[: len(given.words)]
    return TorchrunLine(tuple(options), tuple(rest))


def bounds(nnodes: str) -> Optional[Tuple[int, int]]:
    """Parse ``MIN:MAX`` or ``N`` as torchrun does; return None for what it would refuse."""
    least, colon, most = nnodes.partition(":")
    if not (least.isdecimal() and (most if colon else least).isdecimal()):
        return None
    return int(least), int(most or least)


def _is_option(word: str) -> bool:
    if not word.startswith("-") or word in ("-", "--") or _NUMBER.fullmatch(word):
        return False
    return " " not in word or _named(word)[0] is not None


def _first(words: Sequence[str]) -> Optional[Given]:
    """Read the option that ``words`` begin with; None if its end is unknown."""
    option, value = _named(words[0])
    plain = len(words) > 1 and not _is_option(words[1]) and words[1] != "--"
    if option is None:
        name, _, text = words[0].partition("=")
        return None if plain and value is None else Given(name, text, (words[0],))
    if option.switch:
        return Given(option.name, "1", (words[0],))
    if value is None and plain:
        return Given(option.name, words[1], (words[0], words[1]))
    return Given(option.name, value or "", (words[0],))


def _named(word: str) -> "Tuple[Optional[Option], Optional[str]]":
    """Return the option that a word names, and the value in the same word; None for what is not."""
    if not word.startswith("--"):
        option = _SHORT.get(word[1:2])
        text: Optional[str] = word[2:].partition("=")[2] if word[2:3] == "=" else word[2:] or None
        if option is not None and (text is None or not option.switch):
            return option, text
        return None, text if "=" in word else None
    name, equals, value = word[2:].partition("=")
    name = name.replace("_", "-")
    found = [_LONG[name]] if name in _LONG else []
    found = found or [option for option in OPTIONS if option.name.startswith(name)]
    return found[0] if len(found) == 1 else None, value if equals else None
