"""The retriever process: an index behind Search-R1's protocol."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from aiohttp import web

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data import load_corpus
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.server import Retriever, Simulation

log = logging.getLogger(__name__)


async def run(config: Config) -> None:
    """Serve until a signal comes."""
    stop = host.stop_on_signals()
    settings = config.retriever
    index = Bm25Index(load_corpus(settings.corpus))
    simulation = Simulation(
        distractors=settings.distractors,
        noise=settings.noise,
        latency_median_s=settings.latency_median_s,
        latency_p99_s=settings.latency_p99_s,
        seed=config.run.seed,
    )
    runner = web.AppRunner(Retriever(index, simulation, config.episode.topk).application(), access_log=None)
    await runner.setup()
    where = urlsplit(settings.url)
    port = where.port or 8000
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        raise ConfigError(f"retriever.url: cannot listen on port {port} ({error.strerror}); choose another") from error
    log.info("serving %d passages at %s", len(index.passages), settings.url)
    await stop.wait()
    await runner.cleanup()
