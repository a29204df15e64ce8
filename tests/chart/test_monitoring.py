# SPDX-License-Identifier: Apache-2.0
"""The chart's PodMonitors, alert rules and dashboard: off by default, and checked by promtool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, command_of, expressions, pods, prometheus_program, rendered
from tests.support.programs import ran
from tests.support.sources import ROOT

pytestmark = pytest.mark.timeout(1800)  # the first one may have to build helm

ALL = tuple(f"monitoring.{part}=true" for part in ("podMonitors", "rules", "dashboard"))
KINDS = {"PodMonitor", "PrometheusRule"}


def promtool(*arguments: str | Path) -> str:
    """Run promtool, which is downloaded if it is not there; return what it said."""
    done = ran(prometheus_program("promtool"), *arguments, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def monitored(*values: str) -> dict[str, Any]:
    """The objects of monitoring that a rendering has, by kind and name."""
    return {
        f"{one['kind']}/{one['metadata']['name']}": one
        for one in rendered(*values)
        if one["kind"] in KINDS or one["metadata"]["name"].endswith("-dashboard")
    }


def test_there_is_no_monitoring_unless_asked_for_and_then_each_part_by_itself() -> None:
    assert monitored() == {}
    monitors = {f"PodMonitor/muster-{of}" for of in ("controller", "etcd", "sidecars")}
    assert {*monitored(ALL[0])} == monitors
    assert {*monitored(ALL[1])} == {"PrometheusRule/muster"}
    assert {*monitored(ALL[2])} == {"ConfigMap/muster-dashboard"}
    external = ("etcd.enabled=false", "externalEtcd.endpoints={http://a:2379}")
    assert {*monitored(ALL[0], *external)} == monitors - {"PodMonitor/muster-etcd"}
    fewer = monitored(ALL[0], "controller.enabled=false")
    assert {*fewer} == monitors - {"PodMonitor/muster-controller"}


@pytest.mark.parametrize("value", ["", *ALL])
def test_metrics_name_jobs_only_where_something_asks_for_them(value: str) -> None:
    command = command_of(rendered(*filter(None, [value])))
    assert ("--job-metrics=on" in command) is bool(value)


def test_prometheus_finds_each_port_by_its_name_and_trusts_the_controllers_certificate() -> None:
    objects = rendered(*ALL, "monitoring.labels.release=prometheus")
    found = monitored(*ALL, "monitoring.labels.release=prometheus")
    ports = {
        port["name"]: port["containerPort"]
        for _, spec in pods(objects)
        for container in spec["containers"]
        for port in container.get("ports", ())
    }
    for name, number in (("controller", 9443), ("etcd", 2381)):
        (endpoint,) = found[f"PodMonitor/muster-{name}"]["spec"]["podMetricsEndpoints"]
        assert ports[endpoint["port"]] == number
    (endpoint,) = found["PodMonitor/muster-controller"]["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["serverName"] == "muster-controller.muster-system.svc"
    secret = endpoint["tlsConfig"]["ca"]["secret"]
    assert secret == {"name": "muster-controller", "key": "ca.crt"}
    for one in found.values():
        if one["kind"] in KINDS:
            assert one["metadata"]["labels"]["release"] == "prometheus"


def test_each_alert_comes_when_it_should_and_not_before(tmp_path: Path) -> None:
    rules = monitored(ALL[1])["PrometheusRule/muster"]["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    cases = (Path(__file__).parent / "alerts.yaml").read_text()
    (tmp_path / "alerts.yaml").write_text(cases)
    names = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    promtool("check", "rules", tmp_path / "rules.yaml")
    promtool("test", "rules", tmp_path / "alerts.yaml")
    fires = re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing", ', cases)
    assert {*fires} == names, "each alert has a case in which it comes"
    for name in names:
        assert f"`{name}`" in (ROOT / "docs" / "operations.md").read_text(), name


def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    found = expressions(monitored(ALL[2])["ConfigMap/muster-dashboard"])
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(found)]
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]})
    )
    promtool("check", "rules", tmp_path / "rules.yaml")
    for text in (*found, (CHART / "files" / "alerts.yaml").read_text()):
        assert "ETCD}" not in text or "{ETCD}" in text


@pytest.mark.parametrize("values", [(), ("nameOverride=elastic", "etcd.replicas=3")])
def test_the_metrics_of_etcd_are_those_of_the_charts_own_members(values: tuple[str, ...]) -> None:
    found = monitored(*ALL, *values)
    name = "elastic" if values else "muster"
    rules = json.dumps(found[f"PrometheusRule/{name}"]["spec"])
    panels = " ".join(expressions(found[f"ConfigMap/{name}-dashboard"]))
    for text in (rules.replace('\\"', '"'), panels):
        selectors = re.findall(r"etcd_\w+(\{[^}]*\})?", text)
        assert {*selectors} == {f'{{namespace="muster-system",pod=~"{name}-etcd-[0-9]+"}}'}
