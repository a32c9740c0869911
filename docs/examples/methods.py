"""Custom selection methods: one without memory, one with.

[method]
name = "docs.examples.methods:FrontierDepth"
step_size = 0.1
"""

from __future__ import annotations

import msgspec
import numpy as np

from cusearch_async.algorithm.methods import Candidates, Method, MethodSettings, NoMemory, Selection


class ShortestFirst(Method[NoMemory]):
    """The K shallowest trajectories, ties at random."""

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        order = np.lexsort((rng.random(len(pool.depths)), pool.depths))
        return Selection(indices=np.sort(order[: self.budget]), memory=memory)


class FrontierSettings(MethodSettings):
    step_size: float = 0.05
    """How fast the frontier moves, in searches per step."""


class Frontier(msgspec.Struct, frozen=True):
    frontier: float = 1.0
    """The depth that is trained on."""


class FrontierDepth(Method[Frontier]):
    """The K trajectories nearest to a depth that moves on while most of the pool answers right."""

    Settings = FrontierSettings
    settings: FrontierSettings
    Memory = Frontier

    def select(self, pool: Candidates, memory: Frontier, rng: np.random.Generator) -> Selection[Frontier]:
        distance = np.abs(pool.depths - memory.frontier)
        order = np.lexsort((rng.random(len(distance)), distance))
        step = self.settings.step_size if pool.passed.mean() > 0.5 else 0.0
        after = Frontier(min(memory.frontier + step, float(pool.s_max)))
        return Selection(indices=np.sort(order[: self.budget]), memory=after, metrics={"frontier": after.frontier})
