# SPDX-License-Identifier: Apache-2.0
"""torch's launcher in a container: its configuration, Gloo's interface, and its ends."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from launcher_shim.exit_status import EXIT_REMOVED
from launcher_shim.horovod.exec.client import LIMIT_S, LOOK_S, SEEN_S, delay_exit
from launcher_shim.pod import container
from launcher_shim.pod.container import choose_interface, needed_interface, read_interfaces
from launcher_shim.pod.delivery import images_own
from launcher_shim.pod.torchrun import digest, meets_at, overruled

HERE = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
    "PET_RDZV_CONF": "is_host=0,read_timeout=300",
    "PET_NNODES": "1:3",
    "PET_LOCAL_ADDR": "10.1.0.7",
    "PET_MAX_RESTARTS": "10",
}
AS_DELIVERED = {
    "min_nodes": 1,
    "max_nodes": 3,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:29400",
    "run_id": "digits",
    "rdzv_configs": {"is_host": "0", "read_timeout": "300", "timeout": 900},
    "local_addr": "10.1.0.7",
    "max_restarts": 10,
}
STATIC = {
    "min_nodes": 2,
    "max_nodes": 2,
    "rdzv_backend": "static",
    "rdzv_endpoint": "head:29500",
    "run_id": "none",
    "rdzv_configs": {"rank": 1, "timeout": 900},
    "local_addr": None,
    "max_restarts": 0,
}


def after(change: dict[str, Any], *words: str) -> tuple[dict[str, Any], list[str]]:
    own = {**STATIC, **change}
    changes, said = overruled(own, HERE, words)
    return {**own, **changes}, said


def test_a_static_rendezvous_becomes_the_sidecars() -> None:
    assert after({}) == (
        AS_DELIVERED,
        [
            "nnodes: 2:2 is overruled by 1:3",
            "rdzv_backend: static is overruled by c10d",
            "rdzv_endpoint: head:29500 is overruled by localhost:29400",
        ],
    )


def test_what_torchrun_has_read_from_the_variables_stays_without_a_word() -> None:
    assert overruled(AS_DELIVERED, HERE, ()) == (
        {
            name: value
            for name, value in AS_DELIVERED.items()
            if name not in ("max_restarts", "local_addr")
        },
        [],
    )


@pytest.mark.parametrize(
    ("change", "words", "expected", "said"),
    [
        ({"max_restarts": 2}, (), {"max_restarts": 2}, 3),
        ({}, ("--max_restarts", "0"), {"max_restarts": 0}, 3),
        ({}, ("--max-r=0",), {"max_restarts": 0}, 3),
        ({}, ("--m", "--mixed_precision", "--main_process_port=1"), {"max_restarts": 10}, 3),
        ({"local_addr": "10.2.0.7"}, (), {"local_addr": "10.2.0.7"}, 3),
        ({"run_id": "7"}, (), {"run_id": "digits"}, 4),
        (
            {"rdzv_configs": {"join_timeout": 9, "read_timeout": 5, "is_host": False}},
            (),
            {"rdzv_configs": {"is_host": "0", "read_timeout": "300", "join_timeout": 9}},
            4,
        ),
    ],
)
def test_what_the_sidecar_does_not_set_is_kept(
    change: dict[str, Any], words: tuple[str, ...], expected: dict[str, Any], said: int
) -> None:
    config, sentences = after(change, *words)
    assert {name: config[name] for name in expected} == expected
    assert len(sentences) == said


def test_a_torch_without_such_a_field_is_not_guessed_at() -> None:
    with pytest.raises(KeyError):
        overruled({"min_nodes": 1, "max_nodes": 1}, HERE, ())
    with pytest.raises(ValueError, match="PET_NNODES is 'many'"):
        overruled(STATIC, {**HERE, "PET_NNODES": "many"}, ())


GLOO_HERE = {
    "127.0.0.1": "lo",
    "::1": "lo",
    "10.0.0.2": "eth0",
    "fd00::2": "eth0",
    "172.17.0.1": "docker0",
}


@pytest.mark.parametrize(
    ("address", "bound", "interface"),
    [
        ("10.0.0.2", None, "eth0"),
        ("10.0.0.2", "127.0.0.1", "eth0"),
        ("10.0.0.2", "127.0.1.1", "eth0"),  # in 127/8, and no interface has it
        ("10.0.0.2", "172.17.0.1", "eth0"),
        ("10.0.0.2", "10.0.0.2", None),
        ("10.0.0.2", "fd00::2", None),  # two families of one interface
        ("fd00::2", None, "eth0"),
        ("fd00:0::2", "::1", "eth0"),
        ("fd00::2", "FD00::2", None),
    ],
)
def test_gloo_is_given_the_pods_interface_if_the_name_leads_elsewhere(
    address: str, bound: str | None, interface: str | None
) -> None:
    needed = choose_interface(address, "node-a", bound, GLOO_HERE)
    assert (needed and needed[0]) == interface


def test_the_reason_names_what_gloo_would_use() -> None:
    nowhere, elsewhere = (
        choose_interface("10.0.0.2", "node-a", one, GLOO_HERE) for one in (None, "127.0.1.1")
    )
    assert nowhere is not None
    assert elsewhere is not None
    assert "the host name node-a does not resolve to 10.0.0.2" in nowhere[1]
    assert "the host name node-a resolves to 127.0.1.1, not to 10.0.0.2" in elsewhere[1]


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.2"),  # the user's counts
        ({}, "127.0.0.1"),
        ({}, "::1"),
        ({}, "192.0.2.77"),  # no interface has it
    ],
)
def test_nothing_is_given_where_it_is_not_needed(
    environ: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "read_interfaces", lambda: GLOO_HERE)
    monkeypatch.setattr(container, "_bound_by", lambda name: None)
    assert needed_interface(environ, address) is None


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(OSError, match="illegal IP address"):
        needed_interface({}, "node-a.example")


def test_the_kernel_names_the_interfaces() -> None:
    found = read_interfaces()
    names = {name for _, name in socket.if_nameindex()}
    assert {*found.values()} <= names
    assert found["127.0.0.1"] in names


PASS_OVER_HERE = {
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "localhost:29400",
    "PET_RDZV_ID": "digits",
}


@pytest.mark.parametrize(
    ("line", "meets"),
    [
        ("--nproc-per-node=8 train.py --rdzv-id other", (29400, "digits")),
        ("--rdzv-id two train.py", (29400, "two")),
        ("--rdzv_id=two -m train", (29400, "two")),
        ("--standalone --nnodes=1 train.py", None),
        ("--rdzv-endpoint=10.0.0.1:29400 train.py", None),
        ("--rdzv-backend=static train.py", None),
        ("--rdzv-endpoint=127.0.0.1:29500 train.py", (29500, "digits")),
        ("train.py --help", (29400, "digits")),
        ("-r3 -t 3 --role=x -- train.py", (29400, "digits")),
        ("-t3 --no-python ./train", (29400, "digits")),
        ("", None),
        ("--nproc-per-node 8", None),
        ("-h", None),
        ("--nproc-per-node=8 --help train.py", None),
        ("--hel train.py", None),
        ("--version", None),
        ("--print-completion bash", None),
    ],
)
def test_it_asks_for_one_that_comes_to_the_sidecar(
    line: str, meets: tuple[int, str] | None
) -> None:
    assert meets_at(line.split(), PASS_OVER_HERE) == meets
    assert meets_at(line.split(), {}) is None


def test_launch_lines_differ_by_each_word() -> None:
    lines = [["a.py"], ["b.py"], ["a.py", "x"], ["a.py x"], []]
    assert len({digest(line) for line in lines}) == len(lines)
    assert digest(["a.py"]) == digest(["a.py"])


def test_it_becomes_the_next_one_in_the_path(tmp_path: Path) -> None:
    ours, plain, image = (tmp_path / name / "torchrun" for name in ("run", "plain", "image"))
    for program in (ours, plain, image):
        program.parent.mkdir()
        program.write_text("")
        program.chmod(0o755)
    plain.chmod(0o644)
    linked = tmp_path / "link"
    linked.symlink_to(ours.parent)
    path = f"{ours.parent}:{linked}:{plain.parent}"
    assert images_own("torchrun", str(ours), {"PATH": path}) is None
    assert images_own("torchrun", str(ours), {"PATH": f"{path}:{image.parent}"}) == str(image)


def write(run_dir: Path, hosts: str, least: int = 2) -> None:
    (run_dir / "hosts").write_text("".join(f"{host}.0a0a0a0a:2\n" for host in hosts) + "rev-7:0\n")
    (run_dir / "env").write_text(f"# of the sidecar\nPET_NNODES={least}:4\n")


def waited_s(run_dir: Path, status: int = 143, changes: dict[float, str] | None = None) -> float:
    """How long the end of a worker on host a is kept back; ``changes`` are lists to come."""
    now = 100.0
    left = dict(changes or {})

    def sleep(duration_s: float) -> None:
        nonlocal now
        now += duration_s
        for at_s in [at_s for at_s in left if now - 100.0 >= at_s]:
            write(run_dir, left.pop(at_s))

    delay_exit("a.0a0a0a0a", status, run_dir, lambda: now, sleep)
    return now - 100.0


@pytest.mark.parametrize(
    ("hosts", "status", "changes", "expected_s"),
    [
        pytest.param("a", 143, {}, 0, id="its host is listed"),
        pytest.param("b", 0, {}, 0, id="it ended well"),
        pytest.param("b", EXIT_REMOVED, {}, 0, id="it was removed"),
        pytest.param("bc", 143, {}, SEEN_S, id="enough others: horovodrun has seen the list"),
        pytest.param("b", 143, {40: "bc"}, 40 + SEEN_S, id="below min: another has come"),
        pytest.param("", 143, {}, LIMIT_S, id="below min: none comes"),
    ],
)
def test_the_end_of_a_worker_is_kept_back(
    tmp_path: Path, hosts: str, status: int, changes: dict[float, str], expected_s: float
) -> None:
    write(tmp_path, hosts)
    late_s = LOOK_S * (1 + len(changes)) if expected_s else 0
    assert waited_s(tmp_path, status, changes) == pytest.approx(expected_s, abs=late_s)


@pytest.mark.parametrize("env", ["", "PET_NNODES=\n", None])
def test_without_a_launchers_run_directory_nothing_is_kept_back(
    tmp_path: Path, env: str | None
) -> None:
    if env is not None:
        write(tmp_path, "b")
        (tmp_path / "env").write_text(env)
    assert waited_s(tmp_path) == 0
