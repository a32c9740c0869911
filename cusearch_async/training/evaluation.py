"""Scoring a policy on held-out questions, through the same agent loop as training."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cusearch_async.algorithm.rewards import sub_exact_match
from cusearch_async.rollout.episode import Player
from cusearch_async.types import Question, Trajectory

EVAL_TICKETS = 1 << 40
"""Evaluation episodes count from here, so that their random numbers are not those of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over the episodes of a category."""

    count: int
    em: float
    sub_em: float
    """Share of answers that contain a gold answer (what some papers call EM)."""
    f1: float
    reward: float
    depth: float
    answered: float
    format_valid: float


async def evaluate(player: Player, questions: Sequence[Question], temperature: float, at_once: int) -> list[Trajectory]:
    """One episode per question, in their order; `temperature` 0 is greedy."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int, question: Question) -> Trajectory:
        async with room:
            return await player.play(question, EVAL_TICKETS + number, 0, "evaluation", temperature)

    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(one(number, question)) for number, question in enumerate(questions)]
    return [task.result() for task in played]


def summarize(trajectories: Sequence[Trajectory], questions: Sequence[Question]) -> dict[str, Summary]:
    """One summary per category, in order of first appearance, and one over `all`."""
    by_category: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory, question in zip(trajectories, questions, strict=True):
        by_category[question.category].append(trajectory)
    by_category["all"] = list(trajectories)
    return {category: _summary(members) for category, members in by_category.items()}


def as_json(summaries: dict[str, Summary]) -> dict[str, dict[str, float]]:
    return {category: asdict(summary) for category, summary in summaries.items()}


def _summary(members: Sequence[Trajectory]) -> Summary:
    return Summary(
        count=len(members),
        em=float(np.mean([t.em for t in members])),
        sub_em=float(np.mean([sub_exact_match(t.prediction or "", t.answers) for t in members])),
        f1=float(np.mean([t.f1 for t in members])),
        reward=float(np.mean([t.reward for t in members])),
        depth=float(np.mean([t.depth for t in members])),
        answered=float(np.mean([t.prediction is not None for t in members])),
        format_valid=float(np.mean([t.format_valid for t in members])),
    )
