"""The Grafana dashboard and the alert rules name metrics and parts of the run book that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from lancewal import metrics

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD, ALERTS = DOCS / "grafana" / "lancewal.json", DOCS / "grafana" / "alerts.yml"


def known_metrics() -> set[str]:
    """As they are described in the documentation, which a test compares with what is exported."""
    found = set(re.findall(r"^\| `(lancewal_\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    return found | {f"{name}_{part}" for name in found for part in ("bucket", "count")}


def test_every_metric_of_the_dashboard_and_the_rules_exists() -> None:
    named = set(re.findall(r"lancewal_\w+", DASHBOARD.read_text() + ALERTS.read_text()))
    assert len(named) > 20
    assert named <= known_metrics()
    assert {f"{name}_total" for name, *_ in metrics.WRITER_COUNTERS} <= known_metrics()


def test_the_slowest_puts_and_reads_are_shown() -> None:
    shown = DASHBOARD.read_text()
    for label, name in (("operation", "read"), ("table", "put")):
        rate = f"sum by (le, {label}) (rate(lancewal_{name}_latency_seconds_bucket"
        assert f"histogram_quantile(0.99, {rate}" in shown


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    document = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    for panel in panels:
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


def test_every_alert_says_what_to_do() -> None:
    run_book = (DOCS / "runbook.md").read_text()
    anchors = {re.sub(r"[^a-z]+", "-", head.lower()) for head in re.findall(r"^## (.+)$", run_book, re.M)}
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md"
        assert anchor in anchors
        assert f"`{rule['alert']}`" in run_book
        assert rule["labels"]["severity"] in ("warning", "critical")
