# SPDX-License-Identifier: Apache-2.0
"""The connection from a rank to its sidecar for shards: ``$MUSTER_RUN_DIR/shards.sock``."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Dict, Optional

SOCKET_NAME = "shards.sock"

ANSWER_TIMEOUT_S = 15.0
"""Timeout of an answer. The sidecar replies within 5 s that it cannot answer now; after a longer
silence it is gone or frozen."""


class ShardLine:
    """One rank's connection, made again whenever it is lost: requests may be repeated."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, SOCKET_NAME)
        self._socket: Optional[socket.socket] = None
        self._rest = b""

    def ask(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Send a request and return the answer; raises ``OSError`` if the sidecar is not there."""
        try:
            return self._ask(json.dumps(request, separators=(",", ":")).encode("ascii") + b"\n")
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, OSError):
                raise
            raise OSError("the sidecar's answer is none: %s" % error) from error

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _ask(self, line: bytes) -> Dict[str, Any]:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(ANSWER_TIMEOUT_S)
            self._socket.connect(self._path)
        self._socket.sendall(line)
        while b"\n" not in self._rest:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ConnectionResetError("the sidecar has closed the connection")
            self._rest += more
        answer, _, self._rest = self._rest.partition(b"\n")
        fields = json.loads(answer.decode("utf-8"))
        if not isinstance(fields, dict):
            raise ValueError("%r" % (fields,))
        return fields
