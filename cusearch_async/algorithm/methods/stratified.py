"""Stratified GRPO: trajectories are compared with those of their question that searched as often.

Source: Zhu et al., "Stratified GRPO: Handling Structural Heterogeneity in Reinforcement Learning of LLM Search Agents"
(arXiv 2510.06214). Its strata are numbers of search calls; here they are the depths of the buckets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cusearch_async.algorithm.advantages import Advantages, group_advantages
from cusearch_async.algorithm.methods.base import Candidates, MethodSettings
from cusearch_async.algorithm.methods.baselines import GrpoFull
from cusearch_async.types import Singleton


class StratifiedSettings(MethodSettings):
    strata_weight: float = Field(0.5, ge=0, le=1)
    """α of stratified_grpo: weight of the advantage within the stratum; the rest is GRPO's."""


class StratifiedGrpo(GrpoFull):
    """GRPO on all trajectories with blended advantages, α A_SAN + (1 - α) A_GRPO.

    A_SAN is normalised within the stratum: the trajectories of one question and one depth. It is 0 for a trajectory
    that is alone in its stratum."""

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
