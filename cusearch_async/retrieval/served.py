"""What a retriever serves, in words with a checksum: part of the run contract, so that one run searches one corpus.

It has what decides which documents a search gets, and nothing of where and how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from cusearch_async.config import Config
from cusearch_async.retrieval.backend import Passage
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.retrieval.encoder_folder import resolved

_OF_DENSE = {"batch", "device"}
_OF_SIMULATOR = {"url", "timeout_s"}


def what_is_served(config: Config, passages: Sequence[Passage] = ()) -> str:
    """Of a retriever with this config; `passages` are its corpus, for bm25 and dense. ASCII, for an HTTP header.

    Raises: ConfigError when pooling or prefixes of the encoder are not known."""
    settings = config.retriever
    facts: dict[str, Any] = {}
    if settings.backend in ("bm25", "dense"):
        name = f"{settings.backend} over {len(passages)} passages"
        facts = {"corpus": _checksum_of(passages)}
        if settings.backend == "dense":
            facts["dense"] = resolved(settings.dense).model_dump(mode="json", exclude=_OF_DENSE)
        else:
            facts["bm25"] = settings.bm25.model_dump(mode="json")
        if settings.rerank.model:
            facts["rerank"] = settings.rerank.model_dump(mode="json")
        if settings.noise or settings.distractors:
            facts["noise"] = settings.noise, settings.distractors, settings.stochastic, config.run.seed
    elif settings.backend == "zerosearch":
        name = f"zerosearch by {settings.zerosearch.model or 'the model of its server'}"
        facts = settings.zerosearch.model_dump(mode="json", exclude=_OF_SIMULATOR) | {"seed": config.run.seed}
    else:
        name = settings.backend
        facts = {"options": repr(settings.options), "url": settings.web.url}
    return f"{name} ({_checksum(facts)})".encode("ascii", "backslashreplace").decode()


def _checksum_of(passages: Sequence[Passage]) -> str:
    if isinstance(passages, Corpus):
        return passages.fingerprint
    return _checksum([[passage["id"], passage["contents"]] for passage in passages])


def _checksum(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(value, order="deterministic"))
