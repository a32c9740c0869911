"""The retriever process: the configured backend behind Search-R1's protocol."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from cusearch_async.config import Config
from cusearch_async.data.questions import load_corpus
from cusearch_async.http_server import serve
from cusearch_async.lifecycle.progress import saying
from cusearch_async.retrieval import indexing
from cusearch_async.retrieval.backend import Backend
from cusearch_async.retrieval.local import LocalSearch, Simulation
from cusearch_async.retrieval.server import Retriever
from cusearch_async.retrieval.websearch import web_search
from cusearch_async.retrieval.zerosearch import ZeroSearch

log = logging.getLogger(__name__)


async def run(config: Config) -> None:
    """Serve until a signal comes."""
    with saying(log, "waiting for the corpus and its index to be loaded"):
        backend = await asyncio.to_thread(make_backend, config)
    try:
        application = Retriever(backend, config.episode.topk).application()
        await serve(application, config.retriever.url, "retriever.url")
    finally:
        await backend.close()


def make_backend(config: Config) -> Backend:
    """Raises: ConfigError when what the config names cannot be loaded."""
    settings = config.retriever
    if settings.backend == "zerosearch":
        return ZeroSearch(settings.zerosearch, config.run.steps, config.run.seed)
    if settings.backend in ("serper", "serpapi"):
        return web_search(settings.backend, settings.web)
    if settings.index is None:
        index = indexing.in_memory(load_corpus(settings.corpus), settings)
    else:
        index = indexing.load(Path(settings.corpus), settings.index, settings)
    simulation = Simulation(
        distractors=settings.distractors,
        noise=settings.noise,
        latency_median_s=settings.latency_median_s,
        latency_p99_s=settings.latency_p99_s,
        seed=config.run.seed,
    )
    return LocalSearch(index, simulation, indexing.reranker(settings), settings.rerank.candidates)
