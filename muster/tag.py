# SPDX-License-Identifier: Apache-2.0
"""The save tag: a short name of the world that saves, for the path that it saves to.

A world that the network cuts off from the store trains on, and pods that have the store may form
another one meanwhile. Both use the same checkpoint directory. With the tag in the path they never
write the same file, and ``last_commit().tag`` names the one that is on record.

A tag is ``life00001-round000012-8f3a1c2d9b``: the life of the job, the round in it, and a digest of
the run and of the address at which the ranks of the round meet. The store freezes each round once,
and numbers rounds in order, so tags of one run sort as its worlds formed. Two worlds that train at
the same time cannot meet at one address: their tags differ even if the store was restored.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Mapping

from muster.gate import own_gate
from muster.progress import RankIdentity, own_file

ROUNDS_PER_LIFE = 1_000_000
"""Each life of the job numbers its rounds from a multiple of this."""

TAG = re.compile(r"life\d{5,9}-round\d{6}-[0-9a-f]{10}")
"""The form of every tag: at most 40 characters, all of them safe in file names."""

FIRST = "life00001"
"""No tag of a round that a sidecar has confirmed sorts before this."""

ALONE = "life00000-round000000-0000000000"
"""The tag of a script without a sidecar; it sorts before all others."""


def save_tag() -> str:
    """Return the tag of the present world, to be part of each path that this world saves to.

    It is the same on every rank of the world. It stays the same as long as the process lives, but
    for one change if the sidecar confirms the round later than a rank waits for it: so call it for
    each save. Once called, this rank's saves are on record with it: ``last_commit().tag``. Call it
    in the rank's own process. A rank of torchrun waits for its sidecar as ``drain()`` does. Without
    a sidecar it is always the same text.
    """
    file, gate = own_file(), own_gate()
    if file is None or gate is None:
        return ALONE
    if file.tag < FIRST:
        # Unless the sidecar confirms the round later, ranks of one world may have different tags
        # and save parts that do not belong together: such a save counts for no rank.
        reading = gate.read() if gate.wait_for_own(file.rank) else None
        if reading is None or not file.rank.of_torchrun:
            file.take_tag(unconfirmed_tag(file.rank, os.environ))
        else:
            file.take_tag(world_tag(reading.run, reading.round, file.rank.master))
    return file.tag


def world_tag(run: str, number: int, master: str) -> str:
    """Return the tag of round ``number`` of ``run``, whose ranks meet at ``master``."""
    life, round = divmod(number, ROUNDS_PER_LIFE)
    return _tag(life + 1, round, run, master)


def life_of(tag: str) -> str:
    """Return the part of a tag that is the same in all worlds of one life of the job."""
    return tag.partition("-")[0]


def unconfirmed_tag(rank: RankIdentity, environ: Mapping[str, str]) -> str:
    """Return a tag for a world of an unknown round, such as Horovod's: all ranks share a driver."""
    if rank.of_torchrun:
        return _tag(0, 0, environ.get("TORCHELASTIC_RUN_ID", ""), rank.master)
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return _tag(0, 0, "", "%s:%s" % (address, port)) if port else ALONE


def _tag(life: int, round: int, run: str, master: str) -> str:
    digest = hashlib.sha256(("%s\n%s" % (run, master)).encode("utf-8", "surrogateescape"))
    return "life%05d-round%06d-%s" % (life, round, digest.hexdigest()[:10])
