"""A model is what its files say, or refused with the setting and the cause before anything large is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cusearch_async.config import STARTER
from cusearch_async.errors import ConfigError
from cusearch_async.models import check_context, check_files, check_model, load_tokenizer, read_config

ROWS = 384


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the starter."""
    return shutil.copytree(STARTER, tmp_path / "m")


def change(folder: Path, name: str = "config.json", **settings: Any) -> None:
    file = folder / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **settings}))


def change_weights(folder: Path, without: str = "", **more: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert not without or without in tensors
    save_file({n: t for n, t in tensors.items() if n != without} | more, folder / "model.safetensors", {"format": "pt"})


def test_a_whole_model_is_taken(model):
    assert len(check_model(str(model), 500)) > 0


def test_mistrals_second_tokenizer_is_left_alone(model):
    """tekken.json is for mistral-common, which the parsers need, and whose tokenizer keeps no special token as text."""
    change(model, model_type="mistral")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "tekken.json").write_text("{}")
    tokenizer = load_tokenizer(str(model))
    assert tokenizer("<|endoftext|>", split_special_tokens=True)["input_ids"] != [tokenizer.eos_token_id]


def test_missing_weights_are_named(model):
    change_weights(model, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"lacks weights .*\(model\.layers\.1\.mlp\.up_proj\.weight\): .* random"):
        check_files(str(model))


def test_weights_that_the_model_has_no_place_for_are_named(model):
    change_weights(model, **{"v_head.weight": torch.zeros(3), "v_head.bias": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"no place for \(v_head\.bias and 1 others\): they would be ignored"):
        check_files(str(model))


def test_weights_of_another_shape_are_named_with_both_shapes(model):
    change(model, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"proj\.weight has shape \[.*\] in its files, .* asks for \[.*64.*\]"):
        check_files(str(model))


def test_a_folder_without_weights_is_refused(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.path '.*/m' holds no weights, like model\.safetensors; copy them"):
        check_files(str(model))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_weights_in_the_older_form_are_left_to_the_loader(model, name):
    (model / "model.safetensors").rename(model / name)
    check_files(str(model))


def test_a_shard_that_is_not_there_is_named(model):
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-00001-of-00002\.safetensors, which its model\.safetensors\."):
        check_files(str(model))


def test_a_damaged_file_of_weights_is_named(model):
    (model / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read \(.*\); copy it again"):
        check_files(str(model))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"load_in_4bit": True}, "bitsandbytes, 4 bit"),
    ],
)
def test_a_quantised_model_is_refused_with_its_method(model, said, name):
    change(model, quantization_config=said)
    with pytest.raises(ConfigError, match=rf"is quantised \({name}\), .*; give the unquantised checkpoint"):
        read_config(str(model))


def test_a_quantised_model_is_recognised_by_its_file_too(model):
    change(model, "hf_quant_config.json", quantization={"quant_algo": "NVFP4"})
    with pytest.raises(ConfigError, match=r"is quantised \(hf_quant_config\.json\)"):
        read_config(str(model))


@pytest.mark.parametrize("content", ["{}", '{"version": "1.0", "mod', "version https://git-lfs.github.com/spec/v1"])
def test_a_damaged_tokenizer_is_named_with_its_model(model, content):
    """Of a class that reads it in Rust, which raises a plain Exception."""
    change(model, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    change(model, "config.json", model_type="llama")
    (model / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(model))


@pytest.mark.parametrize("what", ["config.json", "tokenizer_config.json"])
def test_custom_code_is_refused_and_nobody_is_asked(model, what, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked on the terminal"))
    if what == "config.json":
        change(
            model, model_type="strange", auto_map={"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.M"}
        )
    else:
        change(model, what, tokenizer_class="Strange", auto_map={"AutoTokenizer": ["strange.Tokenizer", None]})
        (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"needs custom code \(trust_remote_code\), which is not supported"):
        check_files(str(model))


def test_a_tokenizer_longer_than_the_embedding_is_refused_with_both_sizes(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    more = ROWS - len(tokenizer) + 21
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(more)])
    tokenizer.save_pretrained(model)
    with pytest.raises(ConfigError, match=rf"has {ROWS + 21} tokens, its embedding only {ROWS} rows: '<extra_"):
        check_files(str(model))


def test_a_placeholder_of_images_needs_no_row(model):
    """Gemma 3 of 1B has one behind its last row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(ROWS - len(tokenizer))])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(model)
    change(model, "tokenizer_config.json", image_token="<image_soft_token>")
    assert load_tokenizer(str(model)).get_vocab()["<image_soft_token>"] == ROWS
    check_files(str(model))


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}


def phi(folder: Path, original: int) -> None:
    """A config as Phi-3.5's."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": ROWS}
    rope = {"rope_scaling": LONG_ROPE, "original_max_position_embeddings": original, "max_position_embeddings": 4096}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3", **sizes, **rope, **tokens}))


def test_longrope_is_refused_only_where_episodes_can_be_longer_than_its_short_factors_are_for(model):
    phi(model, 300)
    check_context(str(model), 300)
    with pytest.raises(
        ConfigError, match=r"has LongRoPE, .* more than 300 tokens, and an episode can take 336: .*lower"
    ):
        check_context(str(model), 336)


def test_llama_4s_scaling_is_refused_only_where_it_begins(model):
    """Ministral 3's; vLLM reads it in Mistral's own config alone."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    rope["original_max_position_embeddings"] = 300
    change(model, model_type="ministral3", rope_parameters=rope, max_position_embeddings=1200)
    check_context(str(model), 300)
    with pytest.raises(ConfigError, match=r"has llama_4_scaling_beta, .* more than 300 tokens, and an episode"):
        check_context(str(model), 336)


@pytest.mark.parametrize("text", ["{", '{"max_new_tokens": -1}', '{"early_stopping": "perhaps"}'])
def test_a_generation_config_that_cannot_be_read_is_named(model, text):
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"has a generation_config\.json that cannot be used: "):
        check_files(str(model))


def test_an_adapter_is_no_model(model):
    change(model, "adapter_config.json", base_model_name_or_path="x")
    with pytest.raises(ConfigError, match=r"holds an adapter \(adapter_config\.json\); merge it"):
        read_config(str(model))


def test_a_model_that_is_no_causal_lm_is_named(model):
    change(model, model_type="t5", max_position_embeddings=512)
    with pytest.raises(ConfigError, match="is a t5, which is no causal LM"):
        check_files(str(model))


def test_an_encoder_is_named_before_its_context_is(model):
    """Its short context was to be obeyed first; and transformers can make a causal LM of BERT."""
    change(model, model_type="bert", architectures=["BertForMaskedLM"], max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"'.*' is a BertForMaskedLM, which is no causal LM; use one like Qwen/"):
        check_model(str(model), 2000)
