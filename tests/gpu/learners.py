"""The learner on a tiny model, on any device, with the gradient of its last mini-batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from cusearch_async.config import Config, load_config
from tests.bench import plain_engine
from tests.bench.bench_gpu import trajectory

ATLAS = Path(__file__).parents[2] / "cusearch_async" / "configs" / "atlas.toml"
LENGTHS = (40, 333, 120, 64, 512, 27, 200, 90)


class Recorded(plain_engine.PlainEngine):
    """Keeps the gradient that the optimizer is given, before it is clipped."""

    gradient: torch.Tensor

    def step(self, lr: float) -> float:
        self.gradient = torch.cat([p.grad.float().flatten().cpu() for p in self._parameters])
        return super().step(lr)


def config_of(dtype: str = "float32", packing: bool = False, checkpointing: bool = False) -> Config:
    changes = {
        "--model.dtype": dtype,
        "--learner.packing": str(packing).lower(),
        "--learner.attention": "varlen" if packing else "sdpa",
        "--learner.gradient_checkpointing": str(checkpointing).lower(),
        "--learner.micro_batch_tokens": 600,
        "--learner.zero_stage": 1,
        "--learner.lr": 1e-3,
        "--loss.minibatch": len(LENGTHS),
        "--method.budget": len(LENGTHS),
        "--loss.kl_coef": 0.01,
    }
    return load_config(ATLAS, [word for key, value in changes.items() for word in (key, str(value))])


def tiny(dtype: str, attention: str) -> Any:
    """The same weights on every call and every device; heads are grouped, and embedding and LM head are one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.to(getattr(torch, dtype)).eval()


def learner_on(device: str, config: Config, ranks: Any, engine: Any = Recorded) -> Any:
    """A learner with `engine`, which chooses its device itself if it is DeepSpeed's."""
    module = plain_engine.learner_module(with_deepspeed=False)
    module.load_causal_lm = lambda path, dtype, attention: tiny(dtype, attention)
    if issubclass(engine, Recorded):
        engine.device = torch.device(device)
    module.DeepSpeedEngine = engine
    return module.DeepSpeedLearner(config, ranks)


def updated(device: str, ranks: Any, **settings: Any) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """The gradient of one update, its metrics, and the learner after it."""
    learner = learner_on(device, config_of(**settings), ranks)
    metrics = learner.update(*selection(), 0)
    return learner._engine.gradient, metrics, learner


def selection() -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    made = [trajectory(ticket, length, rng, 1024, mean=-7.0) for ticket, length in enumerate(LENGTHS)]
    return made, np.random.default_rng(1).normal(size=len(made))


def ranks() -> Any:
    """One rank. Its group needs a process to itself or to be closed."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    from cusearch_async.learner.ranks import Ranks

    return Ranks(600)
