# SPDX-License-Identifier: Apache-2.0
"""torchrun's command line is read as torchrun reads it, and which of its options hold."""

from __future__ import annotations

import shlex

import pytest

from launcher_shim.torchrun.launcher import (
    bounds,
    keeps_flags,
    kept_line,
    override,
    read_line,
    starts_own_job,
)

HERE = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
    "PET_RDZV_CONF": "is_host=0,read_timeout=300",
    "PET_NNODES": "1:3",
}


@pytest.mark.parametrize(
    ("line", "options", "script"),
    [
        ("train.py --nnodes=9", {}, "train.py --nnodes=9"),
        ("--nnodes 2 train.py", {"nnodes": "2"}, "train.py"),
        ("--nnodes=2 --nnodes=3 train.py", {"nnodes": "3"}, "train.py"),
        ("--rdzv_end h:1 --node_rank=0 t", {"rdzv-endpoint": "h:1", "node-rank": "0"}, "t"),
        ("--stand -m train --standalone", {"standalone": "1", "module": "1"}, "train --standalone"),
        ("-t3 -r 1 -t=2 t", {"tee": "2", "redirects": "1"}, "t"),
        ("--nproc auto -- t.py -- x", {"nproc-per-node": "auto"}, "t.py -- x"),
        ("--node-rank -1 t", {"node-rank": "-1"}, "t"),
        ("--nnodes --standalone t", {"nnodes": "", "standalone": "1"}, "t"),
        ("--nnodes", {"nnodes": ""}, ""),
        ("'-a b' --nnodes=2", {}, "'-a b' --nnodes=2"),
        ("- --nnodes=2", {}, "- --nnodes=2"),
        ("-1 --nnodes=2", {}, "-1 --nnodes=2"),
        ("", {}, ""),
        # Of a later torch: a value that belongs to its option, or an option right after it.
        ("--new=5 --nnodes 2 t", {"--new": "5", "nnodes": "2"}, "t"),
        ("--new --nnodes 2 t", {"--new": "", "nnodes": "2"}, "t"),
        ("--rdzv --nnodes 2 t", {"--rdzv": "", "nnodes": "2"}, "t"),
        ("--version", {"--version": ""}, ""),
        ("-mt3 t.py", {}, None),
    ],
)
def test_a_line_is_read_as_torchrun_reads_it(
    line: str, options: dict[str, str], script: str | None
) -> None:
    read = read_line(shlex.split(line))
    assert read.values() == options
    assert read.script == (None if script is None else tuple(shlex.split(script)))


@pytest.mark.parametrize(
    "line", ["--new train.py --nnodes=2", "--nnodes=2 --new 5 train.py", "-x 5 --nnodes 2 t"]
)
def test_nothing_is_read_from_an_option_on_that_may_be_a_switch(line: str) -> None:
    read = read_line(line.split())
    assert read.script is None
    assert read.words() == line.split()
    assert kept_line(line.split(), HERE)[0][-3:] == line.split()[-3:]


@pytest.mark.parametrize(
    ("line", "kept", "said"),
    [
        (
            "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 --master_port 29500"
            " t.py --nnodes=2",
            "--nproc_per_node=8 t.py --nnodes=2",
            [
                "--nnodes: 2 is overruled by 1:3",
                "--node-rank: 1 is left out, as the rendezvous gives each node its rank",
                "--master-addr: 10.0.0.1 is left out, as each world has a master of its own",
                "--master-port: 29500 is left out, as each world has a master of its own",
            ],
        ),
        (
            "--rdzv-backend static --rdzv_endpoint=head:29500 --rdzv-i 7 -m train",
            "-m train",
            [
                "--rdzv-backend: static is overruled by c10d",
                "--rdzv-endpoint: head:29500 is overruled by localhost:29400",
                "--rdzv-id: 7 is overruled by digits",
            ],
        ),
        (
            "--standalone --nnodes=1:3 t.py",
            "t.py",
            ["--standalone is left out, as this pod trains with the others of its job"],
        ),
        # What says the same as the sidecar is not worth a line.
        ("--nnodes 1:3 --rdzv-backend=c10d --rdzv-id=digits t.py", "t.py", []),
        (
            "--rdzv-conf join_timeout=9,is_host=1 t.py",
            "--rdzv-conf=is_host=0,read_timeout=300,join_timeout=9 t.py",
            ["--rdzv-conf: is_host=1 is overruled by is_host=0,read_timeout=300,join_timeout=9"],
        ),
        ("--local-addr a --max-restarts=1 t", "--local-addr a --max-restarts=1 t", []),
        # It starts nothing.
        ("--nnodes=2 --help", "--nnodes=2 --help", []),
        ("--nnodes=2", "--nnodes=2", []),
    ],
)
def test_options_of_the_rendezvous_are_left_out_with_a_sentence_each(
    line: str, kept: str, said: list[str]
) -> None:
    assert kept_line(line.split(), HERE) == (kept.split(), said)


def test_a_node_of_the_same_number_of_nodes_is_not_worth_a_line() -> None:
    words = ["--nnodes=2", "t.py"]
    assert kept_line(words, {**HERE, "PET_NNODES": "2:2"}) == (["t.py"], [])


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({}, True),
        # The variables that operators give every pod.
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "digits"}, False),  # a worker's
        ({"HOROVOD_RANK": "0"}, False),
        ({"PET_RDZV_ENDPOINT": "head:29400"}, False),
        ({"PET_RDZV_BACKEND": "static"}, False),
        ({"PET_RDZV_ID": ""}, False),
        ({"MUSTER_KEEP_FLAGS": "1"}, False),
        ({"MUSTER_KEEP_FLAGS": "0"}, True),
    ],
)
def test_only_the_containers_own_launcher_is_overruled(change: dict[str, str], own: bool) -> None:
    assert starts_own_job({**HERE, **change}) == own
    assert not starts_own_job({})


def test_another_word_for_keeping_flags_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^MUSTER_KEEP_FLAGS is 'yes': give 1"):
        keeps_flags({"MUSTER_KEEP_FLAGS": "yes"})


@pytest.mark.parametrize(
    ("nnodes", "expected"),
    [("2", (2, 2)), ("2:8", (2, 8)), ("", None), ("a", None), ("1:2:3", None), ("8:2", (8, 2))],
)
def test_bounds_are_read_as_torchrun_reads_them(
    nnodes: str, expected: tuple[int, int] | None
) -> None:
    assert bounds(nnodes) == expected


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
