"""`cusearch alarms`."""

from __future__ import annotations

import pytest

from cusearch_async.alarms.rules import RULES
from cusearch_async.config import load_config
from cusearch_async.files import append_row
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start


@pytest.fixture
def folder(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path / "demo")])
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)
    return config.folder


@pytest.mark.parametrize(
    ("depths", "status", "said"),
    [
        ([3, 3, 3, 3], 0, f"4 steps, {len(RULES)} rules: none firing"),
        ([3, 3, 0, 0, 0], 1, "stops_searching at step 4: 1.03 searches an episode"),
        ([3, 3, 0, 0, 0, 6, 6, 6, 6], 0, "steps 3 to 4: stops_searching at step 4"),
    ],
)
def test_the_status_says_whether_an_alarm_fires(folder, cusearch, depths, status, said):
    for step, depth in enumerate(depths):
        append_row(folder / "metrics.jsonl", {"step": step, "epoch": 1, "depth/mean": depth})
    code, out = cusearch("alarms", str(folder))
    assert (code or 0) == status
    assert said in out


def test_without_settings_it_says_that_it_cannot_tell(folder, cusearch):
    (folder / "config.toml").unlink()
    assert "has no whole config.toml" in cusearch("alarms", str(folder))[0]


def test_all_rules_are_listed(cusearch):
    _, out = cusearch("alarms", "--rules")
    assert all(rule.name in out and rule.remedy.split()[0] in out for rule in RULES)
