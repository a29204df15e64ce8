# SPDX-License-Identifier: Apache-2.0
"""The sidecar as a whole: its running parts, with health, metrics and the loop's lag."""

from __future__ import annotations

import asyncio
import logging

from agent.config.sidecar import Config
from agent.rundir.files import RunDir, State
from agent.running import RunningParts, start_vital
from agent.surroundings import MemberSettings, Sockets, Surroundings
from agent.telemetry.gauges import add_drain_gauges, add_gauges, add_launcher_gauges
from agent.telemetry.http import serving
from agent.telemetry.loop_lag import LoopLag
from agent.telemetry.metrics import Metrics
from agent.tunnel.identity import TunnelIdentity

log = logging.getLogger(__name__)


class Sidecar:
    """One member, with its health and metrics."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        state: State,
        around: Surroundings,
        metrics: Metrics,
        tunnel: TunnelIdentity | None = None,
    ) -> None:
        self._config = config
        self._fresh = state.held is None
        self._parts = parts = RunningParts(
            around,
            MemberSettings.of(config, state.pod_uid, around.version, tunnel.pin if tunnel else ""),
            run_dir,
            Sockets.of(config, run_dir, tunnel),
            state.held,
        )
        self._loop_lag = LoopLag(around.clock)
        self._metrics = metrics
        add_gauges(metrics, parts.member, parts.launcher, self._loop_lag, around.clock)
        add_drain_gauges(metrics, parts.launcher.drains, around.boot_clock)
        add_launcher_gauges(metrics, parts.launcher.lookout)

    async def run(self, stop: asyncio.Event) -> None:
        """Run the member until ``stop`` is set, then leave.

        Raises an ``ExceptionGroup`` of the errors that ended a task, or ``ConfigError`` if a port
        is taken.
        """
        config = self._config
        async with (
            serving(config, self._loop_lag, self._parts.not_ready, self._metrics),
            asyncio.TaskGroup() as group,
        ):
            log.info(
                "the sidecar of %s starts %s",
                config.member,
                "as a fresh pod" if self._fresh else "again",
                extra={"event": "start", "fresh": self._fresh, "http_port": config.http_port},
            )
            measuring = start_vital(group, "loop-lag", self._loop_lag.run())
            await self._parts.run(stop)
            measuring.cancel()
