"""What `cusearch check` expects a learner to take, against what one has taken: weights, reference, DeepSpeed's masters,
moments, buckets and gradients, and the passes of an update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from cusearch_async.config import STARTER
from tests.conftest import SLOW

pytestmark = [pytest.mark.system, pytest.mark.slow]

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024}
SHAPES: dict[str, PreTrainedConfig] = {
    "wide": Qwen2Config(
        **HEADS,
        vocab_size=30_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        tie_word_embeddings=True,
    ),
    "deep": Qwen3Config(
        **HEADS,
        vocab_size=9_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        head_dim=64,
        tie_word_embeddings=False,
    ),
    "heavy": LlamaConfig(
        **HEADS,
        vocab_size=9_000,
        hidden_size=1536,
        intermediate_size=5120,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    ),
}
"""Of 40 to 60 million parameters each: less, and what Python and torch keep for themselves would count."""


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("wide", ("--learner.zero_stage", "1")),
        ("deep", ("--learner.zero_stage", "2", "--learner.gradient_checkpointing", "true")),
        ("heavy", ("--learner.zero_stage", "3")),
    ],
)
def test_a_learner_takes_what_check_expects(name, overrides, tmp_path: Path):
    AutoModelForCausalLM.from_config(SHAPES[name]).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(STARTER).save_pretrained(tmp_path)
    settings = ("--model.path", str(tmp_path), "--loss.minibatch", "2", "--method.budget", "2", *overrides)
    threads = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what is freed goes back at once
    ended = subprocess.run(
        [sys.executable, "-m", "tests.system.peak_script", *settings],
        env=os.environ | threads,
        capture_output=True,
        text=True,
        check=False,
        timeout=300 * SLOW,
    )
    assert ended.returncode == 0, ended.stderr
    bytes_of = json.loads(ended.stdout.splitlines()[-1])
    assert bytes_of["expected"] == pytest.approx(bytes_of["taken"], rel=0.1)
