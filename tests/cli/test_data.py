"""`cusearch data`: what is wrong with a file, by row, and files in Search-R1's schema."""

from __future__ import annotations

import json
import re
import sys

import pytest

from cusearch_async.cli.main import main
from cusearch_async.data.questions import load_questions

GOOD = {"question": "who wrote Dubliners", "golden_answers": ["James Joyce"], "data_source": "nq", "id": "1"}


@pytest.fixture
def write(tmp_path):
    def put(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return put


@pytest.fixture
def cusearch(monkeypatch, capsys):
    """Exit status and output of a command."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["cusearch", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            main()
        except SystemExit as ended:
            return ended.code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run


def test_a_good_file_is_summed_up(cusearch, write):
    status, output = cusearch("data", "check", write(GOOD, GOOD | {"id": "2", "data_source": "hotpotqa"}))
    assert status == 0
    assert "2 good rows, 1.0 answers each; 0 problems" in output
    assert "hotpotqa" in output


def test_every_wrong_row_is_named_and_the_good_ones_are_counted(cusearch, write):
    rows = [GOOD, "{", GOOD | {"golden_answers": []}, GOOD | {"question": "[bold]"}, GOOD | {"id": "3", "question": ""}]
    status, output = cusearch("data", "check", write(*rows))
    assert status == 1
    assert "2 good rows, 1.0 answers each; 4 problems" in output
    assert "line 2: is not JSON" in output
    assert "line 3: 'golden_answers' must be a list of non-blank texts, got []" in output
    assert "line 4: the id 'nq/1' was used before" in output
    assert "line 5: 'question' must be non-blank text, got ''" in output


def test_answers_that_scoring_makes_blank_are_warned_about_and_no_problem(cusearch, write):
    blank = [GOOD | {"id": f"b{i}", "golden_answers": ["The The"]} for i in range(5)]
    status, output = cusearch("data", "check", write(GOOD, *blank))
    assert status == 0
    output = " ".join(output.split())
    assert "6 good rows, 1.0 answers each; 0 problems" in output
    assert "5 cannot be answered right, because scoring removes articles and punctuation" in output
    assert "(line 2: 'The The'; line 3: 'The The'; line 4: 'The The'; …)" in output


def test_lengths_are_checked_by_a_runs_model_and_template_and_else_said_not_to_be(cusearch, write, atlas_config):
    path = write(GOOD, GOOD | {"id": "2", "question": "who " * 500})
    status, output = cusearch("data", "check", path)
    assert status == 0
    assert "lengths were not checked: they depend on the model and the template of a run; add --config CONFIG" in output
    status, output = cusearch("data", "check", path, "--config", str(atlas_config))
    assert status == 1
    assert "not checked" not in output
    assert "1 problem" in output
    assert re.search(r"line 2: its prompt has \d+ tokens, over episode\.max_prompt_tokens \(96\)", output)
    longer = ("--episode.max_prompt_tokens", "9000")
    assert cusearch("data", "check", path, "--config", str(atlas_config), *longer)[0] == 0


def test_of_many_problems_the_first_are_shown(cusearch, write):
    status, output = cusearch("data", "check", write(*(["{"] * 50)))
    assert status == 1
    assert output.count("is not JSON") == 20
    assert "and 30 more" in output
    assert "no question can be used" in output


def test_each_of_several_files_is_reported(cusearch, write):
    status, output = cusearch("data", "check", write("{", name="bad.jsonl"), write(GOOD, name="good.jsonl"))
    assert status == 1
    assert "bad.jsonl" in output
    assert "1 good row, " in output


def test_convert_writes_what_is_read_back(cusearch, write, tmp_path):
    source, output = write(GOOD, GOOD | {"id": "2"}), tmp_path / "new" / "train.parquet"
    status, said = cusearch("data", "convert", source, "--output", str(output))
    assert status == 0
    assert "2 questions in" in said
    assert load_questions([str(output)]) == load_questions([source])
