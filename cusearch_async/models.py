"""Checks of a model's files, before its weights are loaded: whether learner and engines can use it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file, logging

from cusearch_async.errors import ConfigError, first_line

QUANTISED_BY = ("quant_config.json", "quantize_config.json", "hf_quant_config.json")
"""Files of AWQ, GPTQ and ModelOpt, whose config.json may not mention the quantisation."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLDER = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights, or their index, in the form before safetensors."""


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of a model. Raises: ConfigError that names the setting `key`, the model and the fault."""
    refuse_missing_folder(path, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, mistral_format=False)
    except Exception as error:  # tokenizers, in Rust, raises nothing more special for a damaged file
        settings = file_of(path, "tokenizer_config.json")
        is_custom = settings is not None and '"auto_map"' in settings.read_text(encoding="utf-8", errors="replace")
        refuse_custom_code(error, is_custom, path, key)
        raise ConfigError(_unloadable(path, key, "tokenizer that can be loaded", error)) from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(f"{key} {path!r} has no tokenizer files; put tokenizer.json next to the weights")
    return tokenizer


def check_model(path: str, episode_tokens: int, key: str = "model.path") -> Any:
    """Check that learner and engines can load, use and save a model; returns its tokenizer. Raises: ConfigError."""
    check_context(path, episode_tokens, key)
    return check_files(path, key)


def check_files(path: str, key: str = "model.path") -> Any:
    """Compare a model's files with each other; returns its tokenizer. Raises: ConfigError."""
    read_config(path, key)
    tokenizer = load_tokenizer(path, key)
    refuse_longer_tokenizer(tokenizer, path, key)
    generation_config(path, key)
    refuse_incomplete(path, key)
    return tokenizer


def check_context(path: str, needed: int, key: str = "model.path") -> None:
    """Raises: ConfigError when the model is not a text model, an episode can be longer than its context, or learner and
    engine would compute its positions differently."""
    config = read_config(path, key)
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise ConfigError(
            f"{key} {path!r} is a {config.model_type}, whose config states no longest text (max_position_embeddings), "
            "and is not supported; use one like Qwen/Qwen2.5-3B"
        )
    if needed > context:
        raise ConfigError(
            f"an episode can take {needed} tokens (episode.max_prompt_tokens + (s_max + 1) max_turn_tokens + "
            f"s_max max_observation_tokens), but {path!r} has a context of {context}; lower one of them"
        )
    refuse_two_ropes(config, needed, path, key)


def refuse_two_ropes(config: Any, needed: int, path: str, key: str = "model.path") -> None:
    """Raises: ConfigError where episodes can be longer than the original context of LongRoPE, there vLLM always takes
    the factors for long texts, transformers those for the longest text of each batch, or of Llama 4's scaling, which
    vLLM does not read."""
    rope = getattr(config, "rope_parameters", None) or {}
    for layers in (rope, *rope.values()):  # one for all layers, or one for each kind of layer
        if not isinstance(layers, Mapping):
            continue
        kind = "LongRoPE" if layers.get("rope_type") == "longrope" else "llama_4_scaling_beta"
        if kind != "LongRoPE" and not layers.get(kind):
            continue
        original = layers.get("original_max_position_embeddings") or config.max_position_embeddings
        if needed > original:
            raise ConfigError(
                f"{key} {path!r} has {kind}, whose positions change in texts of more than {original} tokens, and an "
                f"episode can take {needed}: learner and engine would compute different log-probabilities; lower the "
                f"lengths of [episode] to {original} tokens in all, or use another model"
            )


def refuse_longer_tokenizer(tokenizer: Any, path: str, key: str = "model.path") -> None:
    """Raises: ConfigError when the tokenizer has ids beyond the embedding, except placeholders of images or sounds
    (Gemma 3 has one)."""
    rows = vocab_size(path)
    media = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")}
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows and token not in media}
    if beyond:
        token = min(beyond, key=beyond.__getitem__)
        raise ConfigError(
            f"{key} {path!r}: its tokenizer has {max(beyond.values()) + 1} tokens, its embedding only {rows} rows: "
            f"{token!r} has id {beyond[token]}; enlarge the embedding (resize_token_embeddings), or take the tokenizer "
            "that belongs to these weights"
        )


def vocab_size(path: str) -> int:
    """Rows of the embedding: token ids are below it. Raises: ConfigError."""
    return int(read_config(path).vocab_size)


def refuse_more_layers(trained: int | None, layers: int | None, path: str) -> None:
    """Raises: ConfigError where learner.trained_layers is more than the `layers` of the model at `path`."""
    if trained is not None and layers is not None and trained > layers:
        raise ConfigError(f"learner.trained_layers ({trained}) must be <= {layers}, the layers of {path!r}")


def read_config(path: str, key: str = "model.path") -> Any:
    """A model's config.json. Raises: ConfigError when it cannot be read, or when the model is multimodal, no causal LM,
    quantised or needs custom code."""
    refuse_missing_folder(path, key)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        refuse_custom_code(error, False, path, key)
        raise ConfigError(_unloadable(path, key, "readable config.json", error)) from error
    if config.get_text_config() is not config:
        raise ConfigError(
            f"{key} {path!r} is multimodal ({config.model_type}); only text models are supported: use a causal LM like "
            "Qwen/Qwen2.5-3B"
        )
    kinds = config.architectures or []
    if kinds and not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        raise ConfigError(f"{key} {path!r} is a {kinds[0]}, which is no causal LM; use one like Qwen/Qwen2.5-3B")
    stated = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if stated is not None:
        stated = stated if isinstance(stated, Mapping) else stated.to_dict()
        bits = next((f"bitsandbytes, {n} bit" for n in (4, 8) if stated.get(f"load_in_{n}bit")), None)
        method = stated.get("quant_method") or bits or "quantization_config"
    else:
        method = next((name for name in QUANTISED_BY if file_of(path, name)), None)
    if method is not None:
        raise ConfigError(f"{key} {path!r} is quantised ({method}), not trainable; give the unquantised checkpoint")
    return config


def refuse_custom_code(error: Exception, is_custom: bool, path: str, key: str) -> None:
    """Raises: ConfigError when the model `is_custom`, or `error` is about custom code."""
    if is_custom or "trust_remote_code" in str(error):
        raise ConfigError(
            f"{key} {path!r} needs custom code (trust_remote_code), which is not supported; use a model that "
            "transformers knows"
        ) from error


def generation_config(path: str, key: str = "model.path") -> GenerationConfig:
    """A model's generation_config.json, or its part of config.json. Raises: ConfigError for an unreadable file."""
    if file_of(path, "generation_config.json") is None:
        return GenerationConfig.from_model_config(read_config(path, key))
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key} {path!r} has a generation_config.json that cannot be used: {first_line(error)}; correct it, or "
            "remove it if config.json has the right eos_token_id"
        ) from error


def why_not_saved(settings: GenerationConfig) -> str | None:
    """Why transformers would refuse to write a generation config; None if it would not."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def ids_of(settings: GenerationConfig) -> GenerationConfig:
    """Only the tokens that begin, end and fill a text. Nothing else of it is used: [episode] has a run's sampling."""
    ids = {name: value for name, value in settings.to_dict().items() if name.endswith("_token_id")}
    return GenerationConfig(**{name: v for name, v in ids.items() if isinstance(v, list) or (v is not None and v >= 0)})


def refuse_incomplete(path: str, key: str = "model.path") -> None:
    """Compare names and shapes in a model's safetensors files with its config, without reading a weight. A model that
    is not on this machine yet is checked when it is loaded. Raises: ConfigError."""
    import torch  # noqa: PLC0415  (takes seconds to import)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415  (imports torch)

    config = read_config(path, key)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{key} {path!r} is a {config.model_type}, which is no causal LM; use one like Qwen/Qwen2.5-3B"
        )
    files = weight_files(path, key)
    if not files:
        if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in OLDER):
            raise ConfigError(f"{key} {path!r} holds no weights, like {WEIGHTS}; copy them there, or choose another")
        return
    held = {name: torch.empty(shape, device="meta") for file in files for name, shape in shapes_in(file, path, key)}
    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=held,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
    refuse_other_weights(report, path, key)


def refuse_other_weights(report: Mapping[str, Any], path: str, key: str = "model.path") -> None:
    """`report` is transformers' loading info. Raises: ConfigError when weights are missing, have another shape, or have
    no place in the model."""
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise ConfigError(
            f"{key} {path!r}: {name} has shape {list(found)} in its files, but its config.json asks for "
            f"{list(wanted)}; give a folder whose config.json belongs to its weights"
        )
    for kind, what, then in (
        ("missing_keys", "lacks weights that its config.json asks for", "they would be random numbers"),
        ("unexpected_keys", "has weights that its config.json has no place for", "they would be ignored"),
    ):
        names = sorted(report[kind])
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            raise ConfigError(f"{key} {path!r} {what} ({names[0]}{others}): {then}; give a complete checkpoint")


def weight_files(path: str, key: str, form: tuple[str, str] = (WEIGHTS, INDEX)) -> list[Path]:
    """The safetensors files of a model, or those of the OLDER form, that are on this machine; empty if one is not there
    yet, or there are none.

    Raises: ConfigError when the index names a file that a local folder does not hold."""
    whole, index = (file_of(path, name) for name in form)
    if whole is not None or index is None:
        return [whole] if whole else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{key} {path!r} has a {index.name} that cannot be read: {first_line(error)}") from error
    files = {name: file_of(path, name) for name in names}
    absent = [name for name, file in files.items() if file is None]
    if absent and Path(path).is_dir():
        raise ConfigError(f"{key} {path!r} lacks {absent[0]}, which its {index.name} names; give a complete checkpoint")
    return [] if absent else [file for file in files.values() if file]


def shapes_in(file: Path, path: str, key: str) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of each tensor of a file. Raises: ConfigError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  (imports torch)

    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_slice(name).get_shape()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{key} {path!r}: {file.name} cannot be read ({first_line(error)}); copy it again") from error


def file_of(path: str, name: str) -> Path | None:
    """A file of a model, in its folder or in the Hub's local cache; None if it is not there."""
    found = cached_file(
        path,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def config_bytes(path: str) -> bytes:
    """The bytes of config.json, from a folder or from the Hub. Raises: ConfigError."""
    try:
        return Path(cached_file(path, "config.json")).read_bytes()
    except OSError as error:
        raise ConfigError(f"model.path {path!r} has no readable config.json: {first_line(error)}") from error


def refuse_missing_folder(path: str, key: str) -> None:
    """Raises: ConfigError for a path that cannot be a Hub id and is not a model folder: the Hub's error would
    mislead."""
    place = Path(path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(f"{key} {path!r} holds no config.json, so it is not a model folder; choose another")
        if (place / "adapter_config.json").is_file():
            raise ConfigError(f"{key} {path!r} holds an adapter (adapter_config.json); merge it into its model first")
    elif place.exists():
        raise ConfigError(f"{key} {path!r} is a file; give a model folder, or a Hub id like Qwen/Qwen2.5-3B")
    elif is_local(path):
        raise ConfigError(f"{key} {path!r} does not exist; give a model folder, or a Hub id like Qwen/Qwen2.5-3B")


def _unloadable(path: str, key: str, what: str, error: Exception) -> str:
    """Why `what` is not there, and whether the path was tried as a folder or as a Hub id."""
    has = "has" if Path(path).is_dir() else "is no folder here, and as a Hub id it has"
    reason = first_line(error) if isinstance(error, OSError) else " ".join(str(error).split())
    return f"{key} {path!r} {has} no {what}: {reason}"


def is_local(path: str) -> bool:
    """Whether a path cannot be a Hub id. A Hub id is NAME or OWNER/NAME, without a local folder OWNER."""
    parts = path.split("/")
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path, re.ASCII)
    return not is_name or (len(parts) == 2 and Path(parts[0]).is_dir())
