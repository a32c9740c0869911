"""docs/replication.md and its report say what the committed tables say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import xxhash

from cusearch_async.study.plan import read_file, read_plan
from cusearch_async.study.report import write_report
from cusearch_async.study.tables import Tables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "replication"
PLAN = ROOT / "cusearch_async" / "configs" / "studies" / "replication.toml"
MIDDLE = range(9, 16)
"""Learner steps in the middle of the training."""


@pytest.fixture(scope="module")
def tables():
    return Tables.read(FOLDER)


@pytest.fixture(scope="module")
def steps(tables):
    """Of the main part's runs with a stochastic engine."""
    runs = tables.runs[tables.runs["parts"].str.contains("methods") & tables.runs["retriever.stochastic"]]
    return tables.steps.merge(runs[["run", "method.name"]], on="run")


def test_the_report_is_that_of_the_tables(tables, tmp_path):
    report = write_report(read_plan(PLAN), tables, tmp_path).read_text(encoding="utf-8")
    assert (FOLDER / "report.md").read_text(encoding="utf-8") == report
    assert {path.name for path in FOLDER.glob("figures/*")} == {path.name for path in tmp_path.glob("figures/*")}


def test_measures_and_claims_are_those_that_were_fixed():
    """With the checksum of what stood in the file before the first run."""
    file = read_file(PLAN)
    fixed = json.dumps([file.study.primary, [claim.model_dump(mode="json") for claim in file.claim]], sort_keys=True)
    assert xxhash.xxh3_64_hexdigest(fixed.encode()) == "61d9b55a04029aab"
    assert read_file(FOLDER / "study.toml") == file


def rows_of(text):
    """Of the tables in a text: first cell -> the cells behind it, of each table that has such a row."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| "):
            first, *others = [cell.strip() for cell in line.strip("| ").split(" | ")]
            found.setdefault(first, []).append(others)
    return found


def test_the_page_quotes_its_report():
    """Each effect on the page, such as +0.005 [-0.010, +0.020], is in a row of the report with the same first cell."""
    page, report = ((FOLDER.parent / name).read_text() for name in ("replication.md", "replication/report.md"))
    in_report, quoted = rows_of(report), 0
    for first, rows in rows_of(page).items():
        effects = [cell for cells in rows for cell in cells if re.match(r"[+-]\d\.\d{3} ", cell)]
        known = {cell for cells in in_report.get(first, []) for cell in cells}
        assert set(effects) <= known, first
        quoted += len(effects)
    assert quoted
    outside = [line for line in page.splitlines() if not line.startswith("| ")]
    loose = re.findall(r"[+-]\d\.\d{3} (?:\[[^\]]+\]|\(no interval\))", "\n".join(outside))
    assert [effect for effect in loose if effect not in report] == []


def test_failed_runs_are_named_in_the_report(tables):
    report = (FOLDER / "report.md").read_text()
    assert [run for run, status in tables.statuses.items() if status == "failed" and f"- {run}:" not in report] == []


def test_the_hard_world_can_tell_methods_apart(tables, steps):
    """What `configs/atlas-hard.toml` is for: room to learn, rewards that differ, every depth."""
    runs = tables.runs.set_index("run")
    full = [run for run in dict.fromkeys(steps["run"]) if runs.loc[run, "method.name"] == "grpo_full"]
    assert runs.loc[full, "em_first"].between(0.2, 0.4).all()
    assert runs.loc[full, "em_last"].mean() > 0.6
    middle = steps[steps["step"].isin(MIDDLE)]
    flat = middle.groupby("method.name")["groups/zero_variance_share"].mean()
    assert flat["grpo_full"] < 0.4
    depths = np.array([json.loads(depths) for depths in middle["depth/generated"]]).sum(axis=0)
    assert (depths > 0.02 * depths.sum()).all()
