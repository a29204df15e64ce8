# SPDX-License-Identifier: Apache-2.0
"""The lab's errors, each with one sentence for the user."""


class LabError(Exception):
    """A failure while the lab is created or used."""

    status = 1


class MachineUnfit(LabError):
    """A machine that cannot run the lab; the sentence says why and what would help."""

    status = 69
