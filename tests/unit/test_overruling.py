# SPDX-License-Identifier: Apache-2.0
"""What torchrun is told where a container has variables of its own."""

from __future__ import annotations

import pytest

from launcher_shim.pod.torchrun_options import override

CONF = "is_host=0,read_timeout=300"


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (None, "10"),
        ("", "10"),
        (" ", "10"),
        ("100", "100"),
        ("3", "3"),
        ("0", "0"),
        ("many", "many"),  # torchrun refuses it
    ],
)
def test_the_containers_own_restart_budget_counts(own: str | None, told: str) -> None:
    environ = {} if own is None else {"PET_MAX_RESTARTS": own}
    assert override(environ, {"PET_MAX_RESTARTS": "10"}) == ({"PET_MAX_RESTARTS": told}, [])


@pytest.mark.parametrize(
    ("own", "told", "lost"),
    [
        ("", CONF, ""),
        ("join_timeout=900", f"{CONF},join_timeout=900", ""),
        (" join_timeout = 900 , use_libuv=0,", f"{CONF},join_timeout=900,use_libuv=0", ""),
        ("is_host=0,join_timeout=9", f"{CONF},join_timeout=9", ""),
        ("is_host=1,join_timeout=9", f"{CONF},join_timeout=9", "is_host=1"),
        ("read_timeout=5,is_host=1", CONF, "read_timeout=5,is_host=1"),
        ("a=b=c", f"{CONF},a=b=c", ""),
        ("alone,=x,empty=", CONF, "alone,=x,empty="),
    ],
)
def test_foreign_options_of_the_rendezvous_are_kept(own: str, told: str, lost: str) -> None:
    said = [f"PET_RDZV_CONF: {lost} is overruled by {told}"] if lost else []
    assert override({"PET_RDZV_CONF": own}, {"PET_RDZV_CONF": CONF}) == (
        {"PET_RDZV_CONF": told},
        said,
    )


def test_what_must_be_the_same_in_every_pod_is_the_sidecars_and_that_is_said() -> None:
    own = {"PET_RDZV_ENDPOINT": "worker-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_OTHER": "1"}
    delivered = {"PET_RDZV_ENDPOINT": "localhost:29400", "PET_RDZV_BACKEND": "c10d"}
    assert override(own, delivered) == (
        delivered,
        ["PET_RDZV_ENDPOINT: worker-0:23456 is overruled by localhost:29400"],
    )


@pytest.mark.parametrize(
    ("own", "told", "said"),
    [
        ({"PET_STANDALONE": "1"}, {"PET_STANDALONE": "0"}, 1),
        ({"PET_STANDALONE": "1", "MUSTER_KEEP_FLAGS": "1"}, {}, 0),
        ({"PET_STANDALONE": "0"}, {}, 0),
        ({"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "head"}, {}, 0),  # c10d reads neither
    ],
)
def test_a_variable_that_would_let_it_train_alone_is_overruled(
    own: dict[str, str], told: dict[str, str], said: int
) -> None:
    result, sentences = override(own, {})
    assert (result, len(sentences)) == (told, said)
