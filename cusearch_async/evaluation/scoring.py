"""Scoring a policy on held-out questions, through the same agent loop as training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.answers import Metric, sub_exact_match
from cusearch_async.config import EvalConfig
from cusearch_async.errors import OF_ONE_EPISODE, EpisodeFailed
from cusearch_async.lifecycle.progress import LOG_EVERY_S
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.streams import Stream, stream
from cusearch_async.transport.interface import RunState
from cusearch_async.types import Question, Trajectory

log = logging.getLogger(__name__)

EVAL_TICKETS = 1 << 40
"""Evaluation episodes count from here, so that their random numbers are not those of training."""

ATTEMPTS = 3
"""At an episode that fails, as in a run; one that fails each time ends the evaluation."""
RESAMPLES = 1000

Scores = dict[str, dict[str, Any]]
"""By category, and by hops within it (`musique, 2 hops`): `count`, and for each figure its mean and, under
`NAME_interval`, the 95 % interval of that mean."""

FIGURES = ("em", "sub_em", "f1", "reward", "depth", "answered", "format_valid")
"""em: exact match. sub_em: the answer contains a gold answer, what some papers call EM. depth: searches that
found something. answered: the episode ended with an answer."""
SHARES = frozenset({"em", "sub_em", "f1", "answered", "format_valid"})
"""Those of 0 to 1 in an episode: with a mean of 0 or 1 all are 0 or 1."""
Z95 = 1.96


async def evaluate(
    runner: EpisodeRunner,
    questions: Sequence[Question],
    temperature: float,
    concurrency: int,
    rollout: int = 0,
    forget: Callable[[int], None] = lambda ticket: None,
    first: int = 0,
) -> list[Trajectory]:
    """One episode per question, in their order; `temperature` 0 is greedy. Each `rollout` has separate random numbers.
    `forget` is told the ticket of an episode that failed and is run again. `first`: how many questions came before.

    Raises: ConfigError before the first episode when a question does not fit; EpisodeFailed for one that fails each
    time."""
    runner.check(questions)
    room = asyncio.Semaphore(concurrency)
    done, logged = 0, time.monotonic()

    async def one(number: int, question: Question) -> Trajectory:
        nonlocal done, logged
        async with room:
            trajectory = await _with_attempts(runner, question, EVAL_TICKETS + number, rollout, temperature, forget)
        done += 1
        if time.monotonic() - logged > LOG_EVERY_S:
            log.info("finished %d of %d episodes", done, len(questions))
            logged = time.monotonic()
        return trajectory

    async with asyncio.TaskGroup() as tasks:
        episodes = [tasks.create_task(one(number, question)) for number, question in enumerate(questions, first)]
    return [task.result() for task in episodes]


async def _with_attempts(
    runner: EpisodeRunner,
    question: Question,
    ticket: int,
    rollout: int,
    temperature: float,
    forget: Callable[[int], None],
) -> Trajectory:
    """Raises: EpisodeFailed that names the question, after the last attempt."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await runner.run(question, ticket, rollout, "evaluation", temperature)
        except tuple(OF_ONE_EPISODE) as error:
            why = str(error) or type(error).__name__
            if attempt == ATTEMPTS:
                raise EpisodeFailed(f"question {question.id} failed {ATTEMPTS} times: {why}") from error
            log.warning("question %s failed (%s); it is asked again", question.id, why)
            forget(ticket)
    raise AssertionError


def summarize(trajectories: Sequence[Trajectory], questions: Sequence[Question], metric: Metric = "squad") -> Scores:
    """Scores by category, in order of first appearance, and over `all`. A category with questions of several hops, and
    several categories together, are also scored by hops. `metric` is what the episodes were scored with."""
    pairs = list(zip(trajectories, questions, strict=True))
    categories = list(dict.fromkeys(question.category for question in questions))
    groups: dict[str, list[Trajectory]] = {}
    for category in categories:
        members = [(trajectory, question) for trajectory, question in pairs if question.category == category]
        groups[category] = [trajectory for trajectory, _ in members]
        groups |= {f"{category}, {hops}": some for hops, some in _by_hops(members).items()}
    groups |= _by_hops(pairs) if len(categories) > 1 else {}
    groups["all"] = list(trajectories)
    return {name: _score(members, metric) for name, members in groups.items()}


def _by_hops(pairs: Sequence[tuple[Trajectory, Question]]) -> dict[str, list[Trajectory]]:
    """ "2 hops" -> episodes, fewest hops first; empty where not at least two counts are known."""
    counts = sorted({question.hops for _, question in pairs if question.hops is not None})
    if len(counts) < 2:
        return {}
    return {
        f"{count} hop{'s' * (count != 1)}": [trajectory for trajectory, question in pairs if question.hops == count]
        for count in counts
    }


def bootstrap(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[2, F] 2.5 % and 97.5 % quantiles of the mean of `values` [n, F] under resampling (percentile bootstrap, 1,000
    resamples, seeded)."""
    rng = stream(Stream.RESAMPLING, 0)
    n = len(values)
    means = np.stack([values[rng.integers(n, size=n)].mean(axis=0) for _ in range(RESAMPLES)])
    interval: NDArray[np.float64] = np.quantile(means, (0.025, 0.975), axis=0)
    return interval


def _score(members: Sequence[Trajectory], metric: Metric) -> dict[str, Any]:
    plain = ("em", "f1", "reward", "depth", "format_valid")
    figures = [
        {name: getattr(t, name) for name in plain}
        | {"sub_em": sub_exact_match(t.prediction or "", t.answers, metric), "answered": t.prediction is not None}
        for t in members
    ]
    values = np.array([[one[name] for name in FIGURES] for one in figures], dtype=np.float64)
    means, intervals = values.mean(axis=0), bootstrap(values)
    scores: dict[str, Any] = {"count": len(members)}
    for column, name in enumerate(FIGURES):
        scores[name] = float(means[column])
        scores[f"{name}_interval"] = [float(bound) for bound in intervals[:, column]]
        if name in SHARES and means[column] in (0, 1):
            scores[f"{name}_interval"] = _of_equal(means[column], len(members))
    return scores


def _of_equal(share: float, count: int) -> list[float]:
    """Wilson's interval of a mean of 0 or 1, for which resampling has none. A figure of 0 to 1 varies no more than a
    share."""
    room = Z95**2 / (count + Z95**2)
    return [0.0, room] if share == 0 else [1 - room, 1.0]


async def score_all(
    runner: EpisodeRunner, questions: Sequence[Question], version: int, concurrency: int, first: int = 0
) -> list[Trajectory] | None:
    """A greedy episode per question by the loaded version; None when the episode of a question fails, because a
    mean over the other questions cannot be compared. `first`: how many questions came before."""
    try:
        return await evaluate(runner, questions, 0.0, concurrency, first=first)
    except* tuple(OF_ONE_EPISODE) as failed:
        log.warning("version %d is not scored: %s", version, failed.exceptions[0])
    return None


def due_version(state: RunState, scored: int, settings: EvalConfig, last: int) -> int | None:
    """The version to score next; None when it is not published yet.

    The newest one, once it or one before it is a multiple of `eval.every` that was not `scored`; with `eval.in_order`
    the first such multiple. The `last` of the run always."""
    every = settings.every
    if not state.weights or state.published <= scored:
        return None
    following = min((scored // every + 1) * every, last) if scored >= 0 else 0
    if following > state.published:
        return None
    return following if settings.in_order else state.published
