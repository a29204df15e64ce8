# SPDX-License-Identifier: Apache-2.0
"""Settings: flag = variable = row of one table; every fault is a sentence; what parts get."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import DELIVERED_VARIABLES, Config
from agent.job_config import JobConfig, StoreConfig
from agent.rundir.files import RunDir
from agent.surroundings import MemberSettings, Sockets
from controller.config import ControllerConfig
from rdzv import settings as values
from rdzv.errors import ConfigError
from rdzv.records.policy import POLICY_TABLE
from rdzv.sentences import named
from rdzv.settings import load, settings_of, unknown_variables

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
    assert (config.policy.min_nodes, config.policy.max_nodes, config.slots) == (2, 4, 1)
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


def test_sizes_of_a_world_are_read() -> None:
    config = read({"MUSTER_SIZES": "4, 2,4", "MUSTER_GATHER": "0"})
    assert (config.policy.sizes, config.policy.unit, config.policy.gather_s) == ((2, 4), 1, 0)
    assert (read({}).policy.sizes, read({}).policy.unit, read({}).policy.gather_s) == ((), 1, 60)


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


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MUSTER_SIZES": "2,4", "MUSTER_UNIT": "2"}, "--sizes (MUSTER_SIZES) and --unit"),
        ({"MUSTER_SIZES": "1,5"}, "--sizes (MUSTER_SIZES): none of the sizes 1, 5 lies between"),
        ({"MUSTER_UNIT": "5"}, "--unit (MUSTER_UNIT): no multiple of 5 lies between min 2"),
        ({"MUSTER_SIZES": "2,x"}, "--sizes (MUSTER_SIZES): '2,x' from MUSTER_SIZES is wrong"),
    ],
)
def test_a_fault_of_the_sizes_begins_with_what_is_wrong(environ: dict[str, str], said: str) -> None:
    (told,) = faults({**NEEDED, **environ})
    assert told.startswith(said)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "--address (MUSTER_ADDRESS) is missing"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "status.podIP"),
        ({"MUSTER_HTTP_PORT": "tcp://10.0.0.7:80"}, "enableServiceLinks: false"),
    ],
)
def test_a_fault_says_what_is_wrong_and_what_to_do(environ: dict[str, str], said: str) -> None:
    (told,) = faults({**NEEDED, **environ})
    assert said in told


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
    own = [item.name for item in dataclasses.fields(Config) if item.name != "policy"]
    assert [name for name in settings if name not in POLICY_TABLE] == own
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


ROOT = Path(__file__).parents[2]
FILES = [
    path
    for package in ("agent", "console", "controller", "injection", "launcher_shim", "rdzv")
    for path in (ROOT / package).rglob("*.py")
]
OF_OTHER_COMMANDS = {"--wrap", "--no-wrap", "--container", "--pod-failure-policy"}
"""Flags of ``muster inject`` that are no setting of the sidecar."""
FLAGS = {
    setting.flag
    for kind in (Config, ControllerConfig, JobConfig, StoreConfig)
    for setting in settings_of(kind).values()
}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--run-dir", "--run-dir (MUSTER_RUN_DIR)"),
        ("--etcd-password-file", "--etcd-password-file (MUSTER_ETCD_PASSWORD_FILE)"),
        ("--no-wrap", "--no-wrap (MUSTER_WRAP)"),
    ],
)
def test_a_flag_is_named_with_its_variable(flag: str, sentence: str) -> None:
    assert named(flag) == sentence


def test_a_flag_that_a_sentence_names_is_there() -> None:
    given = {
        node.args[0].value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "named"
        and isinstance(node.args[0], ast.Constant)
    }
    assert "--run-dir" in given
    assert given - FLAGS <= OF_OTHER_COMMANDS


def test_nobody_spells_a_variable_behind_its_flag_by_hand() -> None:
    spelled = re.compile(r"--[a-z0-9-]+ \(MUSTER_")
    hands = [path.name for path in FILES if spelled.search(path.read_text(encoding="utf-8"))]
    assert hands == []


def given_read(**environ: str) -> Config:
    return load(Config, {}, {**NEEDED, **environ})


def test_what_is_not_said_is_as_in_the_table_of_settings() -> None:
    told = MemberSettings.of(given_read(), "uid")
    assert told == MemberSettings(keys=told.keys, identity=told.identity)


def test_what_is_said_reaches_the_parts() -> None:
    told = MemberSettings.of(
        given_read(
            MUSTER_NAMESPACE="team",
            MUSTER_LEASE_TTL="20s",
            MUSTER_START_TIMEOUT="21s",
            MUSTER_FIRST_CALL="22s",
            MUSTER_LAST_CALL="23s",
            MUSTER_GRACE_S="24s",
            MUSTER_BELOW_MIN="commit",
            MUSTER_C10D_PORT="2500",
            MUSTER_UNIT="2",
            MUSTER_GATHER="25s",
        ),
        "uid",
    )
    assert (told.keys.namespace, told.keys.job_name) == ("team", "digits")
    who = told.identity
    assert (who.pod_uid, who.policy.template) == ("uid", "min=2 max=4 unit=2 gather=25s")
    assert (told.lease_ttl_s, told.start_timeout_s) == (20, 21)
    assert (told.first_call_s, told.last_call_s, told.grace_s) == (22, 23, 24)
    assert (told.below_min, told.launcher_port, told.relayed) == ("commit", 2500, False)


@pytest.mark.parametrize(("role", "slots"), [("worker", 3), ("launcher", 0)])
def test_a_launcher_has_no_slots(role: str, slots: int) -> None:
    told = MemberSettings.of(given_read(MUSTER_ROLE=role, MUSTER_SLOTS="3"), "uid")
    assert told.identity.slots == slots


def test_where_the_relay_serves_the_port_the_sidecar_does_not(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path))
    config = given_read(MUSTER_C10D_PORT="0", MUSTER_RELAY_PORT="2600")
    told = MemberSettings.of(config, "uid")
    assert (told.launcher_port, told.relayed) == (2600, True)
    sockets = Sockets.of(config, run_dir)
    assert sockets.c10d_port is None
    assert sockets.c10d_path == str(tmp_path / "c10d.sock")
    assert sockets.notice_path == tmp_path / "notice.sock"
    assert Sockets.of(given_read(), run_dir).c10d_port == 29400
