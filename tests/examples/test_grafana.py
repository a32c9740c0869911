"""The dashboard for Grafana asks for what the page's server gives to Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cusearch_async.dashboard.prometheus import OF_WORKER, exposition
from cusearch_async.metrics import table

BOARD = json.loads((Path(__file__).parents[2] / "docs" / "examples" / "grafana.json").read_text(encoding="utf-8"))


def test_every_figure_is_one_that_is_given():
    row = dict.fromkeys(table.names(), 1.0) | {"depth/generated": [1], "depth/selected": [1]}
    worker = dict.fromkeys(OF_WORKER, 1.0) | {"name": "w", "is_alive": True}
    given = exposition("demo", row, ["drifts"], {"workers": [worker]}).decode()
    known = set(re.findall(r"^(cusearch_\w+)\{", given, re.MULTILINE))
    asked = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert len(asked) > 20
    for expression in [*asked, BOARD["templating"]["list"][1]["query"]]:
        assert set(re.findall(r"cusearch_\w+", expression)) <= known
    for expression in asked:
        assert 'run="$run"' in expression


def test_panels_have_places_of_their_own():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in BOARD["panels"]}) == len(places)
