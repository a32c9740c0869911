"""The evaluator process: scores published versions on held-out questions while the run goes on.

It has an engine of its own and takes no tickets: training does not wait for it, and it skips versions that come
faster than it can score them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.metrics import read_metrics
from cusearch_async.models import check_model
from cusearch_async.rollout.engine import Engine
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loop import load_announced
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.training.evaluation import evaluate, summarize
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.contract import RunState
from cusearch_async.transport.weights import WeightStore

log = logging.getLogger(__name__)

POLL_S = 0.5
FILE = "eval.jsonl"


async def run(config: Config) -> None:
    """Score every `eval.every` steps, and the last version; ends with the run, or with a signal."""
    stop = host.stop_on_signals()
    questions = load_eval_questions(config)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    output = config.folder / FILE
    async with (
        open_buffer(config, config.redis.outage_s, stop) as buffer,
        SearchClient.open(config) as search,
    ):
        await search.wait_until_answering(config.run.wait_s)
        engine = Engine.start(config.model.location, tokenizer, config)
        store = WeightStore(config.folder / "weights")
        player = Player(engine, search, tokenizer, config.episode, config.run.seed)
        scored = last_scored(output)
        log.info("ready")
        try:
            while not stop.is_set() and scored < config.run.steps:
                version = await load_due(buffer, engine, store, scored, config)
                if version is None:
                    await asyncio.sleep(POLL_S)
                    continue
                started = time.monotonic()
                scoring = asyncio.ensure_future(evaluate(player, questions, 0.0, config.eval.at_once))
                if not await host.unless_stopped(scoring, stop):
                    break
                scores = summarize(scoring.result(), questions)
                took = {"step": version, "seconds": round(time.monotonic() - started, 1)}
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(took | scores) + "\n")
                log.info("version %d: EM %.3f, depth %.2f", version, scores["all"]["em"], scores["all"]["depth"])
                scored = version
        finally:
            engine.close()


def last_scored(output: Path) -> int:
    """The newest version in the file; -1 when there is none."""
    rows = read_metrics(output)
    return int(rows[-1]["step"]) if rows else -1


async def load_due(buffer: RedisBuffer, engine: Engine, store: WeightStore, scored: int, config: Config) -> int | None:
    """Load the announced version if it is time to score it; None when it is not."""
    state = await buffer.state()
    if not is_due(state, scored, config):
        return None
    return engine.version if await load_announced(buffer, engine, store, state.weights, check=False) else None


def is_due(state: RunState, scored: int, config: Config) -> bool:
    """A version is due once `eval.every` steps lie behind the last one that was scored; the last of the run always."""
    if not state.weights or state.published <= scored:
        return False
    is_last = state.published == config.run.steps
    return is_last or scored < 0 or state.published // config.eval.every > scored // config.eval.every
