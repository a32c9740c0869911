"""Short campaigns: every kind of fault at least once. `make test-chaos` has 1,800."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.object_stores import S3
from tests.system.chaos.__main__ import main
from tests.system.chaos.campaign import CAMPAIGNS, is_clean, run
from tests.system.chaos.faults import KINDS
from tests.system.chaos.scene import tiny_model

pytestmark = pytest.mark.system

ON_THE_ENGINE = {"kill worker", "pause worker", "kill learner", "kill redis", "torn weights", "cut", "partition"}
"""Faults that vLLM may take otherwise than an engine that costs nothing; the others are left to the long campaign."""

ON_AGENTS = ON_THE_ENGINE - {"torn weights"} | {"kill agent", "pause worker"}


ON_TRANSFERS = {kind.name for kind in KINDS if kind.lane in ("transfer", "objects")} | {"kill learner", "partition"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_what_a_campaign_lacks_is_told_before_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.system.chaos.__main__.SERVER", tmp_path / "moto_server")
    monkeypatch.setattr("sys.argv", ["chaos", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main()
    assert "moto_server: make setup-sdks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "only"),
    [
        pytest.param("asynchronous", set(), id="asynchronous"),
        pytest.param("deferred", set(), id="deferred", marks=pytest.mark.slow),
        pytest.param("http", ON_TRANSFERS, id="http"),
        pytest.param("object", ON_TRANSFERS, id="object", marks=S3.marks),
        pytest.param("forgetful", set(), id="forgetful", marks=pytest.mark.slow),
        pytest.param("engine", ON_THE_ENGINE, id="engine", marks=pytest.mark.slow),
        pytest.param("elastic", set(), id="elastic", marks=pytest.mark.slow),
        pytest.param("agents", ON_AGENTS, id="agents", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_run_under_every_kind_of_fault_loses_nothing(tmp_path: Path, model: Path, name: str, only: set[str]):
    campaign = next(campaign for campaign in CAMPAIGNS if campaign.name == name)
    summary = run(campaign, tmp_path / name, model, 0, seed=1, only=only)
    assert is_clean(summary), json.dumps(summary, indent=1)
    kinds = {kind.name for kind in KINDS if kind.lane in campaign.lanes and (not only or kind.name in only)}
    assert summary["faults"].keys() == kinds
    assert summary["trajectories"] >= 16
    assert 0 < summary["staleness_max"] <= 2
