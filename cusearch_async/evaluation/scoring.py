"""Scoring a policy on held-out questions, through the same agent loop as training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.answers import Metric, sub_exact_match
from cusearch_async.config import Config
from cusearch_async.errors import EpisodeFailed, InvalidTrajectory, SearchRefused
from cusearch_async.lifecycle.progress import LOG_EVERY_S
from cusearch_async.rollout.episode import Player
from cusearch_async.streams import Stream, stream
from cusearch_async.transport.interface import RunState
from cusearch_async.types import Question, Trajectory

log = logging.getLogger(__name__)

EVAL_TICKETS = 1 << 40
"""Evaluation episodes count from here, so that their random numbers are not those of training."""

RESAMPLES = 1000

Scores = dict[str, dict[str, Any]]
"""By category: `count`, and for each figure its mean and, under `NAME_interval`, the 95 % interval of that mean."""

FIGURES = ("em", "sub_em", "f1", "reward", "depth", "answered", "format_valid")
"""em: exact match. sub_em: the answer contains a gold answer, what some papers call EM. depth: searches that
found something. answered: the episode ended with an answer."""


async def evaluate(
    player: Player, questions: Sequence[Question], temperature: float, at_once: int, rollout: int = 0
) -> list[Trajectory]:
    """One episode per question, in their order; `temperature` 0 is greedy. Each `rollout` has random numbers of its
    own.

    Raises: ConfigError before the first is played when a question does not fit."""
    player.check(questions)
    room = asyncio.Semaphore(at_once)
    done, said = 0, time.monotonic()

    async def one(number: int, question: Question) -> Trajectory:
        nonlocal done, said
        async with room:
            trajectory = await player.play(question, EVAL_TICKETS + number, rollout, "evaluation", temperature)
        done += 1
        if time.monotonic() - said > LOG_EVERY_S:
            log.info("played %d of %d episodes", done, len(questions))
            said = time.monotonic()
        return trajectory

    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(one(number, question)) for number, question in enumerate(questions)]
    return [task.result() for task in played]


def summarize(trajectories: Sequence[Trajectory], questions: Sequence[Question], metric: Metric = "squad") -> Scores:
    """Scores by category, in order of first appearance, and over `all`. `metric` is what the episodes were scored
    with."""
    by_category: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory, question in zip(trajectories, questions, strict=True):
        by_category[question.category].append(trajectory)
    by_category["all"] = list(trajectories)
    return {category: _score(members, metric) for category, members in by_category.items()}


def bootstrap(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2, F] 2.5 % and 97.5 % quantiles of the mean of `values` [n, F] under resampling (percentile bootstrap, 1,000
    resamples, seeded)."""
    rng = stream(Stream.RESAMPLING, 0)
    n = len(values)
    means = np.stack([values[rng.integers(n, size=n)].mean(axis=0) for _ in range(RESAMPLES)])
    interval: NDArray[np.float64] = np.quantile(means, (0.025, 0.975), axis=0)
    return interval


def _score(members: Sequence[Trajectory], metric: Metric) -> dict[str, Any]:
    values = np.array(
        [
            (
                t.em,
                sub_exact_match(t.prediction or "", t.answers, metric),
                t.f1,
                t.reward,
                t.depth,
                t.prediction is not None,
                t.format_valid,
            )
            for t in members
        ],
        dtype=np.float64,
    )
    means, intervals = values.mean(axis=0), bootstrap(values)
    scores: dict[str, Any] = {"count": len(members)}
    for column, name in enumerate(FIGURES):
        scores[name] = float(means[column])
        scores[f"{name}_interval"] = [float(bound) for bound in intervals[:, column]]
    return scores


async def play_all(
    player: Player, questions: Sequence[Question], version: int, at_once: int
) -> list[Trajectory] | None:
    """A greedy episode per question by the loaded version; None when a question could not be played, because a mean
    over the other questions cannot be compared."""
    try:
        return await evaluate(player, questions, 0.0, at_once)
    except* (SearchRefused, EpisodeFailed, InvalidTrajectory, TimeoutError) as failed:
        log.warning("version %d is not scored: %s", version, failed.exceptions[0])
    return None


def due_version(state: RunState, scored: int, config: Config) -> int | None:
    """The version to score next; None when it is not published yet.

    The newest one, once it or one before it is a multiple of `eval.every` that was not `scored`; with `eval.in_order`
    the first such multiple. The last of the run always."""
    every, last = config.eval.every, config.run.steps
    if not state.weights or state.published <= scored:
        return None
    following = min((scored // every + 1) * every, last) if scored >= 0 else 0
    if following > state.published:
        return None
    return following if config.eval.in_order else state.published
