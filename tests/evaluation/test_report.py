"""What `cusearch eval` prints and writes besides the scores."""

from __future__ import annotations

import json

from cusearch_async.cli import eval as evaluate
from cusearch_async.cli.eval import Report
from cusearch_async.evaluation.findings import Paired, Samples
from cusearch_async.evaluation.judge import PROMPT, Verdicts
from cusearch_async.evaluation.scoring import summarize
from tests.dashboard.test_episodes import Letters
from tests.evaluation.test_scoring import EPISODES, QUESTIONS


def report(**changes):
    whole = summarize(EPISODES, QUESTIONS)
    plain = {
        "title": "a model, greedy",
        "scores": whole,
        "episodes": EPISODES,
        "conditions": {"engine": "bm25", "k": "3"},
        "recall": None,
        "samples": None,
        "probes": {},
        "found": [],
        "against": None,
        "against_name": "",
        "verdicts": None,
        "judge_failed": "",
    }
    return Report(**plain | changes)


def test_only_what_was_asked_for_is_said():
    assert report().lines() == ["engine bm25, k 3"]
    assert set(report().as_json()) == {"scores", "conditions", "recall", "probes", "findings", "questions"}


def test_the_file_has_every_question_with_its_score():
    rows = report().as_json()["questions"]
    assert [row["question_id"] for row in rows] == [episode.question_id for episode in EPISODES]
    assert [row["em"] for row in rows] == [episode.em for episode in EPISODES]


def test_all_that_was_asked_for_is_said():
    whole = report(
        recall=0.75,
        samples=Samples(4, 0.5, 0.8, 0.6, 0.1),
        probes={"closed": summarize(EPISODES, QUESTIONS)},
        found=["searching helps"],
        against=Paired(7, 2, 0.05, (0.01, 0.09), 0.004),
        against_name="other",
        verdicts=Verdicts("a-judge", PROMPT, 0.8, 0.7, 0.1),
    )
    lines = whole.lines()
    assert lines[1] == "retrieval recall 0.750 of the evidence"
    assert lines[2].startswith("closed: EM 0.500 [")
    assert lines[3] == "4 samples: pass@1 0.500, pass@4 0.800, agreement 0.600, abstained 0.100"
    assert lines[4] == (
        "judged by a-judge: 0.800 right; exact match agrees on 0.700; no verdict on 0.100, where it answers "
        "neither yes nor no"
    )
    assert lines[5] == (
        "less other: EM +0.050 [+0.010, +0.090], p = 0.004 (exact McNemar; 7 questions only here, 2 only there)"
    )
    assert lines[6] == "searching helps"
    kept = json.loads(json.dumps(whole.as_json()))
    assert kept["against"]["only_first"] == 7
    assert kept["judge"]["prompt"] == PROMPT


def test_without_a_pair_no_agreement_is_said():
    assert report(samples=Samples(1, 0.5, 0.5, None, 0.1)).lines()[1] == "1 sample: pass@1 0.500, abstained 0.100"
    assert report(samples=Samples(2, 0.5, 0.7, None, 0.9)).lines()[1] == (
        "2 samples: pass@1 0.500, pass@2 0.700, abstained 0.900"
    )


def test_it_is_written_as_json_and_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr("cusearch_async.models.load_tokenizer", lambda _: Letters())
    output = tmp_path / "new" / "scores.json"
    evaluate.write(output, report(recall=0.5), "a model")
    assert json.loads(output.read_text())["scores"]["all"]["em"] == 0.5
    assert json.loads(output.read_text())["recall"] == 0.5
    assert "a model, greedy" in output.with_suffix(".html").read_text()
