"""`cusearch study`, with a stand-in for `launch`."""

from __future__ import annotations

import argparse
import re

import pytest

from cusearch_async.cli import study
from cusearch_async.errors import StudyIncomplete
from cusearch_async.study import report, running
from cusearch_async.study.tables import Tables
from tests.study.one_study import fake_child
from tests.study.studies import FILE, plan_of

pytestmark = pytest.mark.system  # it starts processes, and draws


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Of a study of four runs, all in one figure."""
    monkeypatch.setattr(running, "start_child", fake_child)
    monkeypatch.setattr(running, "_POLL_S", 0.02)
    other_part = FILE[FILE.index('[[part]]\nname = "staleness"') :]
    plan_of(tmp_path, (other_part, ""), ("seeds = 3", "seeds = 2"), ("[true, false]", "[true]"))

    def run(**options):
        plain = {"file": tmp_path / "small.toml", "folder": tmp_path / "study"}
        plain |= {"report": False, "retry_failed": False, "max_runs": None}
        study.run(argparse.Namespace(**plain | options), [])
        return Tables.read(tmp_path / "study")

    return run


@pytest.fixture
def blank_figures(monkeypatch):
    """For tests of which runs are made, and not of what is drawn of them."""
    monkeypatch.setattr(report, "draw", lambda _curve, _variants, _tables, path: path.touch())


def test_it_is_made_in_pieces_and_says_how_long_the_rest_takes(command, tmp_path, capsys):
    with pytest.raises(StudyIncomplete, match="3 runs are to do and 0 failed"):
        command(max_runs=1)
    out = capsys.readouterr().out
    assert "study small: 4 runs, 0 done, 1 to do now\n" in out
    assert "left" not in out, "with nothing to judge by, and nothing left"
    tables = command()
    assert set(tables.statuses.values()) == {"done"}
    out = capsys.readouterr().out
    assert re.search(r"study small: 4 runs, 1 done, 3 to do now, about \d+ s left\n", out)
    assert len(re.findall(r"; about \d+ s left", out)) == 2
    assert "4 of 4 runs are done" in (tmp_path / "study" / "report.md").read_text()


@pytest.mark.usefixtures("blank_figures")
def test_a_failed_run_is_made_again_on_demand_only(command, monkeypatch):
    monkeypatch.setenv("FAKE_LAUNCH", "fail")
    with pytest.raises(StudyIncomplete, match="0 runs are to do and 2 failed"):
        command()
    monkeypatch.delenv("FAKE_LAUNCH")
    with pytest.raises(StudyIncomplete, match="2 failed"):
        command()
    assert set(command(retry_failed=True).statuses.values()) == {"done"}


@pytest.mark.usefixtures("blank_figures")
def test_a_report_makes_no_run_and_writes_the_csv_again(command, tmp_path):
    with pytest.raises(StudyIncomplete, match="no run yet"):
        command(report=True)
    with pytest.raises(StudyIncomplete):
        command(max_runs=2)
    (tmp_path / "study" / "runs.csv").unlink()
    with pytest.raises(StudyIncomplete, match="2 runs are to do"):
        command(report=True)
    assert (tmp_path / "study" / "runs.csv").read_text().count("\n") == 3


def test_a_first_run_that_fails_leaves_a_report(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_LAUNCH", "die")
    with pytest.raises(StudyIncomplete, match="3 runs are to do and 1 failed"):
        command(max_runs=1)
    assert ": killed by signal 9\n" in (tmp_path / "study" / "report.md").read_text()
