# SPDX-License-Identifier: Apache-2.0
"""torchrun's options, of all versions of torch that are supported: one table."""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option. A switch takes no value; ``short`` is its one-letter form, if it has one."""

    name: str
    switch: bool = False
    short: str = ""

    @property
    def variable(self) -> str:
        """The environment variable from which torchrun takes its default."""
        return "PET_" + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("nnodes"),
    Option("nproc-per-node"),
    Option("rdzv-endpoint"),
    Option("rdzv-backend"),
    Option("rdzv-id"),
    Option("rdzv-conf"),
    Option("node-rank"),
    Option("master-addr"),
    Option("master-port"),
    Option("local-addr"),
    Option("standalone", switch=True),
    Option("max-restarts"),
    Option("monitor-interval"),
    Option("start-method"),
    Option("role"),
    Option("log-dir"),
    Option("redirects", short="r"),
    Option("tee", short="t"),
    Option("log-line-prefix-template"),
    Option("local-ranks-filter"),
    Option("duplicate-stdout-filters"),
    Option("duplicate-stderr-filters"),
    Option("logs-specs"),
    Option("numa-binding"),
    Option("signals-to-handle"),
    Option("event-log-handler"),
    Option("shutdown-timeout"),
    Option("print-completion"),
    Option("module", switch=True, short="m"),
    Option("no-python", switch=True),
    Option("run-path", switch=True),
    Option("virtual-local-rank", switch=True),
    Option("help", switch=True, short="h"),
)

VARIABLES = {option.name: option.variable for option in OPTIONS}
