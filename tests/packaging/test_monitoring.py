"""The dashboard and the rules ask for metrics that the server has. `make test SUITE=scale` asks
a real Prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dne_serve.observe.metrics import ServerMetrics
from tests.packaging.monitoring import (
    COMPARISON,
    PROMETHEUS,
    dashboard,
    dashboard_queries,
    rule_queries,
    rules,
)
from tests.packaging.project import ROOT

PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="THE RULES WERE NOT TRIED: no promtool"
)
NAMES = re.compile(r"\b((?:dne|process)_[a-z0-9_]+|\w+:\w+(?::\w+)?|up)(?=[{\[\s)]|$)")
PROMETHEUS_OWN = {"up"}


def series() -> set[str]:
    """The names of all series that a server can have."""
    names = set()
    for family in ServerMetrics(by_model=True).registry.collect():
        endings = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
            "info": ("_info",),
        }.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
    return names


def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def test_every_query_asks_for_series_that_exist() -> None:
    known = series() | recorded() | PROMETHEUS_OWN
    asked: set[str] = set()
    for query in (*dashboard_queries(), *rule_queries()):
        found = set(NAMES.findall(re.sub(r'"[^"]*"', '""', query)))
        assert found, query
        assert found <= known, query
        asked |= found
    assert len(asked) > 30


def test_every_metric_of_the_server_is_in_the_operators_guide() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    own = {
        family.name
        for family in ServerMetrics(by_model=True).registry.collect()
        if "dne_" in family.name
    }
    assert [name for name in sorted(own) if f"`{name}" not in guide] == []


def test_every_alert_has_one_comparison_a_severity_and_a_next_step() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) > 10
    for alert in alerts:
        assert COMPARISON.search(alert["expr"].strip())
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert set(alert["annotations"]) == {"summary", "action"}


def test_panels_do_not_overlap_and_ask_the_chosen_data_source() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations(panels, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def test_grafana_is_provisioned_with_the_dashboard_and_prometheus() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = _loaded(provisioning / "datasources/prometheus.yml")["datasources"]
    [provider] = _loaded(provisioning / "dashboards/dne-serve.yml")["providers"]
    compose = _loaded(ROOT / "deploy/compose.yaml")["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in compose
    mounts = {one.split(":")[1]: one.split(":")[0] for one in compose["grafana"]["volumes"]}
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./grafana/provisioning"


def test_prometheus_scrapes_the_server_of_compose_by_a_name_that_it_takes() -> None:
    jobs = _loaded(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    [target] = jobs[0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    server = _loaded(ROOT / "deploy/compose.yaml")["services"][name]
    assert name in server["environment"]["DNE_ALLOWED_HOSTS"].split(",")
    assert port == "8000"


@PROMTOOL
@pytest.mark.parametrize(
    "check", ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"]
)
def test_promtool_finds_nothing(check: str) -> None:
    command = ["promtool", *check.split()]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _loaded(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded
