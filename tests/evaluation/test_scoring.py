"""Scores of held-out questions: means, intervals, and the pages made of them."""

from __future__ import annotations

import io
import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from cusearch_async.cli.eval import table
from cusearch_async.cli.launch import is_complete
from cusearch_async.config import load_config
from cusearch_async.data.questions import BESIDE_SCORES
from cusearch_async.errors import EpisodeFailed, InvalidTrajectory, SearchRefused, WriteFailed
from cusearch_async.evaluation.scores import Done, record, set_others_aside
from cusearch_async.evaluation.scoring import (
    EVAL_TICKETS,
    FIGURES,
    bootstrap,
    due_version,
    evaluate,
    score_all,
    summarize,
)
from cusearch_async.metrics import files
from cusearch_async.metrics.files import ScoresFile, Summaries, read_scores
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import epochs_and_steps, record_start
from cusearch_async.transport.interface import RunState
from cusearch_async.types import Question
from tests.strategies import make_trajectory


def question(number: int, category: str) -> Question:
    return Question(id=f"{category}/{number}", text="?", answers=("Ruble",), category=category)


QUESTIONS = [question(i, "nq" if i < 10 else "bamboogle") for i in range(30)]
EPISODES = [
    make_trajectory(
        i,
        0,
        em=float(i % 2),
        f1=0.5,
        depth=i % 3,
        prediction="the Ruble it is" if i % 5 else None,
        question=f"Question {i} <b>?",
    )
    for i in range(30)
]


def test_scores_are_means_by_category_and_over_all():
    scores = summarize(EPISODES, QUESTIONS)
    assert list(scores) == ["nq", "bamboogle", "all"]
    assert [scores[c]["count"] for c in scores] == [10, 20, 30]
    assert scores["all"]["em"] == 0.5
    assert scores["all"]["f1"] == 0.5
    assert scores["nq"]["depth"] == pytest.approx(np.mean([i % 3 for i in range(10)]))
    assert scores["nq"]["answered"] == scores["nq"]["sub_em"] == 0.8


def test_an_answer_contains_a_gold_one_by_the_metric_that_is_named():
    (asked,) = [question(0, "nq")]
    episodes = [make_trajectory(0, 0, prediction="about 1350 km", answers=("35",))]
    assert summarize(episodes, [asked])["all"]["sub_em"] == 1
    assert summarize(episodes, [asked], "strict")["all"]["sub_em"] == 0


def with_hops(number: int, category: str, hops: int | None) -> Question:
    return replace(question(number, category), metadata={} if hops is None else {"hops": hops})


def test_scores_of_a_benchmark_are_also_by_hops_where_it_has_several():
    hops = [2, 3, None] * 5
    asked = [with_hops(i, "musique", hops[i]) for i in range(15)] + [with_hops(i, "nq", 1) for i in range(15)]
    scores = summarize(EPISODES, asked)
    assert list(scores) == ["musique", "musique, 2 hops", "musique, 3 hops", "nq", "1 hop", "2 hops", "3 hops", "all"]
    assert [scores[name]["count"] for name in scores] == [15, 5, 5, 15, 15, 5, 5, 30]
    assert scores["musique, 2 hops"]["em"] == np.mean([i % 2 for i in range(0, 15, 3)])


def test_one_benchmark_of_several_hops_is_not_scored_by_hops_twice():
    assert list(summarize(EPISODES, [with_hops(i, "a/b", 1 + i % 2) for i in range(30)])) == [
        "a/b",
        "a/b, 1 hop",
        "a/b, 2 hops",
        "all",
    ]


def test_the_interval_is_the_bootstraps():
    rng = np.random.default_rng(5)
    values = (rng.random((400, 1)) < 0.3).astype(np.float64)
    low, high = bootstrap(values)[:, 0]
    mean = values.mean()
    normal = 1.96 * np.sqrt(mean * (1 - mean) / 400)
    assert low == pytest.approx(mean - normal, abs=0.008)
    assert high == pytest.approx(mean + normal, abs=0.008)
    assert np.array_equal(bootstrap(values), bootstrap(values)), "the same numbers give the same interval"


def test_every_figure_has_an_interval_around_it():
    for figures in summarize(EPISODES, QUESTIONS).values():
        for name in FIGURES:
            low, high = figures[f"{name}_interval"]
            assert low <= figures[name] <= high


def test_answers_that_are_all_wrong_or_all_right_leave_room_for_others():
    """Resampling gave [0, 0] for 20 wrong answers of 20, where Wilson's interval goes to 0.16."""
    questions = [QUESTIONS[0]] * 20
    for em, interval in ((0.0, [0.0, 0.1611]), (1.0, [0.8389, 1.0])):
        score = summarize([replace(EPISODES[0], em=em, f1=em)] * 20, questions)["all"]
        assert score["em_interval"] == pytest.approx(interval, abs=1e-4)
        assert score["f1_interval"] == score["em_interval"]
        assert score["reward_interval"] == [score["reward"]] * 2


def test_the_table_names_categories_counts_and_intervals():
    printed = Console(file=io.StringIO(), width=80)
    printed.print(table(summarize(EPISODES, QUESTIONS), "a model, greedy"))
    title, header, *rows = printed.file.getvalue().splitlines()
    assert "a model, greedy" in title
    assert [row.split()[0] for row in (header, *rows)] == ["category", "nq", "bamboogle", "all"]
    assert re.search(r"^all +30 +0\.50 \[0\.\d\d, 0\.\d\d\]", rows[-1])


@pytest.mark.parametrize(
    ("published", "scored", "newest", "in_order"),
    [
        (0, -1, 0, 0),
        (3, -1, 3, 0),
        (0, 0, None, None),
        (4, 0, None, None),
        (5, 0, 5, 5),
        (7, 0, 7, 5),
        (7, 5, None, None),
        (11, 5, 11, 10),
        (12, 5, 12, 10),
        (12, 11, 12, 12),
        (12, 10, 12, 12),
        (12, 12, None, None),
        (-1, -1, None, None),
    ],
)
def test_a_version_is_due_every_so_many_steps_and_at_the_end(atlas_config, published, scored, newest, in_order):
    state = RunState(published=published, weights=f"v{published}" if published >= 0 else "")
    for is_in_order, due in (("false", newest), ("true", in_order)):
        config = load_config(atlas_config, ["--eval.every", "5", "--steps", "12", "--eval.in_order", is_in_order])
        assert due_version(state, scored, config.eval, 12) == due


def announced(weights: str) -> RunState:
    return RunState(published=int(weights[1:7]), weights=weights)


def done_at(folder, weights: str) -> int:
    done = Done(folder)
    done.follow(announced(weights))
    return done.version


def test_an_evaluator_continues_after_incomplete_lines(tmp_path):
    output = tmp_path / "eval.jsonl"
    assert done_at(tmp_path, "v000005-e1") == -1
    output.write_bytes(b'{"step": 0, "epoch": 1}\n{"step": 5, "al\n\x00\x00\n[3]\n{"step": 10, "epo')
    assert done_at(tmp_path, "v000010-e1") == 0
    record(tmp_path, 10, "v000010-e1", 2.04, {"all": {"em": 0.5}})
    assert done_at(tmp_path, "v000010-e1") == 10
    rows = read_scores(output, [(1, 0)])
    each = {"question_id": [], "em": [], "depth": []}
    assert rows[-1] == {"step": 10, "epoch": 1, "seconds": 2.0, "all": {"em": 0.5}, "each": each}


def test_a_row_says_what_every_question_got(tmp_path):
    record(tmp_path, 10, "v000010-e1", 2.04, {}, EPISODES[:4])
    (row,) = read_scores(tmp_path / "eval.jsonl", [(1, 0)])
    ids = [episode.question_id for episode in EPISODES[:4]]
    assert row["each"] == {"question_id": ids, "em": [0, 1, 0, 1], "depth": [0, 1, 2, 0]}
    assert row.keys() == BESIDE_SCORES, "no source of questions has these names"


def test_only_what_is_new_of_the_scores_is_parsed(tmp_path, monkeypatch):
    """A tracker and the page parsed all of them every two seconds: with 50,000 questions and 100 versions, half of a
    core. A tracker keeps no figures of single questions."""
    parsed, loads = [], json.loads
    monkeypatch.setattr(files.json, "loads", lambda line: parsed.append(line) or loads(line))
    scored, summaries = ScoresFile(tmp_path / "eval.jsonl"), Summaries(tmp_path / "eval.jsonl")
    for version in range(3):
        record(tmp_path, version, f"v{version:06d}-e1", 1.0, {"all": {"em": 0.5}}, EPISODES[:4])
        assert [row["step"] for row in scored.read([])] == [*range(version + 1)]
        assert len(parsed) == version + 1
    assert "each" in scored.read([])[0]
    assert all("each" not in row for row in summaries.read([]))
    assert len(summaries.read([])) == 3


def test_scores_are_curves_in_tensorboard_and_those_of_a_course_that_was_left_go(tmp_path, monkeypatch):
    seconds = itertools.count(1000)  # TensorBoard reads the files in the order of the second in their names
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))
    for version, weights, em in ((0, "v000000-e1", 0.1), (6, "v000006-e1", 0.2), (4, "v000004-e2", 0.3)):
        record(tmp_path, version, weights, 1.0, {"all": {"em": em}, "2 links": {"em": em / 2}}, EPISODES[:4])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "scores")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/2 links/em", "eval/all/em"]
    points = [(point.step, round(point.value, 3)) for point in events.Scalars("eval/all/em")]
    assert points == [(0, 0.1), (4, 0.3)]


def test_versions_of_a_course_that_was_left_are_scored_again(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path), "--eval.every", "2", "--steps", "20"])
    record_start(config, epoch=1, step=0)
    for version in (0, 6, 10, 12, 14):
        record(tmp_path, version, f"v{version:06d}-e1", 1.0, {"all": {"em": 0.1}})
    done = Done(tmp_path)
    done.follow(announced("v000014-e1"))
    assert done.version == 14

    record_start(config, epoch=2, step=10)
    done.follow(announced("v000010-e2"))
    assert done.version == 10, "what the new learner went on from is what was scored"
    state = RunState(published=12, weights="v000012-e2")
    assert due_version(state, done.version, config.eval, 20) == 12
    record(tmp_path, 14, "v000014-e1", 1.0, {"all": {"em": 0.1}})  # was being scored while the learner went back
    starts = epochs_and_steps(tmp_path)
    assert [row["step"] for row in read_scores(tmp_path / "eval.jsonl", starts)] == [0, 6, 10]

    record(tmp_path, 12, "v000012-e2", 1.0, {"all": {"em": 0.9}})
    scores = read_scores(tmp_path / "eval.jsonl", starts)
    assert [(row["step"], row["epoch"], row["all"]["em"]) for row in scores[-2:]] == [(10, 1, 0.1), (12, 2, 0.9)]


def test_an_evaluator_with_a_folder_of_its_own_scores_them_again_too(tmp_path):
    """It has no starts. Before, the last version of the run could stay without a score."""
    for version in (0, 10, 20, 30):
        record(tmp_path, version, f"v{version:06d}-e1", 1.0, {"all": {"em": 0.1}})
    done = Done(tmp_path)
    done.follow(announced("v000033-e1"))
    assert done.version == 30
    done.follow(announced("v000020-e2"))
    assert done.version == 20
    at_last = RunState(epoch=2, resumed=10, published=30, weights="v000030-e2")  # it was busy scoring until then
    late = Done(tmp_path)
    late.follow(at_last)
    assert late.version == 10
    record(tmp_path, 30, "v000030-e2", 1.0, {"all": {"em": 0.2}})
    assert done_at(tmp_path, "v000030-e2") == 30


def test_such_an_evaluator_knows_the_learners_that_it_has_followed(tmp_path):
    """The score of a course that two learners ago was left counted again."""
    for version in (6, 8, 10):
        record(tmp_path, version, f"v{version:06d}-e1", 1.0, {"all": {"em": 0.1}})
    done = Done(tmp_path)
    done.follow(RunState(epoch=2, resumed=8, published=8, weights="v000008-e2"))
    assert done.version == 8
    done.follow(RunState(epoch=3, resumed=10, published=10, weights="v000010-e3"))
    assert done.version == 8


def test_a_run_is_complete_only_when_the_last_version_of_its_own_course_is_scored(atlas_config, tmp_path):
    config = load_config(atlas_config, ["--run.folder", str(tmp_path), "--eval.every", "2", "--steps", "4"])
    record_start(config, epoch=1, step=0)
    record(tmp_path, 4, "v000004-e1", 1.0, {})
    assert is_complete(4, config)
    record_start(config, epoch=2, step=2)
    assert not is_complete(4, config)
    record(tmp_path, 4, "v000004-e2", 1.0, {})
    assert is_complete(4, config)


def test_an_evaluator_on_a_full_disk_ends_with_one_line(tmp_path):
    (tmp_path / "eval.jsonl").symlink_to("/dev/full")
    with pytest.raises(WriteFailed, match=r"^cannot write .*eval\.jsonl: No space left on device$"):
        record(tmp_path, 4, "v000004-e1", 1.0, {})


class FakeRunner:
    def __init__(self) -> None:
        self.temperatures: set[float] = set()

    def check(self, questions):
        pass

    async def run(self, question, ticket, rollout, worker, temperature):
        self.temperatures.add(temperature)
        return make_trajectory(ticket, rollout)


async def test_a_version_whose_search_is_refused_is_not_scored_and_the_next_one_is(caplog):
    class Refused(FakeRunner):
        async def run(self, *args):
            raise SearchRefused("the retriever refuses the search for 'x' (422)")

    assert await score_all(Refused(), QUESTIONS, 7, 2) is None
    assert re.search(r"version 7 is not scored: question nq/\d failed 3 times: the retriever refuses", caplog.text)
    runner = FakeRunner()
    assert len(await score_all(runner, QUESTIONS, 8, 2)) == len(QUESTIONS)
    assert runner.temperatures == {0.0}, "greedy"


class Failing:
    """Its episodes fail some times, or take too long."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left, self.error = failures, error

    def check(self, questions):
        """All fit."""

    async def run(self, question, ticket, rollout, worker, temperature):
        if question == QUESTIONS[3] and self.left:
            self.left -= 1
            raise self.error
        return EPISODES[ticket - EVAL_TICKETS]


ERRORS = [
    (EpisodeFailed("no route to host"), "no route to host"),
    (InvalidTrajectory("reward must be finite, got nan"), "reward must be finite, got nan"),
    (TimeoutError(), "TimeoutError"),  # an environment's
]


@pytest.mark.parametrize("error", [error for error, _ in ERRORS])
async def test_an_episode_that_fails_is_tried_again(error):
    """One failure lost all others; one that hung, hung the evaluation."""
    assert await evaluate(Failing(2, error), QUESTIONS, 0.0, 8) == EPISODES


@pytest.mark.parametrize(("error", "why"), ERRORS)
async def test_a_question_that_fails_each_time_is_named(error, why):
    with pytest.raises(ExceptionGroup) as failed:
        await evaluate(Failing(3, error), QUESTIONS, 0.0, 8)
    assert str(failed.value.exceptions[0]) == f"question nq/3 failed 3 times: {why}"


def test_scores_of_an_earlier_run_in_an_evaluators_own_folder_are_set_aside(tmp_path):
    """They counted as this run's: nothing was scored, and the evaluator ended."""
    set_others_aside(tmp_path, "one")
    record(tmp_path, 20, "v000020-e1", 1.0, {"all": {"em": 0.1}})
    set_others_aside(tmp_path, "one")
    assert done_at(tmp_path, "v000020-e1") == 20
    set_others_aside(tmp_path, "two")
    assert done_at(tmp_path, "v000000-e1") == -1
    assert (tmp_path / "tensorboard" / "eval.jsonl.one").read_text().count("\n") == 1
    run_folder.mark(tmp_path, "atlas")  # a learner may come to this folder, as it could before
