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
from cusearch_async.errors import ConfigError, first_line

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
    """What the files state; None where they state nothing."""

    pooling: str | None
    pooling_file: str
    pools_prompts: bool
    """Whether the mean is also over the tokens of the prompt."""
    normalizes: bool
    query_prefix: str | None
    passage_prefix: str | None
    other_prompts: tuple[str, ...]
    """Names of prompts when none is for queries or passages."""


def resolved(settings: DenseConfig) -> DenseConfig:
    """The settings with `pooling` and both prefixes set. Raises: ConfigError when they contradict the encoder's own
    files, these cannot be read, or ask for what is not supported."""
    is_set = None not in (settings.pooling, settings.query_prefix, settings.passage_prefix)
    try:
        stated = _stated(settings.encoder)
    except _Unknown as error:
        if is_set:
            return settings
        raise ConfigError(
            f"retriever.dense.encoder {settings.encoder!r}: its pooling and prefixes are unknown ({error}); download "
            "all of it, or set retriever.dense.pooling, query_prefix and passage_prefix"
        ) from error
    if stated.other_prompts and settings.query_prefix is None:
        has = f"{PROMPTS} of {settings.encoder!r} has the prompts {', '.join(stated.other_prompts)}"
        raise ConfigError(f"retriever.dense.query_prefix must be set: {has}, and none is called 'query'")
    query, passage = _E5_PREFIXES if settings.encoder == E5 else ("", "")
    values = {
        "pooling": _agreed(settings, "pooling", stated.pooling, stated.pooling_file, "mean"),
        "query_prefix": _agreed(settings, "query_prefix", stated.query_prefix, PROMPTS, query),
        "passage_prefix": _agreed(settings, "passage_prefix", stated.passage_prefix, PROMPTS, passage),
    }
    found = settings.model_copy(update=values)
    if stated.normalizes and not settings.normalize:
        raise _contradiction(settings, "normalize", True, MODULES)
    if found.pooling == "mean" and not stated.pools_prompts and (found.query_prefix or found.passage_prefix):
        leaves = f"leaves its prompts out of the mean (include_prompt in {stated.pooling_file}), which is not supported"
        raise ConfigError(f"retriever.dense.encoder {settings.encoder!r} {leaves}; choose another encoder")
    return found


def _agreed(settings: DenseConfig, name: str, stated: str | None, file: str, otherwise: str) -> str:
    """The setting, or the value in the file, or `otherwise`. Raises: ConfigError when the first two differ."""
    own: str | None = getattr(settings, name)
    if own is not None and stated is not None and own != stated:
        raise _contradiction(settings, name, stated, file)
    return next((value for value in (own, stated) if value is not None), otherwise)


def _contradiction(settings: DenseConfig, name: str, stated: str | bool, file: str) -> ConfigError:
    there = f"{file} of {settings.encoder!r}, which has {stated!r}"
    return ConfigError(f"retriever.dense.{name} {getattr(settings, name)!r} contradicts {there}; leave it out")


def _stated(encoder: str) -> _Stated:
    """Raises: ConfigError; _Unknown."""
    kinds = {}
    for module in _read(encoder, MODULES, []):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            known = f"only {', '.join(_KNOWN_MODULES)} are supported, choose another encoder"
            raise ConfigError(f"retriever.dense.encoder {encoder!r} has a module {kind!r} ({MODULES}); {known}")
        kinds[kind] = str(module.get("path", ""))
    pooling_file = f"{kinds.get('Pooling') or POOLING}/config.json"
    pooling = _read(encoder, pooling_file, {})
    prompts = _read(encoder, PROMPTS, {})
    named, default = prompts.get("prompts"), prompts.get("default_prompt_name")
    listed = named.items() if isinstance(named, dict) else ()
    texts = {name: text for name, text in listed if isinstance(text, str) and text}
    query, passage = (
        next((texts[name] for name in (*names, default) if name in texts), None)
        for names in (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    )
    return _Stated(
        pooling=_pooling(encoder, pooling_file, pooling),
        pooling_file=pooling_file,
        pools_prompts=pooling.get("include_prompt") is not False,
        normalizes="Normalize" in kinds,
        query_prefix=query,
        passage_prefix=passage,
        other_prompts=() if query or passage else tuple(texts),
    )


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
        known = "only mean, cls and lasttoken are supported, choose another encoder"
        raise ConfigError(
            f"retriever.dense.encoder {encoder!r} pools by {' and '.join(map(str, modes))} ({file}); {known}"
        )
    return _POOLINGS[modes[0]]


def _read(encoder: str, file: str, missing: T) -> T:
    """The JSON of a file of the encoder; `missing` when it has no such file. Raises: ConfigError; _Unknown."""
    path = _locate(encoder, file)
    if path is None:
        return missing
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"retriever.dense.encoder {encoder!r}: cannot read {file}: {first_line(error)}") from error
    if not isinstance(found, type(missing)):
        said = f"{file} must hold a {type(missing).__name__}, got {found!r:.100}"
        raise ConfigError(f"retriever.dense.encoder {encoder!r}: {said}")
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
    except (OSError, ValueError) as error:
        raise _Unknown(f"{file}: {first_line(error)}") from error
