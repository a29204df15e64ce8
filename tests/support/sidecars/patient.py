# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.support.sidecars.patient ARGUMENT…``: ``muster`` with generous limits.

That a process stands still for a minute is no failure of a command, and no test is to take it for
one. A test of a store that is away takes the plain command line: this one would wait as long.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from console.main import main as command_line

NEVER_S = 3600.0

CALL_S = 80.0
"""Ends what hangs, before the test gives the command up."""

_READING = {"console.job.reading.REACH_TIMEOUT_S": CALL_S}
_WRITING = {**_READING, "console.job.changing.WRITE_TIMEOUT_S": CALL_S}

_IN_0_1_0 = {"console.job.changing": "console.job.drain"}
"""Where an older version, which this runs as well, has the limits of a module."""

_SAME = {"why": "doctor"}
"""Two names of one command. Older versions, which this runs as well, have no table of them."""

LIMITS: Mapping[str, dict[str, float]] = {
    "agent": {
        "agent.telemetry.http.UNHEALTHY_LAG_S": NEVER_S,
        "agent.telemetry.http.REQUEST_TIMEOUT_S": NEVER_S,
        "agent.running.LEAVE_TIMEOUT_S": 2 * CALL_S,
        "rdzv.members.lease.READ_TIMEOUT_S": CALL_S,
    },
    "doctor": {
        "console.doctor.diagnosis.READ_WARNING_S": NEVER_S,
        "console.doctor.diagnosis.READ_FAULT_S": NEVER_S,
        "console.doctor.diagnosis.WRITE_WARNING_S": NEVER_S,
        "console.doctor.diagnosis.WRITE_FAULT_S": NEVER_S,
        "console.doctor.command.READ_FAULT_S": NEVER_S,
        "console.doctor.command.READS_TIMEOUT_S": CALL_S,
        "console.doctor.command.CALL_TIMEOUT_S": CALL_S,
        "console.doctor.command.PROBE_LEASE_S": 600,
    },
    "status": {**_READING, "console.job.status.AUTH_TIMEOUT_S": 60.0},
    "notice": {"console.notice.ANSWER_TIMEOUT_S": CALL_S},
    **dict.fromkeys(("hosts", "history"), _READING),
    **dict.fromkeys(("drain", "set", "pause", "resume", "admit", "forget"), _WRITING),
}
"""What each command goes by, by module and name; a test may change it before ``main``."""


def main() -> None:
    """Run the command line."""
    command = sys.argv[1] if sys.argv[1:] else ""
    command = _SAME.get(command, command)
    for path, limit in LIMITS.get(command, {}).items():
        _put(path, limit)
    if command == "doctor":
        # It tries a job's rights by calls that have the store client's own limits.
        patient_store = import_module("tests.support.store.patient_store")
        _put("console.doctor.command.open_store", patient_store.PatientEtcdStore)
    command_line()


def _put(path: str, value: object) -> None:
    module, _, name = path.rpartition(".")
    there = find_spec(module) is not None
    holder = import_module(module if there else _IN_0_1_0[module])
    assert hasattr(holder, name), path
    setattr(holder, name, value)


if __name__ == "__main__":
    main()
