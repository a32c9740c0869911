"""The retriever process: the configured backend behind Search-R1's protocol."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from cusearch_async.config import BACKENDS, Config
from cusearch_async.data.questions import load_corpus
from cusearch_async.errors import ConfigError
from cusearch_async.extensions import load_function
from cusearch_async.http_server import serve
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import ending_at_once
from cusearch_async.retrieval import indexing
from cusearch_async.retrieval.backend import Backend
from cusearch_async.retrieval.indexing import Degradation, IndexBackend
from cusearch_async.retrieval.server import Retriever, what_is_served
from cusearch_async.retrieval.websearch import web_search
from cusearch_async.retrieval.zerosearch import ZeroSearch

log = logging.getLogger(__name__)


async def run(config: Config) -> None:
    """Serve until a signal arrives."""
    loading = "the corpus and its index were being loaded"  # in a thread, for which Python waits whatever the signal
    with log_waiting(log, "waiting for the corpus and its index to be loaded"), ending_at_once(loading):
        backend = await asyncio.to_thread(make_backend, config)
    try:
        own = retriever_of(config, backend)
        await serve(own.application(), config.retriever.url, "retriever.url", what=own.serves or "")
    finally:
        await backend.close()


def retriever_of(config: Config, backend: Backend) -> Retriever:
    passages = backend.passages if isinstance(backend, IndexBackend) else ()
    serves = what_is_served(config.retriever, config.run.seed, config.run.steps, passages)
    return Retriever(backend, config.retriever.topk, serves)


def make_backend(config: Config) -> Backend:
    """Raises: ConfigError for a backend, corpus or index that cannot be loaded."""
    settings = config.retriever
    if settings.backend not in BACKENDS:
        return own_backend(settings.backend, settings.options)
    if settings.backend == "zerosearch":
        return ZeroSearch(settings.zerosearch, config.run.steps, config.run.seed)
    if settings.backend in ("serper", "serpapi"):
        return web_search(settings.backend, settings.web, settings.timeout_s - settings.web.longest_s)
    if settings.index is None:
        index = indexing.in_memory(load_corpus(settings.corpus), settings)
    else:
        index = indexing.load(Path(settings.corpus), settings.index, settings)
    return IndexBackend(index, Degradation(settings, config.run.seed), indexing.reranker(settings))


def own_backend(name: str, options: dict[str, Any]) -> Backend:
    """A user's backend, `package.module:Name`. Raises: ConfigError when it cannot be made, or is not a Backend."""
    make = load_function("retriever.backend", name, BACKENDS)
    try:
        backend: Backend = make(**options)
    except TypeError as error:
        raise ConfigError(f"retriever.options {options} do not fit {name}: {error}") from error
    needed = ("deterministic", "accepts_seed", "search", "figures", "close")
    missing = [member for member in needed if not hasattr(backend, member)]
    if missing:
        raise ConfigError(
            f"retriever.backend: {name} is not a retrieval.backend.Backend, it has no {', '.join(missing)}"
        )
    return backend
