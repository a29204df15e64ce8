# SPDX-License-Identifier: Apache-2.0
"""Any state of a rendezvous that torch may keep, for properties of the codec."""

from __future__ import annotations

from datetime import UTC

from hypothesis import strategies as st

from launcher_shim.c10d.state_codec import NodeDesc, TorchState

NODES = st.builds(
    NodeDesc,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
)
TIMES = st.datetimes(timezones=st.just(UTC))
STATES = st.builds(
    TorchState,
    round=st.integers(0, 2**40),
    complete=st.booleans(),
    deadline=st.none() | TIMES,
    closed=st.booleans(),
    participants=st.dictionaries(NODES, st.integers(0, 5000), max_size=5),
    wait_list=st.frozensets(NODES, max_size=3),
    redundancy_list=st.frozensets(NODES, max_size=3),
    last_heartbeats=st.dictionaries(NODES, TIMES, max_size=5),
)
