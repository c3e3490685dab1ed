"""Read the queries of the dashboard and of the rules."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.packaging.project import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/dashboards/dne-serve.json"
COMPARISON = re.compile(r" (==|>) ([\d.]+)$")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    """The queries of panels, annotations and variables, as Grafana would write them."""
    found = dashboard()
    panels = [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]
    notes = [one["expr"] for one in found["annotations"]["list"]]
    variables = [
        str(one["definition"]) for one in found["templating"]["list"] if one["type"] == "query"
    ]
    named = [re.sub(r"label_values\((.*), \w+\)", r"\1", one) for one in variables]
    return [_filled(one) for one in (*panels, *notes, *named)]


def rule_queries() -> list[str]:
    return [always_answered(str(rule["expr"])) for rule in rules()]


def always_answered(query: str) -> str:
    """Let the last comparison answer 0 or 1. An alert that is not due has no answer."""
    return COMPARISON.sub(r" \1 bool \2", query.strip())


def _filled(query: str) -> str:
    for name, value in (("$__rate_interval", "10s"), ("$job", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    return always_answered(query)
