"""Baselines of SDGA: K of the pool by chance or by reward, or groups as they are (GRPO, DAPO, Stratified GRPO)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cusearch_async.algorithm.advantages import Advantages, group_advantages
from cusearch_async.algorithm.methods.base import Candidates, Method, MethodSettings, NoMemory, PlansRollouts, Selection
from cusearch_async.types import Singleton


class Random(Method[NoMemory]):
    """K of the pool, uniformly."""

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        order = rng.permutation(len(pool.depths))
        return Selection(indices=np.sort(order[: self.budget]), memory=memory)


class TopKReward(Method[NoMemory]):
    """The K highest rewards; ties are broken at random."""

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        shuffled = rng.permutation(len(pool.rewards))
        best_first = shuffled[np.argsort(-pool.rewards[shuffled], kind="stable")]
        return Selection(indices=np.sort(best_first[: self.budget]), memory=memory)


class GrpoFull(Method[NoMemory]):
    """GRPO on all N G trajectories."""

    uses_whole_pool = True

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        return Selection(indices=np.arange(len(pool.depths)), memory=memory)


class GrpoHalf(GrpoFull, PlansRollouts[NoMemory]):
    """GRPO on K trajectories: only what will be trained on is generated, K / G groups."""

    def questions(self, questions: int, rollouts: int) -> int:
        return self.budget // rollouts


class Dapo(Method[NoMemory]):
    """Groups whose rewards are not all equal (DAPO's dynamic sampling, without refill)."""

    uses_whole_pool = True

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        return Selection(indices=np.flatnonzero(pool.in_mixed_groups), memory=memory)


class StratifiedSettings(MethodSettings):
    strata_weight: float = Field(0.5, ge=0, le=1)
    """α of stratified_grpo: weight of the advantage within the stratum; the rest is GRPO's."""


class StratifiedGrpo(GrpoFull):
    """Stratified GRPO on all trajectories: blended advantages α A_SAN + (1 - α) A_GRPO.

    A_SAN is normalised within the stratum: the trajectories of one question and one depth. It is 0 for a trajectory
    that is alone in its stratum.
    Source: Zhu et al., "Stratified GRPO: Handling Structural Heterogeneity in Reinforcement Learning of LLM Search
    Agents" (arXiv 2510.06214), whose strata are numbers of search calls."""

    Settings = StratifiedSettings

    def advantages(
        self, pool: Candidates, selected: NDArray[np.int64], singleton: Singleton, divide_by_std: bool
    ) -> Advantages:
        plain = super().advantages(pool, selected, singleton, divide_by_std)
        rewards = pool.rewards[selected]
        strata = pool.tickets[selected] * (pool.s_max + 1) + pool.depths[selected]
        within = group_advantages(rewards, strata, rewards, strata, "zero", divide_by_std)
        weight = self.settings.strata_weight
        values = weight * within.values + (1 - weight) * plain.values
        return Advantages(values, plain.alone, plain.flat)
