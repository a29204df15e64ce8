# SPDX-License-Identifier: Apache-2.0
"""What horovodrun is told in a launcher's container, and what it is not let have."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher_shim.pod.horovod_line import (
    LINE_MAX_BYTES,
    JobSize,
    LineError,
    arguments,
    environment,
    found_first,
    read_options,
    serves_workers,
)

SIZE = JobSize(1, 3, 1)
SCRIPT = "/run/discover_hosts.sh"
AS_USERS_HAVE_IT = (
    "-np 2 --min-np 1 --max-np 3 --host-discovery-script /etc/mpi/discover_hosts.sh"
    " python /examples/elastic/train.py -np 9"
)


def told(line: str, size: JobSize = SIZE) -> tuple[dict[str, str | None], str]:
    """The options that horovodrun gets, and the worker's command."""
    made, _ = arguments(line.split(), SCRIPT, "eth0", size)
    options = read_options(made)
    values = {option.name: option.value for option in options.options}
    assert len(values) == len(options.options), "an option twice"
    return values, " ".join(options.command)


def test_the_operators_host_list_is_overruled_and_the_users_counts_are_kept() -> None:
    made, said = arguments(AS_USERS_HAVE_IT.split(), SCRIPT, "eth0", SIZE)
    options, command = told(AS_USERS_HAVE_IT)
    assert options == {
        **{"-np": "2", "--min-np": "1", "--max-np": "3"},
        **{"--host-discovery-script": SCRIPT, "--network-interface": "eth0"},
        **{"--gloo-timeout-seconds": "60", "--elastic-timeout": "604800"},
        "--blacklist-cooldown-range": "60",
    }
    assert command == "python /examples/elastic/train.py -np 9"
    assert said == ["--host-discovery-script /etc/mpi/discover_hosts.sh is overruled by " + SCRIPT]
    assert made[-4:] == ["python", "/examples/elastic/train.py", "-np", "9"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 2 --network-interface net1 python t.py", {"--network-interface": "net1"}),
        ("-np 2 --network-interfaces=net1 python t.py", {"--network-interfaces": "net1"}),
        ("-np 2 --gloo-timeout 9 python t.py", {"--gloo-timeout-seconds": "9"}),
        ("--num-proc=2 python t.py", {"--num-proc": "2"}),
        ("python t.py", {"--min-np": "1", "-np": "1"}),
        ("--min-np 2 --max-np 3 python t.py", {"--min-np": "2", "-np": "2"}),
        ("--verbose -np 1 --slots-per-host 1 -- python t.py", {"--verbose": None}),
    ],
)
def test_what_users_give_stays(line: str, expected: dict[str, str | None]) -> None:
    options, _ = told(line)
    assert expected.items() <= options.items()


def test_the_fewest_processes_are_those_of_the_fewest_nodes() -> None:
    options, _ = told("python t.py", JobSize(2, 4, 8))
    assert options["--min-np"] == "16"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-H a:1,b:1 python t.py", "-H cannot hold: the launcher's sidecar tells"),
        ("--hostfile /etc/mpi/hostfile python t.py", "--hostfile cannot hold"),
        ("-p22 python t.py", "-p cannot hold: no ssh is used"),
        ("--mpi -np 2 python t.py", "--mpi cannot hold: an elastic job needs Gloo"),
        ("--reset-limit 3 python t.py", "--reset-limit cannot hold"),
        ("-np 4 python t.py", "-np 4 cannot hold: the job has at most 3 nodes with 1 slots"),
        ("--min-np 9 python t.py", "--min-np 9 cannot hold"),
        ("--slots-per-host 2 -np 2 python t.py", "--slots-per-host 2 cannot hold"),
        ("-np two python t.py", "-np two: give a number from 1"),
    ],
)
def test_what_cannot_hold_is_refused_in_one_sentence(line: str, why: str) -> None:
    with pytest.raises(LineError) as caught:
        arguments(line.split(), SCRIPT, "eth0", SIZE)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_max_np_below_the_jobs_min_is_refused_and_others_that_differ_are_told() -> None:
    with pytest.raises(LineError, match="--max-np 2 cannot hold: the job has at least 4 nodes"):
        arguments(["--max-np", "2", "python", "t.py"], SCRIPT, "eth0", JobSize(4, 8, 1))
    _, said = arguments(["-np", "2", "--max-np", "2", "t.py"], SCRIPT, "eth0", SIZE)
    assert [sentence.partition(",")[0] for sentence in said] == [
        "horovodrun waits below 2 processes",
        "horovodrun uses 2 processes at most",
    ]


def test_the_size_of_the_job_is_what_the_sidecar_has_delivered() -> None:
    assert JobSize.of({"PET_NNODES": "2:8", "MUSTER_SLOTS": "4"}) == (2, 8, 4)
    with pytest.raises(LineError):
        JobSize.of({})


LAUNCHERS = {
    "PATH": "/run/bin:/usr/bin",
    "HOME": "/root",
    "HOSTNAME": "job-launcher",
    "POD_IP": "10.0.0.9",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "NVIDIA_VISIBLE_DEVICES": "",
    "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
    "TRACKING_TOKEN": "hunter2",
    "NCCL_DEBUG": "INFO",
    "HOROVOD_CYCLE_TIME": "5",
}


def test_i8_horovodrun_gets_no_secret_and_nothing_of_the_launchers_own_pod() -> None:
    assert environment(LAUNCHERS, "/run", "/run/remote-shell", 100) == {
        "PATH": "/run/remote-shell:/run/bin:/usr/bin",
        "HOME": "/root",
        "NCCL_DEBUG": "INFO",
        "HOROVOD_CYCLE_TIME": "5",
        "MUSTER_RUN_DIR": "/run",
        "PYTHONUNBUFFERED": "1",
    }


def test_an_environment_that_does_not_fit_names_its_largest_variables() -> None:
    large = {**LAUNCHERS, "HOROVOD_A": "x" * 90_000, "NCCL_B": "y" * 50_000}
    with pytest.raises(LineError) as caught:
        environment(large, "/run", "/run/remote-shell", 100)
    assert "HOROVOD_A (90011 bytes), NCCL_B (50008 bytes)" in str(caught.value)


@given(st.dictionaries(st.sampled_from(["HOROVOD_A", "NCCL_B"]), st.text(max_size=70_000)))
def test_what_is_let_through_fits_into_one_argument(variables: dict[str, str]) -> None:
    try:
        kept = environment(variables, "/run", "/run/remote-shell", 1000)
    except LineError:
        return
    line = " ".join(f"{name}={shlex.quote(value)}" for name, value in kept.items())
    assert len(line.encode(errors="surrogatepass")) < LINE_MAX_BYTES - 1000


def test_a_horovodrun_that_is_named_by_its_path_is_found_behind_the_one_that_was_delivered() -> (
    None
):
    environ = {"PATH": "/run/bin:/usr/bin", "A": "b"}
    assert found_first(["/opt/conda/bin/horovodrun", "-np", "2"], environ) == (
        ["horovodrun", "-np", "2"],
        {"PATH": "/run/bin:/opt/conda/bin:/usr/bin", "A": "b"},
    )
    for command in (["horovodrun", "x"], ["sh", "-c", "/opt/horovodrun x"]):
        assert found_first(command, environ) == (command, environ)


def test_the_agent_of_workers_is_known_by_its_name() -> None:
    assert serves_workers(["/var/run/muster/bin/muster-exec", "--", "sshd"])
    assert not serves_workers(["sleep", "muster-exec"])
