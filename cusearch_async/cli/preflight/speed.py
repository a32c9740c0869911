"""How fast this machine's CPU would train a model: layers of it, with random weights, are timed in both data types."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cusearch_async.cli.preflight.finding import Finding
from cusearch_async.cli.preflight.shapes import ModelShape
from cusearch_async.config import Config, LearnerConfig
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.learner import matmul
from cusearch_async.learner.adapter import Adapter
from cusearch_async.learner.model import SampledLogprobs, train_upper_layers

ROWS, LENGTH = 4, 256
"""Trajectories of a pass that is timed, and their tokens."""
SAMPLED = 1 / 3
"""Share of a trajectory's tokens that the policy samples; the others are the prompt's and the environment's."""
MOST_PARAMETERS = 2 * 10**9
"""Of a model that is timed: the embedding of a larger one, for which nobody uses a CPU, takes seconds to make."""
PASSES = 4
"""The first one also loads kernels, and another process may slow some of them."""
OF_MODELS = (ConfigError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""What a model's own code raises, or refuses."""
SLOWER = 1.5
"""A data type that takes so many times as long as the other one is warned of, and not written by `init`."""


def speed_on_cpu(config: Config, shape: ModelShape) -> Finding | None:
    """Seconds of a learner step, without its optimizer, on one thread; None for a model that is too large."""
    if shape.parameters > MOST_PARAMETERS:
        return None
    try:
        per_token = _on_one_thread(config, shape)
    except OF_MODELS as error:
        return Finding("warning", "speed", f"not known: a model of this kind cannot be made here: {first_line(error)}")
    own, fastest = config.model.dtype, _fastest(config.model.dtype, per_token)
    other = next(dtype for dtype in per_token if dtype != own)
    trained = config.method.budget if config.has_budget else config.pool.size
    text = (
        f"one core trains about {1 / per_token[own]:.0f} tokens a second in {own}, {1 / per_token[other]:.0f} in "
        f"{other}; {trained} trajectories of {LENGTH} tokens take about {trained * LENGTH * per_token[own]:.0f} s"
    )
    if own != fastest:
        return Finding("warning", "speed", f"{text}: set model.dtype = '{fastest}'")
    return Finding("ok", "speed", text)


def fastest_dtype(config: Config, shape: ModelShape) -> str:
    """In which this machine's CPU trains the model: that of the config, unless the other one is much faster, and for a
    model that cannot be timed."""
    if shape.parameters > MOST_PARAMETERS:
        return config.model.dtype
    try:
        return _fastest(config.model.dtype, _on_one_thread(config, shape))
    except OF_MODELS:
        return config.model.dtype


def _fastest(own: str, per_token: Mapping[str, float]) -> str:
    return next((dtype for dtype, seconds in per_token.items() if SLOWER * seconds < per_token[own]), own)


def _on_one_thread(config: Config, shape: ModelShape) -> dict[str, float]:
    """Seconds per token by data type. Raises: one of OF_MODELS."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {dtype: seconds_per_token(config, shape, dtype) for dtype in ("float32", "bfloat16")}
    finally:
        torch.set_num_threads(threads)


def seconds_per_token(config: Config, shape: ModelShape, dtype: str) -> float:
    """Forward and backward pass of the whole model, from models of one and of three layers, or as many as it has; and
    the further forward passes of an update, a third of the work."""
    more = min(3, shape.layers)
    one, most = (_timed(shape, dtype, layers, config.learner) for layers in (1, more))
    per_layer = max(0.0, (most - one) / max(1, more - 1))
    trained = min(config.learner.trained_layers or shape.layers, shape.layers)
    of_trained, of_others = one + per_layer * (trained - 1), per_layer * (shape.layers - trained)
    scored = (of_trained + of_others) * scored_times(config) / 3
    again = of_trained / 3 if config.learner.gradient_checkpointing else 0.0
    return (of_trained + of_others / 3 + scored + again) / (ROWS * LENGTH)


def scored_times(config: Config) -> float:
    """How often an update computes a trajectory's log-probabilities beside the policy's: π_ref, and π_prox of all
    mini-batches but the first."""
    trajectories = config.method.budget if config.has_budget else config.pool.size
    later = 1 - min(1.0, config.loss.minibatch / trajectories)
    return bool(config.loss.kl_coef) + (later if config.loss.proximal == "recomputed" else 0.0)


def _timed(shape: ModelShape, dtype: str, layers: int, learner: LearnerConfig) -> float:
    """Seconds of the fastest pass through so many layers, with what the learner multiplies with."""
    settings: Any = copy.deepcopy(shape.config)
    settings.num_hidden_layers = layers
    if getattr(settings, "layer_types", None):
        settings.layer_types = settings.layer_types[:layers]
    model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()
    matmul.use_fastest(model, learner)
    if learner.lora.rank:
        Adapter.into(model, learner.lora, "", 0)
    if learner.trained_layers:  # not the embedding and the LM head
        train_upper_layers(model, layers, "")
    chunk = max(1, ROWS * LENGTH * learner.logits_chunk_tokens // learner.micro_batch_tokens)  # of a full micro-batch
    module = SampledLogprobs(model, chunk)
    token_ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    sampled = torch.arange(1, ROWS * LENGTH, round(1 / SAMPLED))
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        module(token_ids, sampled, 1.0)[0].sum().backward()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
