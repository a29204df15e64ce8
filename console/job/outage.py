# SPDX-License-Identifier: Apache-2.0
"""Why a store cannot be reached, in few words: grpc and OpenSSL use many."""

from __future__ import annotations

_CAUSES = (
    ("connection refused", "connection refused: nothing listens there"),
    ("name or service not known", "the name is not known"),
    ("dns resolution failed", "the name is not known"),
    ("domain name not found", "the name is not known"),
    ("no route to host", "no route to it"),
    ("network is unreachable", "the network is unreachable"),
    ("certificate", "the certificates do not fit"),
    ("ssl", "TLS fails: http:// and https:// may be mixed up"),
    ("deadline", "it does not answer"),
)
"""What an error of a connection has in it, in lower case; the first that fits counts."""


def cause(trouble: str) -> str:
    """Say what an error of a connection comes down to; an unknown one as it is."""
    lower = trouble.lower()
    causes = (sentence for sign, sentence in _CAUSES if sign in lower)
    return next(causes, trouble or "it does not answer")


def endpoint_is_local(endpoint: str) -> bool:
    """Whether an endpoint is on this machine, and without TLS: ``muster store`` can be it."""
    return endpoint.startswith(("127.", "localhost:", "[::1]:"))
