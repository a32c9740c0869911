"""The policy as the learner sees it: log-probabilities of the sampled tokens, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cusearch_async.errors import ConfigError
from cusearch_async.models import resolve_model

LOGITS_AT_ONCE = 4096
"""Tokens whose logits are held at a time: with 150,000 tokens of vocabulary, logits dwarf the model."""


def load_tokenizer(path: str) -> Any:
    """Raises: ConfigError naming the model and what is missing."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(path))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {path!r} has no tokenizer that can be loaded: {_first_line(error)}") from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(f"model.path {path!r} has no tokenizer files; put tokenizer.json beside the weights")
    return tokenizer


def check_model(path: str, episode_tokens: int) -> None:
    """What can be known of a model before its weights are loaded.

    Raises: ConfigError when it has no tokenizer, or a context too short for an episode."""
    check_context(path, episode_tokens)
    load_tokenizer(path)


def load_causal_lm(path: str, dtype: str) -> Any:
    """Raises: ConfigError naming the model and what is wrong."""
    resolved = resolve_model(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(resolved, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} cannot be loaded: {_first_line(error)}") from error
    return model


def check_context(path: str, needed: int) -> None:
    """Raises: ConfigError when an episode can be longer than the model's context."""
    try:
        context = AutoConfig.from_pretrained(resolve_model(path)).max_position_embeddings
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} has no config that can be read: {_first_line(error)}") from error
    if needed > context:
        raise ConfigError(
            f"an episode can take {needed} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + "
            f"s_max max_observation_tokens), but {path!r} has a context of {context}; lower one of them"
        )


class SampledLogprobs(nn.Module):
    """Wraps a causal language model; the module that DeepSpeed trains.

    Only positions that predict a sampled token go through the LM head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token_ids: torch.Tensor, sampled: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy [S], float32, of every sampled token in row-major order.

        `token_ids` [B, L] are padded on the right, so causal attention never sees the padding. The first token
        of a row is never a sampled one. Entropy carries no gradient."""
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        predicting = hidden[:, :-1][sampled[:, 1:]]
        targets = token_ids[:, 1:][sampled[:, 1:]]
        parts = [
            checkpoint(self._head, h, t, temperature, use_reentrant=False)
            if torch.is_grad_enabled() and len(predicting) > LOGITS_AT_ONCE
            else self._head(h, t, temperature)
            for h, t in zip(torch.split(predicting, LOGITS_AT_ONCE), torch.split(targets, LOGITS_AT_ONCE), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _head(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model.get_output_embeddings()(hidden).float() / temperature
        log_all = torch.log_softmax(logits, dim=-1)
        chosen = log_all.gather(-1, targets[:, None]).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_all.exp() * log_all).sum(-1)
        return chosen, entropy


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def save_model(model: Any, tensors: dict[str, torch.Tensor], tokenizer: Any, folder: Path) -> None:
    """Write the policy as a Hugging Face folder that any tool loads."""
    model.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
