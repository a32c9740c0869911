"""What is known of a model before its weights are loaded: where it is, its tokenizer, its context."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer

from cusearch_async.errors import ConfigError


def load_tokenizer(path: str) -> Any:
    """Raises: ConfigError naming the model and what is missing."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {path!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(f"model.path {path!r} has no tokenizer files; put tokenizer.json beside the weights")
    return tokenizer


def check_model(path: str, episode_tokens: int) -> Any:
    """What can be known of a model before its weights are loaded; returns its tokenizer.

    Raises: ConfigError when it has no tokenizer, or a context too short for an episode."""
    check_context(path, episode_tokens)
    return load_tokenizer(path)


def check_context(path: str, needed: int) -> None:
    """Raises: ConfigError when an episode can be longer than the model's context."""
    try:
        context = AutoConfig.from_pretrained(path).max_position_embeddings
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {path!r} has no config that can be read: {first_line(error)}") from error
    if needed > context:
        raise ConfigError(
            f"an episode can take {needed} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + "
            f"s_max max_observation_tokens), but {path!r} has a context of {context}; lower one of them"
        )


def first_line(error: Exception) -> str:
    """An error as one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
