# SPDX-License-Identifier: Apache-2.0
"""torch's own keys of a rendezvous."""

from __future__ import annotations

import json

from launcher_shim.tcpstore.round_keys import ROUND_KEY
from rdzv.errors import WireError

WORKERS_MAX = 1024
"""The most workers of one pod, as of its sidecar's slots; a larger number is no number of these."""

STATE_KEY_PREFIX = b"/torch.rendezvous."
"""The start of the key of a rendezvous state, which torch first sets to its sentinel."""


def state_key(run_id: str) -> bytes:
    """Return the key of the rendezvous state of ``run_id``."""
    return STATE_KEY_PREFIX + run_id.encode()


def run_id_of(key: bytes, prefix: bytes = STATE_KEY_PREFIX) -> str:
    """Read the run id behind ``prefix``; raises ``WireError`` if it cannot be a name."""
    try:
        run_id = key.removeprefix(prefix).decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the run id in {key[:64]!r} is not UTF-8: give another one") from error
    if not run_id:
        raise WireError("the run id is empty: give --rdzv-id a name")
    return run_id


def round_prefix(run_id: str, number: int) -> bytes:
    """Return the prefix of the keys of one round."""
    return f"/torch.rendezvous.{run_id}.{number}/".encode()


def round_key(key: bytes, run_id: str) -> tuple[int, bytes] | None:
    """Split a key that torch made for one round of ``run_id`` into round and name; else None."""
    match = ROUND_KEY.fullmatch(key)
    if match is None or match["run"] != run_id.encode():
        return None
    return int(match["round"]), match["name"]


def role_info_key(run_id: str, number: int, group_rank: int) -> bytes:
    """Return the key of the number of workers that a node of a round starts."""
    return round_prefix(run_id, number) + f"torchelastic/role_info/{group_rank}".encode()


def local_world_size(role_info: bytes | None) -> int:
    """Read how many workers a node starts; 0 if it does not tell."""
    try:
        size = json.loads(role_info or b"{}")["local_world_size"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0
    return size if type(size) is int and 0 < size <= WORKERS_MAX else 0


def round_of_exit_barrier(key: bytes) -> int | None:
    """Return the round at whose end agents ADD to ``key``; None for any other key."""
    match = ROUND_KEY.fullmatch(key) if is_exit_barrier(key) else None
    return None if match is None else int(match["round"])


def is_exit_barrier(key: bytes) -> bool:
    """Return whether an ADD on ``key`` reports that an agent's workers are done."""
    return b"/torchelastic/agent/terminal_state/" in key
