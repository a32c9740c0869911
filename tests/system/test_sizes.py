"""The sizes on disk that `cusearch check` reckons with are those that a learner writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from cusearch_async.cli.preflight import sizing
from cusearch_async.cli.preflight.shapes import read_shape
from cusearch_async.config import load_config
from tests.fakes import STARTER
from tests.system.conftest import ATLAS
from tests.system.test_learner import train

pytestmark = pytest.mark.system


def tied_model(folder: Path) -> str:
    settings = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**settings, num_hidden_layers=2, vocab_size=16384, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STARTER / name, folder)
    return str(folder)


@pytest.mark.parametrize(
    ("stage", "dtype", "tied", "more"),
    [
        (0, "float32", False, ()),
        (0, "bfloat16", True, ()),
        (1, "bfloat16", True, ()),
        (3, "bfloat16", False, ()),
        (1, "float32", False, ("--learner.lora.rank", "4")),
        (1, "float32", False, ("--learner.trained_layers", "1")),
    ],
)
def test_the_sizes_on_disk_are_those_of_a_learner(tmp_path, stage, dtype, tied, more):
    model = tied_model(tmp_path / "model") if tied else "atlas"
    settings = ("--learner.zero_stage", str(stage), "--model.dtype", dtype, "--model.path", model, *more)
    train(tmp_path, "x", "--to-step", "1", "--save", str(tmp_path / "checkpoint"), settings=settings)
    shape = read_shape(model if tied else str(STARTER))
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    config = load_config(ATLAS, list(settings))
    assert written == pytest.approx(sizing.checkpoint_bytes(shape, config), rel=0.05)
    published = (tmp_path / "weights-x.safetensors").stat().st_size
    assert published == pytest.approx(sizing.version_bytes(shape, config), rel=0.05 if not more else 0.1)
