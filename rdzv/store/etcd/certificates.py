# SPDX-License-Identifier: Apache-2.0
"""A client's certificate files, reloaded when they change.

There is no notification of a rotated file, so the files are polled: before each connection, and
while one is open. A store that refuses the former certificate must get the new one at once.
"""

from __future__ import annotations

import asyncio
import logging
import os

from rdzv.diary import Diary
from rdzv.errors import ConfigError
from rdzv.store.access import Access, Certificates, read_certificates

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Poll interval while the connection is open, in seconds."""

URGENT_LOOK_S = 0.5
"""Poll interval while there is none, in seconds."""

Stamp = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """The content of the files; ``version`` grows with each change, from 0 before any read."""

    def __init__(self, access: Access) -> None:
        self.version = 0
        self.certificates: Certificates | None = None
        self._access = access
        self._stamp: Stamp = ()
        self._looked_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._diary = Diary(log)

    async def look(self, *, urgent: bool, timeout_s: float) -> None:
        """Reload the files if they have changed; do nothing if they were checked just now.

        If the files are unusable, or not read within half of ``timeout_s``, the former ones stay in
        force. If there are none, raises ``ConfigError``, or ``TimeoutError`` after ``timeout_s``. A
        read that outlives its caller goes on, for the next one.
        """
        loop = asyncio.get_running_loop()
        pause_s = URGENT_LOOK_S if urgent else LOOK_S
        if self.version and (self._reading or loop.time() < self._looked_s + pause_s):
            return
        if self._reading is None:
            self._reading = asyncio.create_task(self._look(), name="read the certificate files")
            self._reading.add_done_callback(self._read_to_the_end)
        reading = self._reading
        left_s = timeout_s / 2 if self.version else timeout_s
        done, _ = await asyncio.wait({reading}, timeout=left_s)
        if done:
            reading.result()
        elif self.version:
            self._log_change(
                f"the certificate files cannot be read within {left_s:.1f} s; until then the"
                " previous certificates stay in use"
            )
        else:
            raise TimeoutError

    def _read_to_the_end(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        self._looked_s = asyncio.get_running_loop().time()
        if not reading.cancelled():
            # Retrieve the exception: asyncio would complain about one that no caller waits for.
            reading.exception()

    async def _look(self) -> None:
        try:
            stamp, certificates = await asyncio.to_thread(self._read)
        except ConfigError as error:
            if not self.version:
                raise
            self._log_change(f"{error}; until then the previous certificates stay in use")
            return
        self._diary.forget()
        self._stamp = stamp
        if certificates is not None and certificates != self.certificates:
            if self.version:
                log.info(
                    "the certificate files have changed: connecting to the store anew",
                    extra={"event": "certificates_changed"},
                )
            self.certificates = certificates
            self.version += 1

    def _read(self) -> tuple[Stamp, Certificates | None]:
        """Read the files, or none of them if they are those of the last read."""
        stamp = _stamp_of(self._access)
        if stamp == self._stamp:
            return stamp, None
        return stamp, read_certificates(self._access)

    def _log_change(self, sentence: str) -> None:
        extra = {"event": "certificates_unusable"}
        self._diary.say(sentence, level=logging.WARNING, extra=extra)


def _stamp_of(access: Access) -> Stamp:
    """Return a value that changes when a file is written or replaced, also behind a link."""
    stamps = []
    for path in filter(None, (access.cacert, access.cert, access.key)):
        try:
            status = os.stat(path)
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(stamps)
