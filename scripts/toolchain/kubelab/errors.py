# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, each in one sentence for the person in front of it."""


class LabError(Exception):
    """Something went wrong while the lab was being made or used."""

    status = 1


class MachineUnfit(LabError):
    """This machine cannot carry the lab; the sentence says why and what would help."""

    status = 69
