"""How a process knows which run it means, and how it tells that from another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cusearch_async.config import load_config
from cusearch_async.environments.templates import ATLAS
from cusearch_async.errors import ContractMismatch
from cusearch_async.models import load_tokenizer
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import (
    DATA,
    MODEL,
    NOBODY,
    SERVED,
    Difference,
    Identity,
    differences,
    has_joined,
    identity_of,
    not_this_run,
    texts_of,
)
from cusearch_async.types import Question
from tests.fakes import STARTER
from tests.run.questions import CHANGED, QUESTIONS

TOKENIZER = load_tokenizer(str(STARTER))


def identity(*overrides: str, questions: list[Question] = QUESTIONS, model: Path = STARTER) -> Identity:
    tokenizer = TOKENIZER if model == STARTER else load_tokenizer(str(model))
    return identity_of(load_config(Path("atlas"), ["--model.path", str(model), *overrides]), questions, tokenizer)


OURS = identity()
CHANGES = {
    "run.seed": "7",
    "model.dtype": "bfloat16",
    "learner.lora.rank": "8",
    "learner.lora.alpha": "8",
    "learner.lora.targets": "q_proj",
    "environment.search.name": "docs.examples.calculator:Calculator",
    "environment.search.share": "2",
    "environment.search.template": "paper",
    "environment.search.reward": "tests.environments.rewards:half",
    "environment.search.document_template": "'É {text}\\n\\n'",
    "environment.search.format_weight": "0.3",
    "environment.search.metric": "strict",
    "episode.s_max": "4",
    "episode.temperature": "0.7",
    "episode.max_prompt_tokens": "95",
    "episode.max_turn_tokens": "79",
    "episode.max_observation_tokens": "87",
    "model.uses_chat_template": "false",
    "pool.questions": "65",
    "pool.rollouts": "4",
    "pool.order": "oldest_complete",
    "pool.max_staleness": "3",
    "pool.defer": "3",
    "pool.max_attempts": "6",
    "method.name": "random",
    "method.budget": "64",
    "method.singleton": "zero",
    "method.advantage_std": "false",
    "method.phase_reserve": "0.25",
    "method.mixed_groups_only": "true",
    "retriever.backend": "dense",
    "retriever.web.url": "http://127.0.0.1:1/search",
    "retriever.bm25.tokenizer": "tests.retrieval.tokenizers:letters",
    "retriever.topk": "3",
    "retriever.distractors": "1",
    "retriever.noise": "0.1",
    "retriever.stochastic": "false",
    "retriever.corpus": "other.jsonl",
    "retriever.dense.encoder": "intfloat/e5-small-v2",
    "retriever.dense.query_prefix": "",
    "retriever.dense.passage_prefix": "",
    "retriever.dense.pooling": "cls",
    "retriever.dense.normalize": "false",
    "retriever.dense.max_query_tokens": "64",
    "retriever.dense.max_passage_tokens": "64",
    "retriever.dense.kind": "hnsw",
    "retriever.dense.probes": "32",
    "retriever.rerank.model": "cross-encoder/ms-marco-MiniLM-L12-v2",
    "retriever.rerank.candidates": "20",
    "retriever.rerank.max_tokens": "256",
    "retriever.zerosearch.model": "simulator",
    "retriever.zerosearch.mode": "prompt",
    "retriever.zerosearch.p_start": "0.1",
    "retriever.zerosearch.p_end": "0.6",
    "retriever.zerosearch.base": "2",
    "retriever.zerosearch.steps": "100",
    "retriever.zerosearch.temperature": "0.5",
    "retriever.zerosearch.max_tokens": "500",
}
"""Setting -> another value than the atlas config's."""
FINGERPRINTS = {
    DATA: identity(questions=QUESTIONS[:2]),
    MODEL: Identity(OURS.terms | {MODEL: "385 tokens (0)"}),
    "payload_schema": Identity(OURS.terms | {"payload_schema": "1"}),
}
OTHERS = {key: identity(f"--{key}", value) for key, value in CHANGES.items()} | FINGERPRINTS
"""Key -> a contract that differs in it."""


# --- the contract -------------------------------------------------------------------------------------


def keys_of(found: list[Difference]) -> list[str]:
    return [difference.key for difference in found]


OF_SDGA = {"method.phase_reserve", "method.mixed_groups_only"}
"""Settings that method.name = "random" does not have."""


def test_every_key_of_the_contract_has_a_test():
    assert OTHERS.keys() == OURS.terms.keys()
    for key, other in OTHERS.items():
        changed = keys_of(differences(other.terms, OURS.terms))
        assert sorted(changed) == sorted({key} | (OF_SDGA if key == "method.name" else set()))
        assert other.digest != OURS.digest


@pytest.mark.parametrize(
    "override",
    [
        ("episode.timeout_s", "7"),
        ("rollout.max_episodes", "200"),
        ("rollout.cores", "[0]"),
        ("rollout.vllm.kv_cache_memory_bytes", "67108864"),
        ("redis.url", "redis://elsewhere:1/0"),
        ("redis.lease_s", "7"),
        ("redis.max_mib", "7"),
        ("retriever.url", "http://elsewhere:1"),
        ("retriever.timeout_s", "31"),
        ("retriever.max_answer_mib", "8"),
        ("retriever.dense.device", "cuda"),
        ("retriever.web.per_second", "1"),
        ("learner.lr", "0.5"),
        ("run.steps", "7"),
        ("eval.every", "7"),
    ],
    ids=lambda override: override[0],
)
def test_what_may_differ_per_process_is_not_in_it(override):
    assert identity(f"--{override[0]}", override[1]) == OURS


def test_what_the_retriever_serves_is_in_it_once_it_has_been_asked():
    ours, theirs = OURS.with_retriever("bm25 over 10 passages (1)"), OURS.with_retriever(None)
    assert differences(ours.terms, theirs.terms) == [(SERVED, "bm25 over 10 passages (1)", "not reported")]
    for asked, run, has_one in ((ours, ours, True), (OURS, OURS, True), (OURS, ours, False), (OURS, NOBODY, False)):
        assert has_joined("r", asked, run) is has_one
    with pytest.raises(ContractMismatch, match=r"match run 'r': run\.seed is 0 here and 7 in the run; use the"):
        has_joined("r", OURS, OTHERS["run.seed"].with_retriever(None))


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def change_json(path: Path, **changes: Any) -> None:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))


def test_a_model_is_the_same_in_another_folder_with_another_dtype_and_history(tmp_path):
    model = copy_of(STARTER, tmp_path)
    change_json(model / "config.json", dtype="float16", transformers_version="4.0", _name_or_path="x", use_cache=False)
    assert identity(model=model) == OURS


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"rms_norm_eps": 0.1}),
        ("config.json", {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}),
        ("tokenizer_config.json", {"eos_token": "</search>"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}"}),
    ],
)
def test_another_config_special_token_or_chat_template_is_another_model(tmp_path, file, changes):
    model = copy_of(STARTER, tmp_path)
    change_json(model / file, **changes)
    assert keys_of(differences(identity(model=model).terms, OURS.terms)) == [MODEL]


def test_the_arguments_of_the_chat_template_are_agreed_on():
    other = identity("--model.chat_template", "{enable_thinking = false}")
    assert differences(other.terms, OURS.terms) == [("model.chat_template.enable_thinking", "False", "not set")]


def test_a_template_is_its_text_wherever_a_process_has_it(tmp_path):
    for name, text in (("a", "Ask {question}"), ("b", "Ask {question}"), ("c", "Ask: {question}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    first, copy, other = (identity("--environment.search.template", str(tmp_path / name)) for name in "abc")
    assert first == copy
    assert first != other
    named, spelled = identity("--environment.search.template", "atlas"), ATLAS.text
    assert named != identity("--environment.search.template", spelled), "the notices differ"


def test_another_vocabulary_is_another_model(tmp_path):
    model = copy_of(STARTER, tmp_path)
    content = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(content.replace('"</search>"', '"</Search>"'))
    assert identity(model=model).terms[MODEL] != OURS.terms[MODEL]


@pytest.mark.parametrize("questions", CHANGED.values(), ids=CHANGED)
def test_other_questions_or_another_order_is_other_data(questions):
    assert identity(questions=questions).terms[DATA] != OURS.terms[DATA]
    assert OURS.terms[DATA].startswith("3 (")


def test_what_a_file_says_besides_of_a_question_changes_no_run():
    known = [replace(question, metadata={"hops": 2}, evidence=("x",)) for question in QUESTIONS]
    assert identity(questions=known) == OURS


# --- what differs ---------------------------------------------------------------------------------------


def test_all_differences_are_named_those_of_the_run_alone_too():
    was, now = {"a": {"x": 1, "y": [1], "z": 2}, "b": True}, {"a": {"x": 1, "y": [2]}, "b": False, "c": 0}
    found = differences(texts_of(now), texts_of(was))
    assert [str(difference) for difference in found] == [
        "a.y: [1] -> [2]",
        "b: True -> False",
        "c: not set -> 0",
        "a.z: 2 -> not set",
    ]
    assert str(not_this_run("r", found)) == (
        "this process does not match run 'r': a.y is [2] here and [1] in the run, b is False here and True in the run, "
        "c is 0 here and not set in the run, a.z is not set here and 2 in the run; use the settings, data and version "
        "of the run (config.toml in its folder), or another run.name and run.folder; only its learner can change them, "
        "with --accept-changes"
    )
    assert NOBODY.digest == ""


@pytest.mark.parametrize("key", ["pool.rollouts", "model.dtype", "learner.lora.rank", "pool.order"])
def test_what_a_run_cannot_change_is_said(key):
    """Its learner was told to be started with --accept-changes, which refused it, too."""
    said = str(not_this_run("r", differences({"run.seed": "1", key: "6"}, {"run.seed": "0", key: "3"})))
    assert said.endswith(f"; in a run that has begun {key} cannot change: `cusearch reset` deletes it")


# --- the folder -----------------------------------------------------------------------------------------


def test_a_folder_that_was_moved_is_the_same_run_and_a_new_one_is_another(tmp_path):
    run_folder.mark(tmp_path / "a", "atlas")
    known = NOBODY.in_folder(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert has_joined("atlas", NOBODY.in_folder(tmp_path / "b"), known)
    assert has_joined("atlas", NOBODY.in_folder(tmp_path / "a"), NOBODY)
    assert has_joined("atlas", NOBODY, known), "a worker needs no folder of the run"
    for made_new in (False, True):
        if made_new:
            run_folder.mark(tmp_path / "a", "atlas")
        with pytest.raises(ContractMismatch, match=rf"run\.folder is {tmp_path / 'a'} on .* and {tmp_path / 'a'} on "):
            has_joined("atlas", NOBODY.in_folder(tmp_path / "a"), known, accepts_changes=True)


def test_who_may_delete_what_redis_holds(tmp_path):
    def may_delete(known: Identity, name: str) -> bool:
        return NOBODY.in_folder(tmp_path / name).may_delete(known)

    run_folder.mark(tmp_path / "a", "atlas")
    run_folder.mark(tmp_path / "b", "atlas")
    known = NOBODY.in_folder(tmp_path / "a")
    assert may_delete(known, "a")
    assert may_delete(NOBODY, "b"), "nobody's"
    assert not may_delete(known, "b")
    assert not may_delete(known, "nowhere")
    shutil.rmtree(tmp_path / "a")
    elsewhere = replace(known, host="another-host")
    assert may_delete(known, "a"), "its folder has gone"
    assert may_delete(elsewhere, "a"), "its folder has gone, or its host has a new name"
    run_folder.mark(tmp_path / "a", "atlas")
    assert may_delete(known, "a"), "its folder was replaced"
    assert not may_delete(elsewhere, "a"), "two hosts with the same paths"


def test_a_copy_of_a_folder_is_not_its_run(tmp_path):
    """Both had its id: a reset of the copy deleted the run's keys and its objects, and a learner in it took them."""
    run_folder.mark(tmp_path / "a", "atlas")
    known = NOBODY.in_folder(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = NOBODY.in_folder(tmp_path / "b")
    with pytest.raises(ContractMismatch, match=rf"{tmp_path / 'b'} is a copy of {tmp_path / 'a'}, .* runs fork"):
        has_joined("atlas", copy, known, accepts_changes=True)
    assert not copy.may_delete(known)
    assert NOBODY.in_folder(tmp_path / "a").may_delete(known)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert NOBODY.in_folder(tmp_path / "link").may_delete(known)
    shutil.rmtree(tmp_path / "a")
    assert has_joined("atlas", copy, known), "it was moved, by way of a copy"


def test_a_folder_that_continues_a_run_from_an_object_store_is_no_copy(tmp_path, monkeypatch):
    """It has the id of the first by design. Nor is one whose old place is no longer this user's."""
    marker = run_folder.mark(tmp_path / "a", "atlas")
    known = NOBODY.in_folder(tmp_path / "a")
    run_folder.mark(tmp_path / "b", "atlas")
    run_folder.adopt(tmp_path / "b", marker)
    assert has_joined("atlas", NOBODY.in_folder(tmp_path / "b"), known)
    shutil.copytree(tmp_path / "a", tmp_path / "c")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "samefile", denied)
    assert has_joined("atlas", NOBODY.in_folder(tmp_path / "c"), known)
