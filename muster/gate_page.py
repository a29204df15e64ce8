# SPDX-License-Identifier: Apache-2.0
"""The gate's page as a rank reads it: a small file that is mapped once, and looked at in place.

The sidecar allocates it when it starts and overwrites it from then on, so that no change of the
gate needs space on the disk. It begins with the generation word, which grows by one with each
change. Two slots follow, used in turns: the word's last bit says in which one the content lies, as
its checksum over the word and the content, its length, which environment file it belongs to, and
the content. Until the word has changed
the slot of the content before is left alone, so a sidecar that dies amid a change leaves a whole
page.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import Optional

PAGE_NAME = "gate.page"

WORD = struct.Struct("<Q")
HEAD = struct.Struct("<IIq")
"""Of a slot: checksum, length, and when the environment file beside it was written, in ns."""
SLOT_BYTES = 8192
FIRST_SLOT = 64
PAGE_BYTES = FIRST_SLOT + 2 * SLOT_BYTES

READS = 5
"""Maximum number of reads of a page that the sidecar may just be changing."""


class MappedPage:
    """One page, mapped; raises ``OSError`` or ``ValueError`` if it cannot be."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.inode = os.fstat(descriptor).st_ino
            self._map = mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._map).cast("Q")
        """``words[0]`` is the generation word: one load of memory, the cheapest look there is."""

    @property
    def environment_ns(self) -> int:
        """The time (ns) of the environment file beside which the page was changed last."""
        ns: int = HEAD.unpack_from(self._map, FIRST_SLOT + (self.words[0] & 1) * SLOT_BYTES)[2]
        return ns

    def content(self, word: int) -> Optional[bytes]:
        """Return what was written with this word; None if that is not whole, or not there any more.

        The sidecar may be writing, or have died in it.
        """
        start = FIRST_SLOT + (word & 1) * SLOT_BYTES
        checksum, length, _ = HEAD.unpack_from(self._map, start)
        start += HEAD.size
        content = self._map[start : start + min(length, SLOT_BYTES - HEAD.size)]
        if zlib.crc32(content, zlib.crc32(WORD.pack(word))) != checksum:
            return None
        return content
