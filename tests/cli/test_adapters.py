"""The arithmetic of adapters: sizes by peft itself, shares of the paper's models, memory by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, Phi3Config, Qwen3Config

from cusearch_async.cli.preflight import memory
from cusearch_async.cli.preflight.shapes import described, published, shape_of
from cusearch_async.cli.preflight.sizing import GIB, adapter_parameters, learner_memory
from cusearch_async.config import load_config
from tests.learner.test_model import EXPERTS, SIZES

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long

PAPERS = ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-3B")


@pytest.mark.parametrize("name", PAPERS)
def test_a_version_of_an_adapter_of_rank_32_is_at_most_2_percent_of_the_papers_models(name):
    shape = published(name)
    assert 0.01 < adapter_parameters(shape, 32) / shape.parameters <= 0.02


def test_an_adapter_has_two_matrices_for_each_layer():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    small = described(Qwen3Config(**heads, num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=50))
    query, key, mlp = 64 + 128, 64 + 64, 64 + 96
    assert adapter_parameters(small, 8) == 2 * 8 * (2 * query + 2 * key + 3 * mlp)
    assert adapter_parameters(small, 8, ("q_proj", "down_proj")) == 2 * 8 * (query + mlp)


def test_check_finds_the_layers_of_a_model_that_names_them_otherwise(atlas_config):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "pad_token_id": 0}
    shape = described(Phi3Config(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    qkv, o, gate_up, down = 64 + 128, 64 + 64, 64 + 192, 96 + 64
    assert adapter_parameters(shape, 8) == 2 * 8 * (qkv + o + gate_up + down)
    config = load_config(atlas_config, ["--learner.lora.rank", "8", "--learner.lora.targets", "qkv_proj"])
    found = memory.adapter(config, shape)
    assert found.status == "ok"
    assert found.text.startswith(f"of rank 8: {2 * 8 * qkv:,} parameters")


def test_an_adapter_at_the_rate_of_full_fine_tuning_is_warned_of(tmp_path):
    """It hardly learned, and the run was "finished"."""
    (tmp_path / "mine.toml").write_text("[run]\nname = 'r'\n[learner.lora]\nrank = 8\n")
    shape = published("Qwen/Qwen2.5-3B")
    found = memory.adapter(load_config(tmp_path / "mine.toml"), shape)
    assert found.status == "warning"
    assert found.text.endswith("learner.lr is 1e-06, for full fine-tuning; an adapter needs about ten times that")
    assert memory.adapter(load_config(tmp_path / "mine.toml", ["--learner.lr", "1e-6"]), shape).status == "ok"


def test_an_adapter_of_3b_is_small_where_it_is_trained_and_its_reference_is_no_second_model(atlas_config):
    shape = published("Qwen/Qwen2.5-3B")
    trained = adapter_parameters(shape, 32)
    assert trained == 59_867_136
    settings = ["--model.dtype", "bfloat16", "--learner.ranks", "2", "--learner.gradient_checkpointing", "true"]
    whole = learner_memory(shape, load_config(atlas_config, settings), 8192, 1)
    config = load_config(atlas_config, [*settings, "--learner.lora.rank", "32"])
    found = learner_memory(shape, config, 8192, 1)
    assert found.weights == 2 * (shape.parameters + trained)
    assert found.reference == 0
    assert found.optimizer == 12 * trained // 2
    assert found.gradients == found.buffers == 2 * trained
    assert found.step == 8 * trained // 2
    assert found.activations == whole.activations
    sharded = learner_memory(shape, config, 8192, 3)
    assert sharded.weights == shape.parameters + trained
    assert sharded.gradients == trained


def test_check_says_what_an_adapter_is_and_what_it_saves(atlas_config):
    shape = published("Qwen/Qwen2.5-7B")
    settings = ["--model.dtype", "bfloat16", "--learner.gradient_checkpointing", "true"]
    adapted = load_config(atlas_config, [*settings, "--learner.lora.rank", "32"])
    assert memory.learner_memory(load_config(atlas_config, settings), shape, 80 * GIB).status == "error"
    assert memory.learner_memory(adapted, shape, 80 * GIB).status == "ok"
    found = memory.adapter(adapted, shape)
    assert found.text == (
        "of rank 32: 80,740,352 parameters are trained; a version is 161.5 MB, 1.06% of the whole model"
    )
    wrong = load_config(atlas_config, ["--learner.lora.rank", "8", "--learner.lora.targets", "c_attn"])
    found = memory.adapter(wrong, shape)
    assert found.status == "error"
    assert found.text.startswith("learner.lora.targets: the model has no linear layer 'c_attn'; it has down_p")


def test_an_adapter_that_the_learner_would_refuse_is_an_error(tmp_path):
    """Check counted the layers of GLM-4's attention alone; its learner ended after it had loaded the model."""
    AutoConfig.for_model("glm4_moe", **SIZES | EXPERTS).save_pretrained(tmp_path)
    of_model = ["--model.path", str(tmp_path), "--learner.lora.rank", "4"]
    configs = [load_config(Path("atlas"), [*of_model, *more]) for more in ([], ["--learner.lora.targets", "q_proj"])]
    whole, attention = (memory.adapter(config, shape_of(config.model)) for config in configs)
    assert (whole.status, "name layers of its attention in learner.lora.targets" in whole.text) == ("error", True)
    assert attention.status != "error"
