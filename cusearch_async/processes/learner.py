"""The learner process: build the learner, continue from the newest checkpoint, train."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cusearch_async import host
from cusearch_async.algorithm.methods import State
from cusearch_async.config import Config, save_config
from cusearch_async.data.questions import load_questions
from cusearch_async.errors import ConfigError
from cusearch_async.models import check_context
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState
from cusearch_async.training.learner import Learner
from cusearch_async.training.loop import state_at, train
from cusearch_async.training.team import Team
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Question


def run(config: Config) -> None:
    """One rank of the learner, from start to end of the run."""
    check_context(config.model.location, config.episode.max_tokens)
    team = Team()
    questions = load_questions(config.data.source)
    if team.is_leader:
        asyncio.run(check_redis(config))
    learner = Learner(config, team)
    newest = Checkpoints(config.folder, config.learner.keep_checkpoints).newest()
    start = state_at(0, State(), {}, config)
    if newest is not None:
        folder, start = newest
        check_same_run(folder, start, config)
        learner.load(folder)
    if team.is_leader:
        try:
            asyncio.run(_lead(learner, start, questions, config))
        finally:
            learner.stop()
    else:
        learner.follow()
    team.close()


async def check_redis(config: Config) -> None:
    """Before anything large is loaded. Raises: BufferUnavailable."""
    async with open_buffer(config, config.run.wait_s) as buffer:
        await buffer.state()


def check_same_run(folder: Path, saved: CheckpointState, config: Config) -> None:
    """Raises: ConfigError unless the checkpoint's optimizer state is divided as this run's will be, and its tickets
    make the same pools."""
    for name, value, wanted in (
        ("learner.ranks", saved.ranks, config.learner.ranks),
        ("learner.zero_stage", saved.zero_stage, config.learner.zero_stage),
        ("pool.rollouts", saved.rollouts, config.pool.rollouts),
        ("groups per step (pool.questions, or K / G for grpo_half)", saved.questions, config.questions_per_step),
    ):
        if value != wanted:
            raise ConfigError(f"{folder} was saved with {name} = {value} and can only go on so, got {wanted}")


async def _lead(learner: Learner, start: CheckpointState, questions: Sequence[Question], config: Config) -> None:
    stop = host.stop_on_signals()
    save_config(config, config.folder / "config.toml")
    async with open_buffer(config, config.redis.outage_s, stop) as buffer:
        store = WeightStore(config.folder / "weights")
        await train(learner, buffer, store, start, questions, config, stop)
