"""Pooling and prefixes of an encoder, from the files that sentence-transformers keeps in its folder.

`modules.json` names the modules, `1_Pooling/config.json` the pooling, and `config_sentence_transformers.json` the texts
before queries and passages ("prompts"). Settings that are None take these values; others must not contradict them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from cusearch_async.config import E5, DenseConfig
from cusearch_async.errors import ConfigError, first_line, hub_reason

T = TypeVar("T", dict[str, Any], list[Any])

MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling", "config_sentence_transformers.json"
_E5_PREFIXES = ("query: ", "passage: ")
"""From the encoder's card; its folder does not state them."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "lasttoken": "last"}
"""Name in the files, in either of their versions -> ours."""
_QUERY_PROMPTS, _PASSAGE_PROMPTS = ("query",), ("document", "passage", "corpus")
"""Names under which sentence-transformers looks for the texts before queries and documents."""


class _Unknown(Exception):
    """A file of the Hub that can be neither read nor known to be missing."""


class _Stated(NamedTuple):
    """The contents of the files."""

    settings: dict[str, tuple[str | bool | None, str]]
    """Setting -> value, None where it is not stated, and file."""
    pools_prompts: bool
    """Whether the mean is also over the tokens of the prompt."""
    other_prompts: tuple[str, ...]
    """Names of prompts when none is for queries or passages."""


def resolved(settings: DenseConfig) -> DenseConfig:
    """The settings with `pooling` and both prefixes set. Raises: ConfigError when they contradict the encoder's own
    files, these cannot be read, or require something that is not supported."""
    encoder = f"retriever.dense.encoder {settings.encoder!r}"
    try:
        stated = _stated(settings.encoder)
    except _Unknown as error:
        if None not in (settings.pooling, settings.query_prefix, settings.passage_prefix):
            return settings
        raise ConfigError(
            f"{encoder}: its pooling and prefixes are unknown ({error}); download all of it, or set "
            "retriever.dense.pooling, query_prefix and passage_prefix"
        ) from error
    if stated.other_prompts and settings.query_prefix is None:
        has = f"{PROMPTS} of {settings.encoder!r} has the prompts {', '.join(stated.other_prompts)}"
        raise ConfigError(f"retriever.dense.query_prefix must be set: {has}, and none is called 'query'")
    query, passage = _E5_PREFIXES if settings.encoder == E5 else ("", "")
    values: dict[str, Any] = {"pooling": "mean", "query_prefix": query, "passage_prefix": passage, "normalize": True}
    for name, (value, file) in stated.settings.items():
        own = getattr(settings, name)
        if None not in (own, value) and own != value:
            there = f"{file} of {settings.encoder!r}, which has {value!r}"
            raise ConfigError(f"retriever.dense.{name} {own!r} contradicts {there}; leave it out")
        values[name] = next((one for one in (own, value) if one is not None), values[name])
    has_prompt = bool(values["query_prefix"] or values["passage_prefix"])
    if values["pooling"] == "mean" and has_prompt and not stated.pools_prompts:
        leaves = f"leaves its prompts out of the mean (include_prompt in {stated.settings['pooling'][1]})"
        raise ConfigError(f"{encoder} {leaves}, which is not supported; choose another encoder")
    return settings.model_copy(update=values)


def _stated(encoder: str) -> _Stated:
    kinds = {}
    for module in _read(encoder, MODULES, []):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            known = f"only {', '.join(_KNOWN_MODULES)} are supported, choose another encoder"
            raise ConfigError(f"retriever.dense.encoder {encoder!r} has a module {kind!r} ({MODULES}); {known}")
        kinds[kind] = str(module.get("path", ""))
    file = f"{kinds.get('Pooling') or POOLING}/config.json"
    pooling, prompts = _read(encoder, file, {}), _read(encoder, PROMPTS, {})
    named, default = prompts.get("prompts"), prompts.get("default_prompt_name")
    listed = named.items() if isinstance(named, dict) else ()
    texts = {name: text for name, text in listed if isinstance(text, str) and text}
    query, passage = (
        next((texts[name] for name in (*names, default) if name in texts), None)
        for names in (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    )
    settings = {
        "pooling": (_pooling(encoder, file, pooling), file),
        "query_prefix": (query, PROMPTS),
        "passage_prefix": (passage, PROMPTS),
        "normalize": (True if "Normalize" in kinds else None, MODULES),
    }
    is_other = query is None and passage is None
    return _Stated(settings, pooling.get("include_prompt") is not False, tuple(texts) if is_other else ())


def _pooling(encoder: str, file: str, config: dict[str, Any]) -> str | None:
    """Raises: ConfigError for a pooling that we do not have."""
    modes = config.get("pooling_mode")
    if modes is None:
        named = [name for name, is_on in config.items() if is_on is True and name.startswith("pooling_mode_")]
        modes = [name.removeprefix("pooling_mode_") for name in named]
    modes = modes if isinstance(modes, list) else [modes]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        pools = f"pools by {' and '.join(map(str, modes))} ({file})"
        known = "only mean, cls and lasttoken are supported, choose another encoder"
        raise ConfigError(f"retriever.dense.encoder {encoder!r} {pools}; {known}")
    return _POOLINGS[modes[0]]


def _read(encoder: str, file: str, missing: T) -> T:
    """The JSON of a file of the encoder; `missing` when it has no such file. Raises: ConfigError; _Unknown."""
    path = _locate(encoder, file)
    if path is None:
        return missing
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, type(missing)):
            raise ValueError(f"it must hold a {type(missing).__name__}, got {found!r:.100}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"retriever.dense.encoder {encoder!r}: cannot read {file}: {first_line(error)}") from error
    return found


def _locate(encoder: str, file: str) -> Path | None:
    """In the encoder's folder, or from the Hub; None when there is no such file. Raises: _Unknown."""
    if Path(encoder).is_dir():
        path = Path(encoder, file)
        return path if path.is_file() else None
    try:
        if try_to_load_from_cache(encoder, file) is _CACHED_NO_EXIST:
            return None
        return Path(hf_hub_download(encoder, file))
    except LocalEntryNotFoundError as error:
        raise _Unknown(f"{file} is not in the cache, and the Hub cannot be reached") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # a connection that breaks raises what the Hub's HTTP library has
        raise _Unknown(f"{file}: {hub_reason(error)}") from error
