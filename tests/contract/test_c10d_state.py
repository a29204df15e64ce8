# SPDX-License-Identifier: Apache-2.0
"""torch reads what the codec writes, and the codec reads what torch writes."""

from __future__ import annotations

import pickle
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from launcher_shim.c10d.state_codec import (
    SENTINEL,
    Flavour,
    NodeDesc,
    TorchState,
    decode,
    encode,
)
from tests.support.sidecars.torch_states import STATES


def as_torch_has_it(state: TorchState, aware: bool) -> torchs._RendezvousState:
    def node(desc: NodeDesc) -> torchs._NodeDesc:
        return torchs._NodeDesc(*desc)

    def time(utc: datetime) -> datetime:
        return utc if aware else utc.replace(tzinfo=None)

    made = torchs._RendezvousState()
    made.round, made.complete, made.closed = state.round, state.complete, state.closed
    made.deadline = None if state.deadline is None else time(state.deadline)
    made.participants = {node(desc): rank for desc, rank in state.participants.items()}
    made.wait_list = {node(desc) for desc in state.wait_list}
    made.redundancy_list = {node(desc) for desc in state.redundancy_list}
    made.last_heartbeats = {node(desc): time(at) for desc, at in state.last_heartbeats.items()}
    return made


@given(STATES, st.booleans())
def test_torch_reads_what_we_write(state: TorchState, aware: bool) -> None:
    read = pickle.loads(b64decode(encode(state, Flavour(aware))))
    assert type(read) is torchs._RendezvousState
    assert read.__dict__ == as_torch_has_it(state, aware).__dict__
    assert list(read.__dict__) == list(torchs._RendezvousState().__dict__)
    assert list(read.participants) == list(as_torch_has_it(state, aware).participants)
    assert all(type(desc) is torchs._NodeDesc for desc in read.participants)


@given(STATES, st.booleans(), st.sampled_from([4, 5]))
def test_we_read_what_torch_writes(state: TorchState, aware: bool, protocol: int) -> None:
    written = b64encode(pickle.dumps(as_torch_has_it(state, aware), protocol))
    has_time = state.deadline is not None or bool(state.last_heartbeats)
    assert decode(written) == (state, Flavour(aware if has_time else None))


def test_thousands_of_nodes_pass_both_ways() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    everyone = [NodeDesc(f"worker-{i}.job.training.svc", 7 + i, i % 3) for i in range(3000)]
    state = TorchState(
        participants={desc: rank for rank, desc in enumerate(everyone)},
        last_heartbeats={desc: start + timedelta(seconds=i) for i, desc in enumerate(everyone)},
    )
    flavour = Flavour(aware=True)
    theirs = as_torch_has_it(state, aware=True)
    assert decode(b64encode(pickle.dumps(theirs))) == (state, flavour)
    assert decode(encode(state, flavour)) == (state, flavour)
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == theirs.__dict__


def test_attributes_of_a_later_torch_are_carried() -> None:
    later = torchs._RendezvousState()
    node = torchs._NodeDesc("a", 1, 0)
    later.epoch, later.spares, later.note = 3, [node], {"why": None}
    state, flavour = decode(b64encode(pickle.dumps(later)))
    assert flavour.extra == {"epoch": 3, "spares": [NodeDesc("a", 1, 0)], "note": {"why": None}}
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == later.__dict__


def test_a_torch_before_2_3_has_no_redundancy_list() -> None:
    older = torchs._RendezvousState()
    del older.redundancy_list
    state, flavour = decode(b64encode(pickle.dumps(older)))
    assert (state, flavour.redundancy) == (TorchState(), False)
    assert pickle.loads(b64decode(encode(state, flavour))).__dict__ == older.__dict__


def test_the_sentinel_is_torchs() -> None:
    assert C10dRendezvousBackend._NULL_SENTINEL.encode() == SENTINEL


@pytest.mark.parametrize("nodes_count", [2, 64, 256])
def test_a_state_of_ours_is_no_larger_than_torchs(nodes_count: int) -> None:
    far = datetime(2100, 1, 1, tzinfo=UTC)
    everyone = [NodeDesc(f"worker-{i}", 1000 + i, 0) for i in range(nodes_count)]
    state = TorchState(
        participants={desc: rank for rank, desc in enumerate(everyone)},
        last_heartbeats=dict.fromkeys(everyone, far),
    )
    theirs = b64encode(pickle.dumps(as_torch_has_it(state, aware=True)))
    # Some names that torch would need only once there is a first time are always written.
    assert len(encode(state, Flavour(aware=True))) <= len(theirs) + 64
