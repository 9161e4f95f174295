"""The Grafana dashboard asks for series that the server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from paceline.serve.metrics import Metrics
from paceline.types import EngineStats, ReliabilityStats, ShapeStats, SpeculationStats

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "paceline.json"


def series() -> set[str]:
    shape = ShapeStats(
        depth=1, branching=1, reason="r", steps=1, committed=1, drafted=1, accepted=1
    )
    said = SpeculationStats(
        attempts=(1,), accepted=(1,), shapes=(shape,), reliability=(ReliabilityStats(),)
    )
    metrics = Metrics(lambda: EngineStats(speculation=said))
    metrics.count(200)
    families = text_string_to_metric_families(metrics.text().decode())
    return {sample.name for family in families for sample in family.samples}


def test_every_series_exists() -> None:
    board = json.loads(FILE.read_text())
    assert board["schemaVersion"] >= 39 and board["templating"]["list"][0]["type"] == "datasource"
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"paceline_\w+", text)}
    assert len(expressions) > 15 and named <= series()
    places = [tuple(panel["gridPos"][k] for k in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
