"""The dashboard, the alert rules and the page of metrics name the metrics that the code exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvspec.adapters.vllm.metrics import PromMetrics
from kvspec.session.prometheus import METRICS

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parents[2]
DASHBOARD, ALERTS, PAGE = (
    ROOT / "ops" / "grafana.json",
    ROOT / "ops" / "alerts.yml",
    ROOT / "docs" / "metrics.md",
)
VLLM_DASHBOARD, VLLM_ALERTS = ROOT / "ops" / "vllm_grafana.json", ROOT / "ops" / "vllm_alerts.yml"
METRIC = re.compile(r"\bkvspec_\w+")
EXPORTED = {f"{m.name}_total" if m.kind == "counter" else m.name for m in METRICS}
HISTOGRAM = {f"kvspec_load_seconds_{end}" for end in ("bucket", "count", "sum")}


class _Vllm:
    """The classes of metrics that vLLM passes. They record the names that Prometheus sees."""

    def __init__(self) -> None:
        self.names = set[str]()

    def __getattr__(self, kind: str) -> Any:
        def make(*, name: str, **_: Any) -> Any:
            base = name.removeprefix("vllm:")
            ends = {"_counter_cls": ["_total"], "_gauge_cls": [""]}
            self.names |= {base + end for end in ends.get(kind, ["_bucket", "_count", "_sum"])}
            return self

        return make

    def labels(self, *_: object) -> None:
        """Take the labels of a value."""


def exported_by_vllm() -> set[str]:
    """Return the names of the connector's metrics in `/metrics`, without `vllm:`."""
    vllm = _Vllm()
    PromMetrics(vllm, ["model_name"], {})
    return vllm.names


def rules(alerts: Path = ALERTS) -> list[dict[str, Any]]:
    """Return the alert rules."""
    groups = yaml.safe_load(alerts.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(dashboard: Path = DASHBOARD) -> list[dict[str, Any]]:
    """Return the panels of the dashboard."""
    found: list[dict[str, Any]] = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    return found


def expressions(dashboard: Path = DASHBOARD, alerts: Path = ALERTS) -> list[str]:
    """Return all expressions of the dashboard and of the alerts."""
    shown = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in rules(alerts))]


def test_expressions_use_only_exported_metrics() -> None:
    """A misspelled metric would be an empty panel, or an alert that never fires."""
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert used
    assert set() == used - EXPORTED - HISTOGRAM


def test_dashboard_shows_every_metric() -> None:
    """A metric that nobody looks at is not worth its name."""
    shown = {
        name
        for panel in panels()
        for each in panel["targets"]
        for name in METRIC.findall(each["expr"])
    }
    assert set() == EXPORTED - shown


def test_expressions_for_vllm_use_only_metrics_that_its_connector_exports() -> None:
    """The names of vLLM's own page begin with `vllm:`, so the other files never match them."""
    used = {
        name
        for expression in expressions(VLLM_DASHBOARD, VLLM_ALERTS)
        for name in re.findall(r"vllm:(\w+)", expression)
    }
    assert set() == used - exported_by_vllm()
    assert {"kvspec_load_seconds_sum"} == exported_by_vllm() - used


def test_labels_in_expressions_exist() -> None:
    """Each label that an expression compares or keeps is one of its metrics."""
    known = {"engine_id", "rank", "le", *(label for metric in METRICS for label in metric.labels)}
    for expression in expressions():
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= known
        assert {*re.findall(r'(\w+)\s*(?:=~|!=|=)\s*"', expression)} <= known


@pytest.mark.parametrize("dashboard", [DASHBOARD, VLLM_DASHBOARD])
def test_panels_of_the_dashboard_do_not_overlap(dashboard: Path) -> None:
    """Each cell of the grid belongs to one panel, and each panel has its own id."""
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels(dashboard))
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels(dashboard)}) == len(panels(dashboard))


def test_page_lists_every_metric_and_alert() -> None:
    """The tables have one row for each of them."""
    rows = re.findall(r"^\| `([\w:]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    of_vllm = {f"vllm:{name}" for name in exported_by_vllm() if "_seconds_" not in name}
    alerts = [rule["alert"] for each in (ALERTS, VLLM_ALERTS) for rule in rules(each)]
    seconds = ["kvspec_load_seconds", "vllm:kvspec_load_seconds"]
    assert sorted([*EXPORTED, *of_vllm, *seconds, *alerts]) == sorted(rows)


@pytest.fixture
def promtool() -> str:
    """The tool of Prometheus that checks rules."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: it is in Debian's package prometheus")
    return found


@pytest.mark.parametrize("alerts", [ALERTS, VLLM_ALERTS])
def test_alerts_fire_for_faults_only(promtool: str, alerts: Path) -> None:
    """Each file of rules has a file of tests, which plays healthy traffic and faults."""
    tests = alerts.with_name(f"{alerts.stem}_test.yml")
    done = subprocess.run(  # noqa: S603 - our own files
        [promtool, "test", "rules", str(tests)], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    judged = {
        case["alertname"]
        for test in yaml.safe_load(tests.read_text(encoding="utf-8"))["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert {rule["alert"] for rule in rules(alerts)} == judged


def test_prometheus_parses_every_expression(promtool: str, tmp_path: Path) -> None:
    """Those of the dashboard too, with values in place of Grafana's variables."""
    plain = [
        expression.replace("$__rate_interval", "5m")
        for expression in [*expressions(), *expressions(VLLM_DASHBOARD, VLLM_ALERTS)]
    ]
    records = [{"record": f"r:{i}", "expr": text} for i, text in enumerate(plain)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": records}]}), "utf-8")
    done = subprocess.run(  # noqa: S603 - our own files
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
