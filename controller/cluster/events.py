# SPDX-License-Identifier: Apache-2.0
"""Events: sentences that ``kubectl describe`` shows at an object."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from controller.cluster import paths
from controller.cluster.api import ClusterApi
from rdzv.errors import ClusterError

log = logging.getLogger(__name__)

TOLD_KEPT = 1000
"""Of what was said last: a job whose pods are made anew all day is told once."""
MESSAGE_LENGTH = 1000
"""The API server takes 1024 characters."""


class Events:
    """Says each thing once of each object; a replica knows only what it said itself."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def warn(
        self, namespace: str, reference: Mapping[str, Any], reason: str, message: str
    ) -> None:
        """Write a warning at the object that an ownerReference names; without the right, log it."""
        key = (str(reference.get("uid")), message)
        if key in self._told:
            return
        self._told[key] = None
        while len(self._told) > TOLD_KEPT:
            self._told.popitem(last=False)
        names = ("apiVersion", "kind", "name", "uid")
        about = {name: reference[name] for name in names if name in reference}
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        event = {
            "metadata": {"name": f"{reference['name']}.{uuid4().hex[:16]}", "namespace": namespace},
            "involvedObject": {**about, "namespace": namespace},
            "type": "Warning",
            "reason": reason,
            "message": message[:MESSAGE_LENGTH],
            "source": {"component": "muster-controller"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(paths.core(namespace, "events"), event)
        except ClusterError as error:
            log.warning("no Event is written: %s", error, extra={"event": "event_not_written"})
