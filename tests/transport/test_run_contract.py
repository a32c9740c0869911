"""What the processes of a run must agree on: how it is made, who is refused by it, and when it changes."""

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
from cusearch_async.run.contract import NO_CONTRACT, RunContract, contract_of, mismatch, refuse_other_settings
from cusearch_async.transport.interface import RolloutSlot, WorkerStatus
from cusearch_async.types import Question
from tests.fakes import STARTER
from tests.run.questions import CHANGED, QUESTIONS
from tests.strategies import make_trajectory
from tests.transport.filling import G, N, start

TOKENIZER = load_tokenizer(str(STARTER))


def contract(*overrides: str, questions: list[Question] = QUESTIONS, model: Path = STARTER) -> RunContract:
    tokenizer = TOKENIZER if model == STARTER else load_tokenizer(str(model))
    return contract_of(load_config(Path("atlas"), ["--model.path", str(model), *overrides]), questions, tokenizer)


OURS = contract()
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
    "pool.questions": "65",
    "pool.rollouts": "4",
    "pool.order": "oldest_complete",
    "pool.max_staleness": "3",
    "pool.max_attempts": "6",
    "method.name": "random",
    "method.budget": "64",
    "method.singleton": "zero",
    "method.advantage_std": "false",
    "method.phase_reserve": "0.25",
    "retriever.backend": "dense",
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
    "data.source": contract(questions=QUESTIONS[:2]),
    "model.path": RunContract(OURS.terms | {"model.path": "385 tokens (0)"}),
    "payload_schema": RunContract(OURS.terms | {"payload_schema": "1"}),
}
OTHERS = {key: contract(f"--{key}", value) for key, value in CHANGES.items()} | FINGERPRINTS
"""Key -> a contract that differs in it."""


# --- how it is made -------------------------------------------------------------------------------------


def test_every_key_of_the_contract_has_a_test():
    assert OTHERS.keys() == OURS.terms.keys()
    for key, other in OTHERS.items():
        changed = {k for k in OURS.terms.keys() | other.terms.keys() if OURS.terms.get(k) != other.terms.get(k)}
        assert changed == {key} | ({"method.phase_reserve"} if key == "method.name" else set())
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
    assert contract(f"--{override[0]}", override[1]) == OURS


def test_what_the_retriever_serves_is_in_it_once_it_has_been_asked():
    ours, theirs = OURS.with_retriever("bm25 over 10 passages (1)"), OURS.with_retriever(None)
    assert ours.differences(theirs) == [
        "retriever serves is bm25 over 10 passages (1) here and not reported in the run"
    ]
    refuse_other_settings("r", OURS, ours)
    refuse_other_settings("r", OURS, NO_CONTRACT)
    with pytest.raises(ContractMismatch, match=r"match run 'r': run\.seed is 0 here and 7 in the run; start it"):
        refuse_other_settings("r", OURS, OTHERS["run.seed"].with_retriever(None))


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def change_json(path: Path, **changes: Any) -> None:
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))


def test_a_model_is_the_same_in_another_folder_with_another_dtype_and_history(tmp_path):
    model = copy_of(STARTER, tmp_path)
    change_json(model / "config.json", dtype="float16", transformers_version="4.0", _name_or_path="x", use_cache=False)
    assert contract(model=model) == OURS


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
    assert [line.split()[0] for line in contract(model=model).differences(OURS)] == ["model.path"]


def test_the_arguments_of_the_chat_template_are_agreed_on():
    other = contract("--model.chat_template", "{enable_thinking = false}")
    assert other.differences(OURS) == ["model.chat_template.enable_thinking is False here and not set in the run"]


def test_a_template_is_its_text_wherever_a_process_has_it(tmp_path):
    for name, text in (("a", "Ask {question}"), ("b", "Ask {question}"), ("c", "Ask: {question}")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    first, copy, other = (contract("--environment.search.template", str(tmp_path / name)) for name in "abc")
    assert first == copy
    assert first.differences(other)
    named, spelled = contract("--environment.search.template", "atlas"), ATLAS.text
    assert named.differences(contract("--environment.search.template", spelled)), "the notices differ"


def test_another_vocabulary_is_another_model(tmp_path):
    model = copy_of(STARTER, tmp_path)
    content = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(content.replace('"</search>"', '"</Search>"'))
    assert contract(model=model).terms["model.path"] != OURS.terms["model.path"]


@pytest.mark.parametrize("questions", CHANGED.values(), ids=CHANGED)
def test_other_questions_or_another_order_is_other_data(questions):
    assert contract(questions=questions).terms["data.source"] != OURS.terms["data.source"]
    assert OURS.terms["data.source"].startswith("3 (")


def test_what_a_file_says_besides_of_a_question_changes_no_run():
    known = [replace(question, metadata={"hops": 2}, evidence=("x",)) for question in QUESTIONS]
    assert contract(questions=known) == OURS


# --- who is refused by it -------------------------------------------------------------------------------


async def work(worker: Any) -> list[Any]:
    """What each of a worker's operations that takes or gives work answers."""
    answers = []
    for operation in (
        worker.check_contract(),
        worker.admit("w", 0, N * G),
        worker.put(make_trajectory(0, 0)),
        worker.heartbeat("w", [0], WorkerStatus()),
    ):
        try:
            answers.append(await operation)
        except ContractMismatch as error:
            answers.append(str(error))
    return answers


def assert_names(said: str, key: str, own: RunContract, run: RunContract) -> None:
    assert "\n" not in said
    assert f"{key} is {own.terms.get(key, 'not set')} here and {run.terms.get(key, 'not set')} in the run" in said
    assert "config.toml" in said
    assert "--accept-changes" in said


@pytest.mark.parametrize("key", OTHERS)
async def test_a_worker_with_another_value_is_refused_before_it_takes_a_ticket(backend, key):
    learner, worker = backend.make(OURS), backend.make(OTHERS[key])
    await start(learner)
    before = await learner.state(), await learner.ledger()
    answers = await work(worker)
    assert len(set(answers)) == 1, "each says the same"
    assert_names(answers[0], key, OTHERS[key], OURS)
    assert (await learner.state(), await learner.ledger()) == before
    assert await learner.workers() == {}
    assert await backend.make(OURS).admit("v", 0, G) == [RolloutSlot(0, 0), RolloutSlot(0, 1)]


@pytest.mark.parametrize("key", OTHERS)
async def test_when_a_learner_changes_the_run_its_old_workers_are_refused_and_can_give_back(backend, key):
    learner, worker = backend.make(OURS), backend.make(OURS)
    await start(learner)
    assert await worker.check_contract()
    assert await worker.admit("w", 0, G) == [RolloutSlot(0, 0), RolloutSlot(0, 1)]
    heir = backend.make(OTHERS[key])
    await heir.recover(0, accepts_changes=True)
    await heir.announce(0, "v000000-e2")
    answers = await work(worker)
    assert len(set(answers)) == 1
    assert_names(answers[0], key, OURS, OTHERS[key])
    assert (await heir.ledger()).finished == 0
    await worker.leave("w", [0])
    fresh = backend.make(OTHERS[key])
    assert await fresh.check_contract()
    assert await fresh.admit("v", 0, G) == [RolloutSlot(0, 0), RolloutSlot(0, 1)]


@pytest.mark.parametrize("key", OTHERS)
async def test_a_second_learner_with_another_value_is_refused_and_the_first_goes_on(backend, key):
    learner, second = backend.make(OURS), backend.make(OTHERS[key])
    await start(learner)
    before = await learner.state()
    with pytest.raises(ContractMismatch) as refused:
        await second.recover(0)
    assert_names(str(refused.value), key, OTHERS[key], OURS)
    assert await learner.state() == before
    assert await learner.contract() == OURS
    await learner.announce(1, "v000001-e1")
    assert await learner.claim(0) is None, "it is not fenced off"


async def test_a_learner_goes_on_with_the_same_contract_and_with_another_only_when_told_to(backend):
    await start(backend.make(OURS))
    await backend.make(OURS).recover(0)
    other = OTHERS["run.seed"]
    with pytest.raises(ContractMismatch, match=r"run\.seed is 7 here and 0 in the run"):
        await backend.make(other).recover(0)
    await backend.make(other).recover(0, accepts_changes=True)
    assert await backend.make().contract() == other
    fewer = RunContract({key: text for key, text in other.terms.items() if key != "retriever.topk"})
    await backend.make(fewer).recover(0, accepts_changes=True)
    assert await backend.make().contract() == fewer, "nothing of the old one stays"
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await backend.make(OURS).recover(0)


@pytest.mark.parametrize("change", [{"questions": 8}, {"rollouts": 3}, {"order": "oldest_complete"}], ids=str)
async def test_n_g_and_order_do_not_change_while_there_are_tickets_whoever_accepts_it(backend, change):
    learner, other = backend.make(OURS), OTHERS["pool.rollouts"]
    await start(learner)
    await learner.admit("w", 0, G)
    with pytest.raises(ContractMismatch, match="granted with"):
        await backend.make(other, **change).recover(0, accepts_changes=True)
    assert await learner.claim(0) is None, "it is not fenced off"
    assert await learner.contract() == OURS


async def test_a_run_that_redis_has_forgotten_gets_its_contract_from_the_next_learner(backend):
    await start(backend.make(OURS))
    await backend.forget_everything()
    worker = backend.make(OURS)
    assert not await worker.check_contract()
    assert await worker.admit("w", 0, G) == [], "it waits"
    await start(backend.make(OTHERS["run.seed"]))
    assert await backend.make().contract() == OTHERS["run.seed"]


async def test_who_has_no_contract_can_look_into_a_run_and_take_no_part_in_it(backend):
    await start(backend.make(OURS))
    operator = backend.make()
    assert await operator.contract() == OURS
    assert await operator.capacities() == [0] * 6
    await operator.pause(True)
    await operator.pause(False)
    for attempt in (operator.check_contract(), operator.admit("w", 0, G), operator.recover(0)):
        with pytest.raises(ContractMismatch, match=r"run\.seed is not set here and 0 in the run"):
            await attempt


async def test_a_run_without_a_contract_is_waited_for_and_nothing_of_it_is_taken(backend):
    """Its buffer has lost it, and its learner has not been started again yet."""
    await start(backend.make(NO_CONTRACT))
    worker = backend.make(OURS)
    assert not await worker.check_contract()
    for attempt in (
        worker.admit("w", 0, G),
        worker.put(make_trajectory(0, 0)),
        worker.heartbeat("w", [], WorkerStatus()),
    ):
        with pytest.raises(
            ContractMismatch, match=r"holds no contract of run .* start the learner again, it writes the contract"
        ):
            await attempt
    await start(backend.make(OURS))
    assert await worker.check_contract()
    assert await worker.admit("w", 0, G)


def test_all_differences_are_named_those_of_the_run_alone_too():
    own = RunContract({"a": "1", "b": "2"})
    run = RunContract({"a": "1", "b": "3", "c": "4"})
    assert own.differences(run) == ["b is 2 here and 3 in the run", "c is not set here and 4 in the run"]
    assert "b is 2 here and 3 in the run, c is not set" in str(mismatch("r", own, run))
    assert NO_CONTRACT.digest == ""


# --- in Redis -------------------------------------------------------------------------------------------


async def test_redis_holds_it_as_text_that_a_person_reads(redis_backend):
    buffer = redis_backend.make(OURS)
    await start(buffer)
    kept = {k.decode(): v.decode() for k, v in (await redis_backend.client.hgetall(buffer.keys.contract)).items()}
    assert kept == OURS.terms | {"digest": OURS.digest}
    assert kept["pool.max_staleness"] == "2"


async def test_a_put_that_is_refused_leaves_nothing_behind(redis_backend):
    learner, worker = redis_backend.make(OURS), redis_backend.make(OTHERS["run.seed"])
    await start(learner)
    with pytest.raises(ContractMismatch):
        await worker.put(make_trajectory(0, 0))
    assert not [key async for key in redis_backend.client.scan_iter(match=learner.keys.staged("*"))]


async def test_limits_and_contract_that_are_gone_come_from_the_next_learner(redis_backend):
    buffer = redis_backend.make(OURS)
    await start(buffer)
    limits = await redis_backend.client.hgetall(buffer.keys.limits)
    await buffer.admit("w", 0, G)
    await redis_backend.client.delete(buffer.keys.limits, buffer.keys.contract)
    heir = redis_backend.make(OURS)
    await heir.recover(0)
    await heir.announce(0, "v000000-e2")
    assert await redis_backend.client.hgetall(heir.keys.limits) == limits
    assert await heir.contract() == OURS
    assert await heir.admit("w", 0, G) == [RolloutSlot(1, 0), RolloutSlot(1, 1)]


async def test_limits_that_are_gone_are_found_and_written_again(redis_backend):
    buffer = redis_backend.make(OURS)
    await start(buffer)
    await redis_backend.client.delete(buffer.keys.limits)
    assert (await buffer.audit()).findings == ("limits are missing: the next learner writes them again",)
    await buffer.recover(0)
    assert (await buffer.audit()).closes
