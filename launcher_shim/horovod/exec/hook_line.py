# SPDX-License-Identifier: Apache-2.0
"""The command line with which horovodrun calls the program in the place of ssh: pure."""

from __future__ import annotations

_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_WITH_VALUE = ("-o", "-p", "-i")


class UsageError(ValueError):
    """A command line that horovodrun would not write: one sentence why."""


def read_arguments(arguments: list[str]) -> tuple[str, str]:
    """Parse ``HOST COMMAND``, or Horovod's ssh line; raises ``UsageError``."""
    words = list(arguments)
    rest: list[str] = []
    while words:
        argument = words.pop(0)
        if argument in _WITH_VALUE and len(rest) < 2:
            del words[:1]
        elif argument.startswith("-") and not rest:
            raise UsageError("no option %s is known here" % argument)
        else:
            rest.append(argument)
    if len(rest) < 2:
        raise UsageError("say on which host, and what: kubexec.sh HOST COMMAND")
    host = rest[0]
    if not _NAME.issuperset(host) or host[:1] in ("", ".", "_", "-"):
        raise UsageError("%r is no host of the host list" % host)
    return host, " ".join(rest[1:])
