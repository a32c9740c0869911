"""Other models and other search engines than the demo's, each through the whole loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, LlamaConfig

from cusearch_async.config import STARTER
from cusearch_async.transport.server import is_listening
from tests.conftest import free_port, wait_until
from tests.retrieval.encoders import SMALL, save_model, sentences
from tests.system.conftest import Run, finish

pytestmark = pytest.mark.system

CHAT = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


def make_llama(folder: Path) -> None:
    """A random policy with a tied LM head, the starter's tokenizer and a chat template."""
    shutil.copytree(STARTER, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **ids, **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "of", "bound"),
    [("starter", "float32", "max", 1e-3), ("llama", "bfloat16", "mean", 0.05)],
    ids=["qwen2-untied-raw-float32", "llama-tied-chat-bfloat16"],
)
@pytest.mark.slow  # test_listeners has the same of the starter model
def test_each_architecture_goes_through_the_whole_loop_on_policy(
    run: Run, tmp_path: Path, name: str, dtype: str, of: str, bound: float
):
    """Generated, put, trained, published, and loaded again: with max_staleness = 0 the engine computes what the learner
    computes. The second generates only what it trains on (GRPO-Half)."""
    if name == "llama":
        make_llama(tmp_path / "model")
        run.overrides |= {"model.path": tmp_path / "model", "episode.max_turn_tokens": 24, "learner.lr": 1e-3}
        run.overrides |= {
            "method.name": "grpo_half",
            "environment.search.reward": "tests.environments.rewards:by_rollout",
        }
    run.overrides |= {"model.dtype": dtype, "pool.max_staleness": 0}
    status, output = finish(run.cusearch("launch", run__steps=2))
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:  # the second on the weights that came back
        assert row["train/tokens"] > 0
        assert row[f"off_policy/logprob_difference_{of}"] < bound
        assert row["off_policy/weight_mean"] == pytest.approx(1, abs=bound)
        assert row["staleness/max"] == 0
        assert sum(row["depth/selected"]) == 8
        assert sum(row["depth/generated"]) == (8 if name == "llama" else 16)
    assert rows[0]["train/grad_norm"] > 0
    assert "loaded weights v000001-e1" in run.log("rollout-0"), "with the canary, and the worker lives on"
    saved = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / "step000002-e1" / "model")
    assert saved.config.tie_word_embeddings is (name == "llama")
    assert run.processes() == []


@pytest.mark.parametrize("backend", [pytest.param("bm25", marks=pytest.mark.slow), "dense"])
def test_an_index_that_the_command_makes_is_served(run: Run, tmp_path: Path, backend: str):
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    texts = [f"the number of city {word} is {word[::-1]}" for word in sentences(300)]
    rows = (json.dumps({"id": str(i), "contents": f'"City"\n{text}'}) + "\n" for i, text in enumerate(texts))
    corpus.write_text("".join(rows))
    settings = {"retriever.backend": backend, "retriever.corpus": corpus, "retriever.index": index}
    if backend == "dense":
        settings["retriever.dense.encoder"] = save_model(tmp_path / "encoder", BertModel, BertConfig(**SMALL))
    run.overrides |= settings
    too_early = run.worker("retriever")
    status, output = finish(too_early, 60)
    assert (status, "build it with `cusearch index CONFIG`" in output) == (1, True), output
    status, output = finish(run.cusearch("index"), 120)
    assert status == 0, output
    assert "300 passages indexed" in output
    retriever = run.worker("retriever")
    wait_until(lambda: is_listening(run.overrides["retriever.url"]) or retriever.poll() is not None, 60)
    body = json.dumps({"queries": [f'"City"\n{texts[7]}', "", "zzz"], "topk": 2, "return_scores": False}).encode()
    request = Request(f"{run.overrides['retriever.url']}/retrieve", body, {"Content-Type": "application/json"})
    with urlopen(request) as response:
        found, blank, _ = json.load(response)["result"]
    assert len(found) == 2
    assert blank == []
    if backend == "bm25":
        assert found[0]["id"] == "7"


@pytest.mark.slow
def test_a_simulated_engine_trains_and_the_evaluator_scores_beside_it(run: Run):
    simulator = f"http://127.0.0.1:{free_port()}/v1"
    engine = {"retriever__backend": "zerosearch", "retriever__zerosearch__url": simulator}
    launched = run.cusearch("launch", run__steps=3, eval__every=2, retriever__zerosearch__p_start=0.5, **engine)

    def is_started() -> bool:
        return is_listening(run.overrides["redis.url"]) and bool(run.redis().hget("cusearch:{atlas}:state", "epoch"))

    wait_until(lambda: is_started() or launched.poll() is not None, 400)
    run.redis().hset("cusearch:{atlas}:state", "paused", 1)  # at once, so that version 0 is scored before step 1 begins
    scores = run.folder / "eval.jsonl"
    wait_until(lambda: scores.exists() or launched.poll() is not None, 300)
    assert finish(run.cusearch("buffer resume"))[0] == 0
    wait_until(lambda: len(run.metrics()) >= 2 or launched.poll() is not None, 200)
    with urlopen(f"{run.overrides['retriever.url']}/health") as response:
        figures = json.load(response)
    assert figures["useful"] > 0
    assert figures["noisy"] > 0
    assert figures["failures"] == 0
    status, output = finish(launched)
    assert status == 0, output
    assert max(row["depth/mean"] for row in run.metrics()) > 0
    scored = [json.loads(line) for line in scores.read_text().splitlines()]
    assert scored[0]["step"] == 0
    assert scored[-1]["step"] == 3, "the last version is scored before the run is over"
    for row in scored:
        low, high = row["all"]["em_interval"]
        assert 0 <= low <= row["all"]["em"] <= high <= 1
        assert row["all"]["count"] == 10
        assert row["epoch"] == 1
    assert run.processes() == []


OVERLAY = """
[environment.search]
share = 3
[environment.calculator]
name = "docs.examples.calculator:Calculator"
template = "atlas"
reward = "tests.environments.rewards:half"
[episode]
max_prompt_tokens = 210
max_turn_tokens = 60
[redis]
max_trajectories = 200
"""


@pytest.mark.long
def test_two_environments_of_which_one_has_two_tools_share_a_run(run: Run, tmp_path: Path):
    """The calculator of docs/examples, one file outside of the package, over atlas questions that need both tools."""
    overlay = tmp_path / "overlay.toml"
    overlay.write_text(OVERLAY, encoding="utf-8")
    launched = run.cusearch("launch", str(overlay), run__steps=3)
    wait_until(lambda: len(run.metrics()) >= 1 or launched.poll() is not None, 150)
    assert launched.poll() is None, finish(launched)
    client = run.redis()
    keys = list(client.scan_iter(match="cusearch:{atlas}:traj:*", count=1000))
    shown = [client.hgetall(key) for key in keys]
    status, output = finish(launched)
    assert status == 0, output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert (row["environment/search/share"], row["environment/calculator/share"]) == (0.75, 0.25)
        assert row["environment/calculator/reward"] == 0.5, "the reward that the config has put in its place"
    labelled = {(fields["environment"], fields["question_id"].partition("/")[0]) for fields in shown if fields}
    assert labelled == {("search", "search:atlas"), ("calculator", "calculator:letters")}
