"""Checks of a model before its weights are loaded: its location, tokenizer and context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from cusearch_async.errors import ConfigError, first_line


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of a model. Raises: ConfigError that names the setting `key`, the model and what is missing."""
    refuse_missing_folder(path, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_unloadable(path, key, "tokenizer that can be loaded", error)) from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(f"{key} {path!r} has no tokenizer files; put tokenizer.json next to the weights")
    return tokenizer


def check_model(path: str, episode_tokens: int, key: str = "model.path") -> Any:
    """Check a model before its weights are loaded; returns its tokenizer.

    Raises: ConfigError when it has no tokenizer, or its context is too short for an episode."""
    check_context(path, episode_tokens, key)
    return load_tokenizer(path, key)


def check_context(path: str, needed: int, key: str = "model.path") -> None:
    """Raises: ConfigError when the model is not a text model, or an episode can be longer than its context."""
    config = read_config(path, key)
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise ConfigError(
            f"{key} {path!r} is a {config.model_type}, whose config has no max_position_embeddings; use a causal LM"
        )
    if needed > context:
        raise ConfigError(
            f"an episode can take {needed} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + "
            f"s_max max_observation_tokens), but {path!r} has a context of {context}; lower one of them"
        )


def vocab_size(path: str) -> int:
    """Rows of the embedding: token ids are below it. Raises: ConfigError."""
    return int(read_config(path).vocab_size)


def read_config(path: str, key: str = "model.path") -> Any:
    """A model's config.json. Raises: ConfigError when it cannot be read, or when the model is multimodal: such a model
    has its text config inside another one, which learner and engine do not support."""
    refuse_missing_folder(path, key)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(_unloadable(path, key, "config that can be read", error)) from error
    if config.get_text_config() is not config:
        raise ConfigError(
            f"{key} {path!r} is a {config.model_type}, which takes more than text; only text models are supported: "
            "use a causal LM like Qwen/Qwen2.5-3B"
        )
    return config


def config_bytes(path: str) -> bytes:
    """The bytes of config.json, from a folder or from the Hub. Raises: ConfigError."""
    try:
        return Path(cached_file(path, "config.json")).read_bytes()
    except OSError as error:
        raise ConfigError(f"model.path {path!r} has no config that can be read: {first_line(error)}") from error


def refuse_missing_folder(path: str, key: str) -> None:
    """Raises: ConfigError for a path that cannot be a Hub id and is not a model folder. Otherwise the Hub would answer
    with a misleading error about repository names."""
    place = Path(path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(f"{key} {path!r} holds no config.json, so it is not a model folder; choose another")
    elif place.exists():
        raise ConfigError(f"{key} {path!r} is a file; give a model folder, or a Hub id like Qwen/Qwen2.5-3B")
    elif is_local(path):
        raise ConfigError(f"{key} {path!r} does not exist; give a model folder, or a Hub id like Qwen/Qwen2.5-3B")


def _unloadable(path: str, key: str, what: str, error: Exception) -> str:
    """Why `what` is not there; for a path that may be a folder or a Hub id, what it was tried as."""
    has = "has" if Path(path).is_dir() else "is no folder here, and as a Hub id it has"
    return f"{key} {path!r} {has} no {what}: {first_line(error)}"


def is_local(path: str) -> bool:
    """Whether a path cannot be a Hub id. A Hub id is NAME or OWNER/NAME, without a local folder OWNER."""
    parts = path.split("/")
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path, re.ASCII)
    return not is_name or (len(parts) == 2 and Path(parts[0]).is_dir())
