"""What SDGA is compared with: K of the pool by chance or by reward, or groups as they are (GRPO, DAPO)."""

from __future__ import annotations

import numpy as np

from cusearch_async.algorithm.advantages import EQUAL
from cusearch_async.algorithm.methods.base import Candidates, Method, NoMemory, PlansRollouts, Selection


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
        _, first, group = np.unique(pool.tickets, return_index=True, return_inverse=True)
        spread = np.maximum.reduceat(pool.rewards, first) - np.minimum.reduceat(pool.rewards, first)
        return Selection(indices=np.flatnonzero(spread[group] >= EQUAL), memory=memory)
