# SPDX-License-Identifier: Apache-2.0
"""Short causes of an unreachable store: those of HTTP/2 and OpenSSL are long."""

from __future__ import annotations

NO_ETCD = "what answers there is no etcd, but a web server or a proxy"

_CAUSES = (
    ("connection refused", "connection refused: nothing listens there"),
    ("name or service not known", "the name is not known"),
    ("dns resolution failed", "the name is not known"),
    ("domain name not found", "the name is not known"),
    ("lookup error", "the name is not known, or no name server answers"),
    ("http2 header", NO_ETCD),
    ("http/2", NO_ETCD),
    ("unimplemented", NO_ETCD),
    ("no connection within", "no connection comes about: check the address and the firewall"),
    ("no route to host", "no route to it"),
    ("network is unreachable", "the network is unreachable"),
    ("certificate", "the certificates do not fit"),
    ("handshake", "TLS fails: http:// and https:// may be mixed up"),
    ("ssl", "TLS fails: http:// and https:// may be mixed up"),
    ("deadline", "it does not answer"),
)
"""Signs in a connection error, in lower case, with their causes; the first match counts."""


def cause(trouble: str) -> str:
    """Return the short cause of a connection error; an unknown error is returned as it is."""
    lower = trouble.lower()
    causes = (sentence for sign, sentence in _CAUSES if sign in lower)
    return next(causes, trouble or "it does not answer")


def endpoint_is_local(endpoint: str) -> bool:
    """Return whether an endpoint is local and without TLS: ``muster store`` could serve it."""
    return endpoint.startswith(("127.", "localhost:", "[::1]:"))
