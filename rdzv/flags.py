# SPDX-License-Identifier: Apache-2.0
"""The name of a setting in a sentence for its user: the flag, and the variable that means it."""

from __future__ import annotations

PREFIX = "MUSTER_"


def variable_of(flag: str) -> str:
    """Return the variable that means the same as ``flag``, or as its ``--no-`` form."""
    name = flag.removeprefix("--").removeprefix("no-")
    return PREFIX + name.replace("-", "_").upper()


def named(flag: str) -> str:
    """Return the flag with its variable behind it, in brackets."""
    return f"{flag} ({variable_of(flag)})"
