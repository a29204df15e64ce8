# SPDX-License-Identifier: Apache-2.0
"""Settings: flag = variable = row of one table; every fault is told at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import parsers as values
from agent.config.job import JobConfig
from agent.config.sidecar import DELIVERED_VARIABLES, Config
from agent.config.table import load, settings_of, unknown_variables
from rdzv.errors import ConfigError

NEEDED = {"MUSTER_JOB": "digits", "MUSTER_MIN": "2", "MUSTER_MAX": "4"}


def read(environ: dict[str, str], **flags: str) -> Config:
    return load(Config, flags, {**NEEDED, **environ})


def faults(environ: dict[str, str], **flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Config, flags, environ)
    return str(caught.value).splitlines()


def test_defaults_are_those_of_the_table() -> None:
    config = read({})
    assert (config.namespace, config.job, config.member != "") == ("default", "digits", True)
    assert (config.min_nodes, config.max_nodes, config.slots) == (2, 4, 1)
    assert (config.c10d_port, config.http_port, config.run_dir) == (29400, 9400, "/var/run/muster")
    assert (config.lease_ttl_s, config.last_call_s, config.start_timeout_s) == (10.0, 2.0, 60.0)
    assert (config.address, config.role, config.log_format) == ("127.0.0.1", "worker", "json")
    assert config.etcd_endpoints == ("127.0.0.1:2379",)


def test_a_flag_wins_over_its_variable_and_an_empty_variable_is_not_set() -> None:
    config = read({"MUSTER_JOB": "other", "MUSTER_SLOTS": ""}, job="mine")
    assert (config.job, config.slots) == ("mine", 1)


def test_every_fault_is_told_at_once_with_its_flag_and_variable() -> None:
    told = faults(
        {
            "MUSTER_MIN": "5",
            "MUSTER_MAX": "4",
            "MUSTER_LEASE_TTL": "soon",
            "MUSTER_C10D_PORT": "9400",
            "MUSTER_ETCD_ENDPOINTS": "etcd",
        },
        address="0.0.0.0",
    )
    for flag, variable in (
        ("--job", "MUSTER_JOB"),
        ("--min", "MUSTER_MIN"),
        ("--lease-ttl", "MUSTER_LEASE_TTL"),
        ("--c10d-port", "MUSTER_C10D_PORT"),
        ("--etcd-endpoints", "MUSTER_ETCD_ENDPOINTS"),
        ("--address", "MUSTER_ADDRESS"),
    ):
        assert [line for line in told if line.startswith(f"{flag} ({variable})")], (flag, told)
    assert len(told) == 6


def test_sizes_of_a_world_are_read_and_held_against_the_bounds() -> None:
    config = read({"MUSTER_SIZES": "4, 2,4", "MUSTER_GATHER": "0"})
    assert (config.sizes, config.unit, config.gather_s) == ((2, 4), 1, 0)
    assert (read({}).sizes, read({}).unit, read({}).gather_s) == ((), 1, 60)
    for told_of, said in (
        ({"MUSTER_SIZES": "2,4", "MUSTER_UNIT": "2"}, "--sizes (MUSTER_SIZES) and --unit"),
        ({"MUSTER_SIZES": "1,5"}, "--sizes (MUSTER_SIZES): none of the sizes 1, 5 lies between"),
        ({"MUSTER_UNIT": "5"}, "--unit (MUSTER_UNIT): no multiple of 5 lies between min 2"),
        ({"MUSTER_SIZES": "2,x"}, "--sizes (MUSTER_SIZES): '2,x' from MUSTER_SIZES is wrong"),
    ):
        (told,) = faults({**NEEDED, **told_of})
        assert told.startswith(said)


def test_relative_paths_count_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.pem").touch()
    monkeypatch.chdir(tmp_path)
    assert values.directory("n0") == f"{tmp_path}/n0"
    assert values.directory("/run/n0") == "/run/n0"
    assert values.file("ca.pem") == f"{tmp_path}/ca.pem"
    assert values.file("") == ""
    (tmp_path / "my runs").mkdir()
    monkeypatch.chdir(tmp_path / "my runs")
    with pytest.raises(ValueError, match=r"without blanks or quotes; it is .*my runs/n0"):
        values.directory("n0")


def test_in_a_pod_the_address_must_be_given() -> None:
    (told,) = faults({**NEEDED, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "--address (MUSTER_ADDRESS) is missing" in told
    assert "status.podIP" in told


def test_a_port_made_by_a_kubernetes_service_is_explained() -> None:
    (told,) = faults({**NEEDED, "MUSTER_HTTP_PORT": "tcp://10.0.0.7:80"})
    assert "enableServiceLinks: false" in told


def test_an_unknown_variable_is_told_with_the_nearest_name() -> None:
    environ = {
        **NEEDED,
        "MUSTER_LEASE_TLL": "10",
        "MUSTER_ZZZZZZ": "1",
        "MUSTER_SERVICE_HOST": "10.0.0.1",
        "MUSTER_PORT_2379_TCP_ADDR": "10.0.0.1",
        "MUSTER_STORE_PORT": "tcp://10.0.0.1:2379",
    }
    told = unknown_variables(environ, settings_of(Config), DELIVERED_VARIABLES)
    assert told == [
        "MUSTER_LEASE_TLL is set, but nothing reads it: did you mean MUSTER_LEASE_TTL?",
        "MUSTER_ZZZZZZ is set, but nothing reads it",
    ]


def test_every_row_says_what_it_is_for_and_spells_its_variable_like_its_flag() -> None:
    settings = settings_of(Config)
    assert list(settings) == [item.name for item in dataclasses.fields(Config)]
    assert set(settings_of(JobConfig)) < set(settings)
    for setting in settings.values():
        assert setting.variable == "MUSTER_" + setting.flag[2:].upper().replace("-", "_")
        assert "." in setting.why
        assert setting.metavar


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 10.0), ("10s", 10.0), ("1m", 60.0), ("2500ms", 2.5), ("1.5", 1.5), ("0.1h", 360.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert values.duration_s(0, 1000)(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10), ("1m", 60), ("2500ms", 3), ("2.0001s", 3), ("600", 600)]
)
def test_a_lease_lasts_for_whole_seconds_as_the_store_counts_them(text: str, seconds: int) -> None:
    assert read({"MUSTER_LEASE_TTL": text}).lease_ttl_s == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1d", "1e3", "nan", "inf", "1001", "10 s s", "١"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        values.duration_s(0, 1000)(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("etcd:2379", ("etcd:2379",)),
        ("http://a:1, b:2 ,", ("a:1", "b:2")),
        ("10.0.0.1:2379/", ("10.0.0.1:2379",)),
        ("[fd00::1]:2379", ("[fd00::1]:2379",)),
        ("ETCD-0.etcd.ns.svc:2379", ("etcd-0.etcd.ns.svc:2379",)),
        ("https://a:1,https://b:2/", ("https://a:1", "https://b:2")),
    ],
)
def test_endpoints(text: str, found: tuple[str, ...]) -> None:
    assert values.endpoints(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "etcd", "etcd:", "etcd:0", "etcd:70000", "ftp://a:1", "a:1/x", "u:p@a:1"),
        *("a b:1", "fd00::1:2379", "unix:///x", "a:1?x", "-a:1", "a;b:1", "http://[::1:1"),
    ],
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        values.endpoints(text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("b1/r2", "b1/r2"),
        ("/zone-a/", "/zone-a"),
        ("//", ""),
        ("eu:1/R_2.x", "eu:1/R_2.x"),
    ],
)
def test_topologies(text: str, path: str) -> None:
    assert values.topology(text) == path


@pytest.mark.parametrize("text", ["block rack", "$(ZONE)/r1", "block\\rack", "b\n", "é", "a" * 254])
def test_what_is_no_topology(text: str) -> None:
    with pytest.raises(ValueError, match="a path such as block/rack"):
        values.topology(text)


@given(st.text(max_size=300))
def test_any_text_is_a_value_or_a_value_error(text: str) -> None:
    parsers = (
        *(setting.parse for setting in settings_of(Config).values()),
        values.port,
        values.real_port,
    )
    refused = 0
    for parse in parsers:
        try:
            parse(text)
        except ValueError:
            refused += 1
    assert refused > 0


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True).filter(lambda t: len(t) < 254))
def test_a_name_that_is_safe_in_a_shell_is_taken(text: str) -> None:
    assert values.name(text) == text


@pytest.mark.parametrize("text", ["", "-a", ".a", "a b", "a;b", "a\n", "é", "a/b", "a" * 254])
def test_a_name_that_is_not_safe_in_a_shell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a name has letters"):
        values.name(text)
