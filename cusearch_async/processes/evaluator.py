"""The evaluator process: scores published versions on held-out questions while the run goes on.

It has an engine of its own and takes no tickets: training does not wait for it, and it skips versions that come
faster than it can score them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.errors import EpisodeFailed, SearchRefused
from cusearch_async.files import write_whole
from cusearch_async.models import check_model
from cusearch_async.rollout.engine import Engine
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loading import PatientLoader, wait_until_announced
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.training.evaluation import Scores, evaluate, summarize
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.contract import RunState
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Question

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
        waiting = asyncio.ensure_future(search.wait_until_answering(config.run.wait_s))
        if not await host.unless_stopped(waiting, stop):
            return
        waiting.result()
        engine = Engine.start(config.model.location, tokenizer, config)
        loader = PatientLoader(engine, WeightStore(config.folder / "weights"), config.redis.outage_s)
        player = Player(engine, search, tokenizer, config.episode, config.run.seed)
        scored = last_scored(output)
        log.info("ready")
        try:
            await wait_until_announced(buffer, stop.is_set)
            while not stop.is_set() and scored < config.run.steps:
                version = await load_due(buffer, engine, loader, scored, config)
                if version is None:
                    await asyncio.sleep(POLL_S)
                    continue
                started = time.monotonic()
                scoring = asyncio.ensure_future(score(player, questions, version, config.eval.at_once))
                if not await host.unless_stopped(scoring, stop):
                    break
                scored, scores = version, scoring.result()
                if scores is None:
                    continue
                took = {"step": version, "seconds": round(time.monotonic() - started, 1)}
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(took | scores) + "\n")
                log.info("version %d: EM %.3f, depth %.2f", version, scores["all"]["em"], scores["all"]["depth"])
        finally:
            engine.close()


def last_scored(output: Path) -> int:
    """The newest version in the file; -1 when there is none. Lines that a crash has torn are cut out of it, or the next
    row would be written behind half a one."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    steps = {line: _step(line) for line in text.splitlines()}
    whole = "".join(f"{line}\n" for line, step in steps.items() if step is not None)
    if whole != text:
        log.warning("%s has torn lines; they are left out", output)
        write_whole(output, whole.encode())
    return max((step for step in steps.values() if step is not None), default=-1)


def _step(line: str) -> int | None:
    """The version that a row is about; None for a line that is no row."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


async def score(player: Player, questions: Sequence[Question], version: int, at_once: int) -> Scores | None:
    """The scores of the loaded version; None when a question could not be played, for a mean over the others would be
    one of another test."""
    try:
        return summarize(await evaluate(player, questions, 0.0, at_once), questions)
    except* (SearchRefused, EpisodeFailed) as failed:
        log.warning("version %d is not scored: %s", version, failed.exceptions[0])
    return None


async def load_due(
    buffer: RedisBuffer, engine: Engine, loader: PatientLoader, scored: int, config: Config
) -> int | None:
    """Load the announced version if it is time to score it; None when it is not."""
    state = await buffer.state()
    if not is_due(state, scored, config):
        return None
    is_last = state.published == config.run.steps  # before it there may be a newer one to score
    return engine.version if await loader.load(state.weights, check=False, idle=is_last) else None


def is_due(state: RunState, scored: int, config: Config) -> bool:
    """A version is due once `eval.every` steps lie behind the last one that was scored; the last of the run always."""
    if not state.weights or state.published <= scored:
        return False
    is_last = state.published == config.run.steps
    return is_last or scored < 0 or state.published // config.eval.every > scored // config.eval.every
