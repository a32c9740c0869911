"""Questions without gold answers: for rewards of one's own, and refused where something compares with answers."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from cusearch_async.algorithm.answers import exact_match, f1_score, sub_exact_match
from cusearch_async.config import load_config
from cusearch_async.data.questions import first_question, load_eval_questions, load_run_questions
from cusearch_async.environments import NoSearch
from cusearch_async.environments.base import Episode
from cusearch_async.errors import ConfigError
from cusearch_async.types import Segment

REWARD = '[environment.e]\nreward = "docs.examples.rewards:brief"\n'
AGENT = '[environment.e]\nname = "agent"\nagent = "docs.examples.agent:answer"\n'
OWN = '[environment.e]\nname = "tests.environments.echo:Echo"\n'
REFUSED = (
    r"'golden_answers' must be .*, got None; the row has .*; without gold answers set environment\.LABEL\.reward, or"
)


@pytest.fixture
def config(tmp_path):
    """Of a run that asks, and is evaluated with, the rows of a file."""

    def load(text, rows, name="mine.jsonl"):
        source = tmp_path / name
        if name.endswith(".parquet"):
            pd.DataFrame(rows).to_parquet(source)
        elif name.endswith(".csv"):
            pd.DataFrame(rows).to_csv(source, index=False)
        else:
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "run.toml").write_text(
            f"run.name = 'r'\ndata.source = '{source}'\neval.suite = '{source}'\n" + text
        )
        return load_config(tmp_path / "run.toml")

    return load


@pytest.mark.parametrize("text", [REWARD, AGENT, OWN])
@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv", "mine.parquet"])
def test_they_are_read_where_a_reward_of_ones_own_may_score_them(config, caplog, text, name):
    run = config(text, [{"question": "Write of Pinsk."}, {"question": "Write of Brest."}], name)
    found = [*load_run_questions(run).all, *load_eval_questions(run), first_question(run, "e")]
    assert [(one.text, one.answers) for one in found[:2]] == [("Write of Pinsk.", ()), ("Write of Brest.", ())]
    assert {one.answers for one in found} == {()}
    (said,) = caplog.messages
    assert said.startswith("2 of 2 questions have no gold answers: EM and F1 are 0, and only a reward of yours scores")


NONE = [None, "", " ", [], "[]", [""], [None], {}, {"target": []}, float("nan")]


@pytest.mark.parametrize("blank", NONE, ids=repr)
def test_blank_gold_answers_are_none_there_and_others_are_read(config, blank):
    rows = [
        {"question": "a", "golden_answers": blank, "extra_info": {"rubric": "short"}},
        {"question": "b", "reward_model": {"style": "rubric", "ground_truth": blank}},
        {"question": "c", "golden_answers": ["nan"]},
    ]
    found = load_run_questions(config(REWARD, rows)).all
    assert [one.answers for one in found] == [(), (), ("nan",)]
    assert found[0].metadata["rubric"] == "short"


def test_a_truth_that_is_no_answer_is_metadata(config):
    """A rubric of VERL's reward_model was dropped, and nothing said so."""
    rubric = {"rubric": "must cite 12", "points": 3}
    for truth in (rubric, json.dumps(rubric)):
        for row in ({"reward_model": {"style": "rule", "ground_truth": truth}}, {"ground_truth": truth}):
            (found,) = load_run_questions(config(REWARD, [{"question": "a", **row}])).all
            assert (found.answers, found.metadata) == ((), {"ground_truth": rubric})


@pytest.mark.parametrize("holder", ["metadata", "extra_info"])
def test_a_text_and_a_value_are_metadata_beside_an_answer(config, holder):
    told = {"text": "a note", "value": 3}
    (found,) = load_run_questions(config(REWARD, [{"question": "a", "answer": "me", holder: told}])).all
    assert found.metadata == told


def test_the_metadata_of_the_row_goes_before_that_of_its_reward_model(config):
    row = {"question": "a", "metadata": {"rubrics": ["mine"]}, "reward_model": {"rubrics": ["theirs"]}}
    (found,) = load_run_questions(config(REWARD, [row])).all
    assert found.metadata == {"rubrics": ["mine"]}


@pytest.mark.parametrize("told", [{"answer": "42", "tol": 1}, {"target": "b"}], ids=repr)
@pytest.mark.parametrize("holder", ["metadata", "extra_info"])
def test_an_answer_that_is_there_alone_is_metadata_for_a_reward_of_ones_own(config, told, holder):
    (found,) = load_run_questions(config(REWARD, [{"question": "a", holder: told}])).all
    assert (found.answers, found.metadata) == ((), told)


@pytest.mark.parametrize("row", [{"aliases": ["Bob"]}, {"answer": "", "answer_aliases": ["Bob"]}], ids=repr)
def test_other_spellings_of_no_answer_are_none(config, row):
    (found,) = load_run_questions(config(REWARD, [{"question": "a"} | row])).all
    assert found.answers == ()


NORMALIZED = {f"normalized_{name}": ["me"] for name in ("golden_answers", "ground_truth", "answers", "value")}


def test_answers_are_no_metadata(config):
    """A program that shows its task's metadata to the policy would tell them."""
    told = {"rubric": "short", "answer": "me", "answer_aliases": ["I"], "golden_answers": ["me"]}
    row = {"question": "a", "answer": "me", "extra_info": told}
    for given in (
        {},
        {"metadata": told | {"possible_answers": ["me"], "o_aliases": ["I"], "Gold Answers": ["me"]}},
        {"metadata": told | NORMALIZED},
    ):
        (found,) = load_run_questions(config(REWARD, [row | given])).all
        assert found.metadata == {"rubric": "short"}
        assert set(found.answers) == {"me", "I"}


@pytest.mark.parametrize(
    ("model", "answers", "metadata"),
    [
        ({"ground_truth": "a", "style": "rubric", "rubrics": ["r1"]}, ("a",), {"rubrics": ["r1"]}),
        ({"ground_truth": {"target": ["a"], "rubric": "brief"}}, ("a",), {"ground_truth": {"rubric": "brief"}}),
        ({"rubric": "r"}, (), {"rubric": "r"}),
        (
            {
                "ground_truth": {
                    "target": ["a"],
                    "aliases": ["b"],
                    "normalized_value": "a",
                    "rubric": "brief",
                    "n": None,
                }
            },
            ("a", "b"),
            {"ground_truth": {"rubric": "brief"}},
        ),
    ],
    ids=repr,
)
def test_what_stands_beside_the_truth_is_metadata(config, model, answers, metadata):
    """A rubric beside the answer was dropped, and nothing said so."""
    (found,) = load_run_questions(config(REWARD, [{"question": "a", "reward_model": model}])).all
    assert (found.answers, found.metadata) == (answers, metadata)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.csv", "mine.parquet"])
@pytest.mark.parametrize(
    "text", ["", "retriever.backend = 'zerosearch'\n" + REWARD, "retriever.backend = 'zerosearch'\n" + AGENT]
)
def test_they_are_refused_where_a_reward_or_a_simulated_engine_needs_answers(config, text, name):
    run = config(text, [{"question": "Write of Pinsk."}], name)
    for read in (load_run_questions, load_eval_questions, lambda run: first_question(run, next(iter(run.environment)))):
        with pytest.raises(ConfigError, match=REFUSED):
            read(run)


def test_an_agent_that_does_not_search_needs_none_behind_a_simulated_engine(config):
    run = config(f"retriever.backend = 'zerosearch'\n{AGENT}searches = false\n", [{"question": "Write of Pinsk."}])
    assert [one.answers for one in load_run_questions(run).all] == [()]


def test_a_judge_needs_answers_to_compare_with(config):
    run = config(f"eval.judge.url = 'http://127.0.0.1:1/v1'\n{REWARD}", [{"question": "Write of Pinsk."}])
    assert len(load_run_questions(run).all) == 1
    with pytest.raises(ConfigError, match=REFUSED):
        load_eval_questions(run)


async def test_em_and_f1_are_0_and_the_reward_is_ones_own(config):
    run = config(
        REWARD.replace("docs.examples.rewards:brief", "tests.environments.rewards:half"),
        [{"question": "Write of Pinsk."}],
    )
    (question,) = load_run_questions(run).all
    episode = Episode(question=question, ticket=0, rollout=0, segments=[Segment("model", "<answer>Pinsk</answer>")])
    environment = run.environment["e"].make(NoSearch())
    score = await environment.final_score(episode)
    assert (score.em, score.f1, score.prediction) == (0.0, 0.0, "Pinsk")
    assert score.reward == 0.5
    assert [compare("Pinsk", ()) for compare in (exact_match, sub_exact_match, f1_score)] == [0.0] * 3
