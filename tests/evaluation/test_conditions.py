"""A score says what it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from cusearch_async.evaluation.conditions import conditions
from tests.evaluation.planted import QUESTIONS

FEW = QUESTIONS[:3]


def of(atlas_config, *overrides, model="Qwen/Qwen2.5-3B", questions=FEW):
    return conditions(load_config(atlas_config, list(overrides)), model, questions, "greedy")


def test_policy_questions_and_settings_are_all_there(atlas_config):
    named = of(atlas_config, "--retriever.noise", "0.25", "--episode.s_max", "4", "--run.seed", "7")
    assert named | {"questions": ""} == {
        "model": "Qwen/Qwen2.5-3B",
        "suite": "atlas",
        "questions": "",
        "seed": 7,
        "engine": "bm25 on atlas with noise 0.25, drawn for each search",
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
    ("overrides", "engine"),
    [
        ("--retriever.backend serper", "serper"),
        ("--retriever.backend serper --retriever.noise 0.5", "serper"),
        ("--retriever.noise 0.5 --retriever.stochastic false", "bm25 on atlas with noise 0.5, drawn for each query"),
        ("--retriever.stochastic false", "bm25 on atlas"),
        ("--retriever.distractors 1", "bm25 on atlas with 1 distractors, drawn for each search"),
        ("--retriever.bm25.tokenizer a.b:cut", "bm25 on atlas with tokenizer a.b:cut"),
        ("--retriever.rerank.model a/b", "bm25 on atlas with the best of 10 by a/b"),
        ("--retriever.backend dense --retriever.dense.encoder a/e", "dense on atlas with encoder a/e (flat)"),
        ("--retriever.backend zerosearch --retriever.zerosearch.model sim",
         "zerosearch by sim (sft, temperature 0.8, noise 0 to 0.5)"),
    ],
)  # fmt: skip
def test_what_decides_about_results_is_part_of_the_engine(atlas_config, overrides, engine):
    assert of(atlas_config, *overrides.split())["engine"] == engine


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
