"""`cusearch check` finds what a model's files would do to a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cusearch_async.cli import check
from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.gpus import Device
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import STARTER, load_config

pytestmark = pytest.mark.system  # each is a whole check of a model

SWITCH = "{{ messages[0].content }}{% if add_generation_prompt %}<a>{{ hint }}{% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(STARTER, tmp_path / "m")


def findings(model: Path, *overrides: str) -> dict[str, Finding]:
    config = load_config(Path("atlas"), ["--model.path", str(model), *overrides])
    return {
        finding.what: finding
        for finding in check.check(config, shape_of(config.model), Device(80.0, "as the test says"))
    }


def change(file: Path, **settings: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **settings}))


def test_a_sound_model_has_no_errors(model):
    found = findings(model)
    assert [finding for finding in found.values() if finding.status in ("error", "warning")] == []
    assert found["chat template"].text == "none; prompts are plain text"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"is quantised (awq)"),
        ({"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}}, "needs custom code"),
        ({"num_hidden_layers": 7}, "`num_hidden_layers` (7) must be equal to"),
        ({"intermediate_size": 64}, "has shape ["),
    ],
)
def test_files_that_no_run_can_use_are_errors(model, settings, says):
    change(model / "config.json", **settings)
    found = findings(model)["tokenizer"]
    assert found.status == "error"
    assert says in found.text


def test_missing_weights_are_an_error(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert "(lm_head.weight): they would be random numbers" in findings(model)["tokenizer"].text


def test_a_generation_config_of_which_checkpoints_keep_only_the_ids_is_a_warning(model):
    change(model / "generation_config.json", temperature=0.9, do_sample=False)
    found = findings(model)["generation_config.json"]
    assert found.status == "warning"
    assert "`temperature`" in found.text


@pytest.mark.parametrize(
    ("template", "overrides", "status", "says"),
    [
        ("<a>", (), "error", "drops the question"),
        ("{{ messages[0].content }}<a>", (), "warning", "add_generation_prompt changes nothing in it"),
        (SWITCH, (), "ok", "prompts end in '<a>' after the question"),
        (SWITCH, ("--model.chat_template.hint", "yes"), "ok", "prompts end in '<a>yes' after the question"),
        ("{{ broken", ("--model.uses_chat_template", "false"), "ok", "not used; prompts are plain text"),
        (SWITCH, ("--model.chat_template.hin", "yes"), "error", "model.chat_template.hin: the chat template of "),
    ],
)
def test_the_chat_template_is_tried(model, template, overrides, status, says):
    change(model / "tokenizer_config.json", chat_template=template)
    found = findings(model, *overrides)["chat template"]
    assert (found.status, says in found.text) == (status, True), found.text


def test_a_model_without_a_longest_text_is_an_error(model):
    """It was said not to be on this machine, and only the launch refused it."""
    (model / "config.json").write_text(
        json.dumps({"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 1})
    )
    found = findings(model)["longest episode"]
    assert (found.status, "is a bloom, whose config states no longest text" in found.text) == ("error", True)


def test_longrope_is_an_error_where_episodes_are_longer_than_its_short_factors_are_for(model):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 384, "num_hidden_layers": 1}
    long = {"max_position_embeddings": 4096, "original_max_position_embeddings": 300, "rope_scaling": rope}
    (model / "config.json").write_text(json.dumps({"model_type": "phi3", **sizes, **tokens, **long}))
    found = findings(model)["longest episode"]
    assert (found.status, "has LongRoPE" in found.text) == ("error", True)
