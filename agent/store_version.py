# SPDX-License-Identifier: Apache-2.0
"""Logs whether the version of the store's server is fit for a job, as ``muster doctor`` says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from rdzv.errors import StoreError
from rdzv.job import JobClient
from rdzv.reconcile import Loop, Outlook
from rdzv.sentences import Diary
from rdzv.store.etcd.answers import FLOOR, judge_version

log = logging.getLogger(__name__)

REPEAT_S = 3600.0
"""Interval of the check, in seconds: members of a cluster are replaced while a job runs, also by
older ones, and no event tells of it."""


class StoreVersion(Loop):
    """The check of the store member that this sidecar talks to, at start and every ``repeat_s``.

    An unfit version causes a warning and no more: the operator of the job may have no other.
    """

    def __init__(
        self, client: JobClient, clock: Callable[[], float], *, repeat_s: float = REPEAT_S
    ) -> None:
        super().__init__(clock)
        self._client = client
        self._repeat_s = repeat_s
        self._diary = Diary(log)

    async def step(self) -> Outlook:
        """Check once the store can be read, then every ``repeat_s``."""
        if not self._client.mirror.loaded:
            return Outlook(partial(self._client.mirror.changed_after, 0))
        try:
            status = await self._client.store.status()
        except StoreError as error:
            log.info("cannot read the version of the store: %s", error)
        else:
            self._log_change(status.endpoint, status.version)
        return Outlook(look_at_s=self.clock() + self._repeat_s)

    def _log_change(self, endpoint: str, version: str) -> None:
        level, why = judge_version(version)
        fault = level == "fault"
        sentence = f"the store at {endpoint}: {why}" + (f": use {FLOOR}, or later" if fault else "")
        extra = {"event": "store_version", "version": version}
        severity = logging.WARNING if fault else logging.INFO
        self._diary.say(sentence, level=severity, extra=extra, topic=why)
