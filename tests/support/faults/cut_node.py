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
    """``inside`` is the node's address, ``outside`` that of all others as the node sees them."""

    def __init__(self) -> None:
        self._name = f"muster{secrets.token_hex(4)}"  # of 15 characters at most, as a link
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
        self.outside, self.inside = f"{net}.1", f"{net}.2"

    @property
    def runner(self) -> tuple[str, ...]:
        """Python's arguments that run the command line on the node."""
        return ("-c", _ENTER, self._name)

    def cut(self) -> None:
        """Let nothing through, and tell neither side: addresses and connections stay."""
        _ip("link", "set", self._name, "down")

    def mend(self) -> None:
        """Let everything through again."""
        _ip("link", "set", self._name, "up")

    def _make(self) -> None:
        name, end = self._name, "eth0"
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", end, "netns", name)
        _ip("address", "add", f"{self.outside}/30", "dev", name)
        _ip("-n", name, "address", "add", f"{self.inside}/30", "dev", end)
        for words in (("-n", name, "link", "set", "lo"), ("-n", name, "link", "set", end)):
            _ip(*words, "up")
        self.mend()

    def _remove(self) -> None:
        # Its link goes with it, once no process is left there.
        _ip("netns", "delete", self._name)


@contextmanager
def cut_node() -> Iterator[CutNode]:
    """Make one, not cut as yet."""
    node = CutNode()
    try:
        node._make()
        yield node
    finally:
        node._remove()


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)
