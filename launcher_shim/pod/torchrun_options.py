# SPDX-License-Identifier: Apache-2.0
"""torchrun's options, of all versions of torch that are supported: one table."""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option. A switch takes no value; ``short`` is its one-letter form, if it has one.

    ``rendezvous``: it decides where, and with which others, a node trains. On a command line it
    wins over the variables that the sidecar delivers.
    """

    name: str
    switch: bool = False
    short: str = ""
    rendezvous: bool = False

    @property
    def variable(self) -> str:
        """The environment variable from which torchrun takes its default."""
        return "PET_" + self.name.upper().replace("-", "_")


OPTIONS = (
    Option("nnodes"),
    Option("nproc-per-node"),
    Option("rdzv-endpoint", rendezvous=True),
    Option("rdzv-backend", rendezvous=True),
    Option("rdzv-id", rendezvous=True),
    Option("rdzv-conf", rendezvous=True),
    Option("node-rank", rendezvous=True),
    Option("master-addr", rendezvous=True),
    Option("master-port", rendezvous=True),
    Option("local-addr", rendezvous=True),
    Option("standalone", switch=True, rendezvous=True),
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
