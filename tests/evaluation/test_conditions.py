"""A score says what it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from cusearch_async.evaluation.conditions import conditions, search_engine
from tests.evaluation.planted import QUESTIONS

FEW = QUESTIONS[:3]


def of(atlas_config, *overrides, model="Qwen/Qwen2.5-3B", questions=FEW):
    return conditions(load_config(atlas_config, list(overrides)), model, questions, "greedy", "bm25 over 2 passages")


def test_policy_questions_and_settings_are_all_there(atlas_config):
    named = of(atlas_config, "--episode.s_max", "4", "--run.seed", "7")
    assert named | {"questions": ""} == {
        "model": "Qwen/Qwen2.5-3B",
        "suite": "atlas",
        "questions": "",
        "seed": 7,
        "engine": "bm25 over 2 passages",
        "k": 2,
        "S_max": 4,
        "turn_tokens": 80,
        "observation_tokens": 88,
        "prompt": "atlas",
        "document_template": r"'{text}\n'",
        "format_weight": "0.2",
        "metric": "'squad'",
        "dtype": "float32",
        "sampling": "greedy",
    }


def test_prompts_that_begin_alike_are_told_apart(atlas_config):
    one, other = (
        of(atlas_config, "--environment.search.template", f"Answer.\n{end} {{question}}")["prompt"] for end in "ab"
    )
    assert one.startswith("Answer. (")
    assert one != other


@pytest.mark.parametrize(
    ("serves", "engine"),
    [("bm25 over 9 passages (2)", "bm25 over 9 passages (2)"), (None, "the one at http://wiki18.lan:8000")],
)
def test_the_engine_is_the_one_that_answers_whatever_this_config_says_of_a_corpus(atlas_config, serves, engine):
    """Two servers of users' own were both `bm25 on atlas`."""
    config = load_config(atlas_config, ["--retriever.url", "http://wiki18.lan:8000"])
    assert search_engine(config, serves) == engine


def test_an_agent_that_never_searches_has_no_engine(atlas_config):
    agent = {"name": "agent", "agent": "mine:answer", "searches": "false"}
    settings = [word for key, value in agent.items() for word in (f"--environment.search.{key}", value)]
    assert search_engine(load_config(atlas_config, settings), None) == "none"


def test_another_environment_and_another_reward_are_named(atlas_config, tmp_path, monkeypatch):
    """Scores of a user's class, and of another reward, were comparable with the search environment's."""
    (tmp_path / "mine_scored.py").write_text(
        "from cusearch_async.environments.search import SearchEnvironment\n"
        "class Mine(SearchEnvironment): ...\n"
        "def half(*given): return 0.5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plain = of(atlas_config)
    own = of(atlas_config, "--environment.search.name", "mine_scored:Mine")
    rewarded = of(atlas_config, "--environment.search.reward", "mine_scored:half")
    assert own == plain | {"environment": "mine_scored:Mine"}
    assert rewarded == plain | {"reward": "mine_scored:half"}


def test_the_engine_is_that_of_the_evaluated_environment(atlas_config):
    """Another one of the run may search."""
    agent = {"name": "agent", "agent": "mine:answer", "searches": "false"}
    settings = [word for key, value in agent.items() for word in (f"--environment.other.{key}", value)]
    config = load_config(atlas_config, [*settings, "--environment.search.share", "1", "--eval.environment", "other"])
    assert config.searching == ["search"]
    assert search_engine(config, "bm25") == "none"


def test_a_quantised_engine_is_named(atlas_config):
    said = of(atlas_config, "--rollout.vllm.quantization", "fp8", "--loss.correction", "tis")["dtype"]
    assert said == "float32, quantization fp8, KV cache auto"


def test_a_model_in_a_folder_is_named_by_its_whole_path(atlas_config, tmp_path, monkeypatch):
    folder = tmp_path / "step000203-e1" / "model"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert of(atlas_config, model="step000203-e1/model")["model"] == str(Path(folder).resolve())


def test_other_questions_have_another_checksum_and_their_number(atlas_config):
    changed = [*FEW[:2], replace(FEW[2], answers=("another",))]
    first, same, other, fewer = (
        of(atlas_config, questions=questions)["questions"] for questions in (FEW, list(FEW), changed, FEW[:2])
    )
    assert first == same
    assert len({first, other, fewer}) == 3
    assert first.startswith("3 (")
    assert fewer.startswith("2 (")


def test_a_suite_is_named_by_its_benchmarks(atlas_config):
    assert of(atlas_config, "--eval.suite", '["nq", "my.jsonl"]')["suite"] == "nq, my.jsonl"
