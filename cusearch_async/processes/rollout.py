"""The rollout process: one engine, many episodes at once."""

from __future__ import annotations

import asyncio
import logging

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data.questions import load_questions
from cusearch_async.models import check_model, vocab_size
from cusearch_async.rollout.dialogue import check_lengths
from cusearch_async.rollout.engine import Engine
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.run_contract import contract_of
from cusearch_async.transport.weights import WeightStore

log = logging.getLogger(__name__)


async def run(config: Config, name: str) -> None:
    """Be the rollout worker `name` until a signal comes."""
    stop = host.stop_on_signals()
    with host.saying(log, "waiting for the questions to be read"):
        questions = load_questions(config.data.source)
        tokenizer = check_model(config.model.location, config.episode.max_tokens)
        check_lengths(questions, tokenizer, config.episode)
        contract = contract_of(config, questions, tokenizer)
    async with open_buffer(config, config.run.wait_s, stop, contract=contract) as buffer:
        await buffer.check_contract()
    async with (
        open_buffer(config, config.redis.outage_s, stop, vocab_size(config.model.location), contract) as buffer,
        SearchClient.open(config) as search,
    ):
        waiting = asyncio.ensure_future(search.wait_until_answering(config.run.wait_s))
        if not await host.unless_stopped(waiting, stop):
            return
        waiting.result()
        engine = Engine.start(config.model.location, tokenizer, config)
        try:
            player = Player(engine, search, tokenizer, config.episode, config.run.seed)
            store = WeightStore(config.folder / "weights")
            log.info("ready")
            await RolloutLoop(name, config, buffer, engine, store, player, search, questions).run(stop)
            log.info("stopped; its tickets went back")
        finally:
            engine.close()
