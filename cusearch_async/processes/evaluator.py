"""The evaluator process: scores published versions on held-out questions while the run goes on.

It has an engine of its own and takes no tickets: training does not wait for it, and it skips versions that come
faster than it can score them."""

from __future__ import annotations

import asyncio
import logging
import time

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data.questions import load_eval_questions, load_questions
from cusearch_async.models import check_model
from cusearch_async.rollout.engine import Engine
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loading import PatientLoader, wait_until_announced
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.training.evaluation import is_due, score
from cusearch_async.training.scores import Done, is_over, record
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import WorkerBuffer
from cusearch_async.transport.run_contract import contract_of
from cusearch_async.transport.weights import WeightStore

log = logging.getLogger(__name__)

POLL_S = 0.5


async def run(config: Config) -> None:
    """Score every `eval.every` steps, and the last version; ends with the run, or with a signal."""
    stop = host.stop_on_signals()
    questions = load_eval_questions(config)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    contract = contract_of(config, load_questions(config.data.source), tokenizer)
    async with (
        open_buffer(config, config.redis.outage_s, stop, contract=contract) as buffer,
        SearchClient.open(config) as search,
    ):
        await buffer.check_contract()
        waiting = asyncio.ensure_future(search.wait_until_answering(config.run.wait_s))
        if not await host.unless_stopped(waiting, stop):
            return
        waiting.result()
        engine = Engine.start(config.model.location, tokenizer, config)
        loader = PatientLoader(engine, WeightStore(config.folder / "weights"), config.redis.outage_s)
        player = Player(engine, search, tokenizer, config.episode, config.run.seed)
        done = Done(config.folder)
        log.info("ready")
        try:
            await wait_until_announced(buffer, stop.is_set)
            while not stop.is_set() and not is_over(done, config):
                version = await load_due(buffer, engine, loader, done, config)
                if version is None:
                    await asyncio.sleep(POLL_S)
                    continue
                started = time.monotonic()
                scoring = asyncio.ensure_future(score(player, questions, version, config.eval.at_once))
                if not await host.unless_stopped(scoring, stop):
                    break
                done.version, scores = version, scoring.result()
                if scores is None:
                    continue
                record(config.folder, version, engine.loaded, time.monotonic() - started, scores)
                log.info("version %d: EM %.3f, depth %.2f", version, scores["all"]["em"], scores["all"]["depth"])
        finally:
            engine.close()


async def load_due(
    buffer: WorkerBuffer, engine: Engine, loader: PatientLoader, done: Done, config: Config
) -> int | None:
    """Load the announced version if it is time to score it; None when it is not.

    Raises: ContractMismatch when a learner has changed the run since."""
    state = await buffer.state()
    done.follow(state.weights)
    if not is_due(state, done.version, config):
        return None
    await buffer.check_contract()
    is_last = state.published == config.run.steps  # before it there may be a newer one to score
    return engine.version if await loader.load(state.weights, check=False, idle=is_last) else None
