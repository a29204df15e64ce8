# SPDX-License-Identifier: Apache-2.0
"""The credentials of one client: certificate files that are reloaded, a token that is renewed.

There is no notification of a rotated file, so the files are polled: before each connection, and
while one is open. A token is valid at every member. The store spends a tenth of a second of its
processor on a password, and goes on doing so when no client waits any more. So there is one request
at a time, it has more time than a call, and one that was not answered or was refused is not retried
at once: many clients that did so would keep the store busy with passwords.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from random import Random

from rdzv.errors import ConfigError
from rdzv.pacing import Doubling
from rdzv.sentences import Diary
from rdzv.store.access import Access, Certificates, read_certificates, read_password

log = logging.getLogger(__name__)

LOOK_S = 3.0
"""Poll interval while the connection is open, in seconds."""

URGENT_LOOK_S = 0.5
"""Poll interval while there is none, in seconds."""

Stamp = tuple[tuple[int, int, int], ...]

LOGIN = Doubling(3.0, 12.0)
"""Timeout of a password at one endpoint, in seconds, which takes longer than any other call; it
doubles with each one unanswered."""

UNANSWERED_PAUSE = Doubling(1.0, 30.0)
"""Backoff after a request that got no answer, in seconds."""

REFUSED_PAUSE = Doubling(5.0, 60.0)
"""Backoff after a refused password, in seconds; a changed one is tried at once."""


class CertificateFiles:
    """The content of the files; ``version`` grows with each change, from 0 before any read.

    A store that refuses the former certificate must get the new one at once.
    """

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


Authenticate = Callable[[str, str, float], Awaitable[str]]


class LoginRefusedError(Exception):
    """The store does not let the user in, or the password cannot be read."""


class LoginUnansweredError(Exception):
    """The password was sent but not answered; the store may still be processing it."""


class Login:
    """The token of ``access.user``.

    ``authenticate`` takes name, password and timeout in seconds, and returns a token, or "" from a
    store that needs none; it raises ``LoginRefusedError``, ``LoginUnansweredError``, or any error
    that says that the password was not sent.

    So there is one request at a time, it has more time than a call, and one that was not
    answered or was refused is not retried at once: many clients that did so would keep the
    store busy with passwords whose answers nobody waits for.
    """

    def __init__(self, access: Access, authenticate: Authenticate, random: Random) -> None:
        self._access = access
        self._authenticate = authenticate
        self._random = random
        self._token: str | None = None
        self._asking: asyncio.Task[str] | None = None
        self._closed = False
        self._unanswered = 0
        self._unanswered_why = ""
        self._unanswered_until_s = float("-inf")
        self._refusals = 0
        self._refused_why = ""
        self._refused_password = ""
        self._refused_until_s = float("-inf")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a call has to carry."""
        return (("token", self._token),) if self._token else ()

    async def ensure(self, timeout_s: float) -> None:
        """Make sure that there is a token; raise what ``authenticate`` raises, or ``TimeoutError``.

        A request that outlives its caller goes on, for the next one.
        """
        if self._token is not None:
            return
        if self._closed:
            raise LoginRefusedError("this client is closed")
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="log in to the store")
            self._asking.add_done_callback(self._asked)
        asking = self._asking
        done, _ = await asyncio.wait({asking}, timeout=timeout_s)
        if not done:
            raise TimeoutError(self._unanswered_why)
        if asking.cancelled():
            raise LoginRefusedError("this client is closed")
        asking.result()

    def reject(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Drop the token that a call carried, as the store refused it."""
        if metadata == self.metadata:
            self._token = None

    async def close(self) -> None:
        """Cancel the request under way, and make no more."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    def _asked(self, asking: asyncio.Task[str]) -> None:
        self._asking = None
        if not asking.cancelled() and asking.exception() is None:
            self._token = asking.result()

    async def _ask(self) -> str:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._unanswered_until_s - loop.time())
        try:
            password = await asyncio.to_thread(read_password, self._access)
        except ConfigError as error:
            raise LoginRefusedError(str(error)) from None
        if password != self._refused_password:
            self._refusals = 0
        elif loop.time() < self._refused_until_s:
            raise LoginRefusedError(self._refused_why)
        try:
            timeout_s = LOGIN.after(self._unanswered)
            token = await self._authenticate(self._access.user, password, timeout_s)
        except LoginUnansweredError as error:
            pause_s = UNANSWERED_PAUSE.drawn_after(self._unanswered, self._random)
            self._unanswered_until_s = loop.time() + pause_s
            self._unanswered += 1
            self._unanswered_why = str(error)
            raise
        except LoginRefusedError as error:
            pause_s = REFUSED_PAUSE.drawn_after(self._refusals, self._random)
            self._refused_until_s = loop.time() + pause_s
            self._refusals += 1
            self._refused_why, self._refused_password = str(error), password
            self._answered()
            raise
        self._refused_password = ""
        self._answered()
        return token

    def _answered(self) -> None:
        self._unanswered = 0
        self._unanswered_why = ""
