# SPDX-License-Identifier: Apache-2.0
"""A node behind a link of its own, which a test can cut: a network namespace; needs root."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_ENTER = """\
import os, sys
console = (sys.executable, "-m", "console.main", *sys.argv[2:])
os.execvp("ip", ("ip", "netns", "exec", sys.argv[1], *console))
"""


class CutNode:
    """``inside`` is the node's address, ``outside`` that of all others as the node sees them.

    Its link has addresses of IPv6 alone if ``six``, else of IPv4 as well.
    """

    def __init__(self, *, six: bool = False) -> None:
        self._name = f"muster{secrets.token_hex(4)}"  # of 15 characters at most, as a link
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}."
        if six:
            net = f"fd{secrets.token_hex(1)}:{secrets.token_hex(2)}::"
        self.outside, self.inside = f"{net}1", f"{net}2"
        self._length = ("/64", "nodad") if six else ("/30",)

    @property
    def runner(self) -> tuple[str, ...]:
        """Python's arguments that run the command line on the node."""
        return ("-c", _ENTER, self._name)

    def command(self, *words: str) -> tuple[str, ...]:
        """Return the command line that runs ``words`` on the node."""
        return ("ip", "netns", "exec", self._name, *words)

    def cut(self) -> None:
        """Let nothing through, and tell neither side: addresses and connections stay."""
        _ip("link", "set", self._name, "down")

    def unplug(self) -> None:
        """Do the same at the node's end: the others still send to it as before."""
        _ip("-n", self._name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Let everything through again."""
        _ip("link", "set", self._name, "up")

    def _make(self) -> None:
        name, end = self._name, "eth0"
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", end, "netns", name)
        length, *flags = self._length
        _ip("address", "add", f"{self.outside}{length}", "dev", name, *flags)
        _ip("-n", name, "address", "add", f"{self.inside}{length}", "dev", end, *flags)
        for words in (("-n", name, "link", "set", "lo"), ("-n", name, "link", "set", end)):
            _ip(*words, "up")
        self.mend()

    def _remove(self) -> None:
        # Its link goes with it, once no process is left there.
        _ip("netns", "delete", self._name)


@contextmanager
def cut_node(*, six: bool = False) -> Iterator[CutNode]:
    """Make one, not cut as yet."""
    node = CutNode(six=six)
    try:
        node._make()
        yield node
    finally:
        node._remove()


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)
