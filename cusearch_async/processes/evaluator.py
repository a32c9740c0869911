"""The evaluator process: scores published versions on held-out questions while the run goes on.

It has an engine of its own and takes no tickets: training does not wait for it, and it skips versions that come
faster than it can score them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cusearch_async import host
from cusearch_async.config import Config
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.errors import EpisodeFailed, SearchRefused
from cusearch_async.files import append_row
from cusearch_async.metrics import read_scores
from cusearch_async.models import check_model
from cusearch_async.rollout.engine import Engine
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.loading import PatientLoader
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.training.evaluation import Scores, evaluate, summarize
from cusearch_async.training.starts import epochs_and_steps
from cusearch_async.transport.buffer import RedisBuffer, open_buffer
from cusearch_async.transport.contract import RunState
from cusearch_async.transport.weights import WeightStore, epoch_of
from cusearch_async.types import Question

log = logging.getLogger(__name__)

POLL_S = 0.5
FILE = "eval.jsonl"


async def run(config: Config) -> None:
    """Score every `eval.every` steps, and the last version; ends with the run, or with a signal."""
    stop = host.stop_on_signals()
    questions = load_eval_questions(config)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
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
        done = Done(config.folder)
        log.info("ready")
        try:
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


class Done:
    """The newest version that needs no scoring again: in the rows of eval.jsonl that count, or seen by this process."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._epoch = -1
        self.version = -1

    def follow(self, weights: str) -> None:
        """`weights` are what is announced: behind a learner that went back to a checkpoint, versions come again."""
        if epoch_of(weights) != self._epoch:
            self._epoch = epoch_of(weights)
            rows = read_scores(self._folder / FILE, epochs_and_steps(self._folder))
            self.version = rows[-1]["step"] if rows else -1


def is_over(done: Done, config: Config) -> bool:
    """Whether the run's last version is scored, and its checkpoint there: without it, the next learner goes back."""
    if done.version < config.run.steps:
        return False
    starts = epochs_and_steps(config.folder)
    newest = Checkpoints(config.folder, config.learner.keep_checkpoints, starts).latest()
    return newest is not None and newest.state.step >= config.run.steps


def record(run_folder: Path, version: int, weights: str, seconds: float, scores: Scores) -> None:
    """Add a row to eval.jsonl. Raises: WriteFailed."""
    row = {"step": version, "epoch": epoch_of(weights), "seconds": round(seconds, 1)}
    append_row(run_folder / FILE, row | scores)


async def score(player: Player, questions: Sequence[Question], version: int, at_once: int) -> Scores | None:
    """The scores of the loaded version; None when a question could not be played, for a mean over the others would be
    one of another test."""
    try:
        return summarize(await evaluate(player, questions, 0.0, at_once), questions)
    except* (SearchRefused, EpisodeFailed) as failed:
        log.warning("version %d is not scored: %s", version, failed.exceptions[0])
    return None


async def load_due(
    buffer: RedisBuffer, engine: Engine, loader: PatientLoader, done: Done, config: Config
) -> int | None:
    """Load the announced version if it is time to score it; None when it is not."""
    state = await buffer.state()
    done.follow(state.weights)
    if not is_due(state, done.version, config):
        return None
    is_last = state.published == config.run.steps  # before it there may be a newer one to score
    return engine.version if await loader.load(state.weights, check=False, idle=is_last) else None


def is_due(state: RunState, scored: int, config: Config) -> bool:
    """A version is due once `eval.every` steps lie behind the last one that was scored; the last of the run always."""
    if not state.weights or state.published <= scored:
        return False
    is_last = state.published == config.run.steps
    return is_last or scored < 0 or state.published // config.eval.every > scored // config.eval.every
