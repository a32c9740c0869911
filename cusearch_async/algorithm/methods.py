"""Selection methods: which trajectories of a pool to train on.

Each method is a function (candidates, budget, rng, state) -> Selection and one line in METHODS. A selection
is a pure function of its arguments; the learner seeds `rng` from (run seed, step).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm import sdga


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A pool as a method sees it, ordered by (ticket, rollout)."""

    depths: NDArray[np.int64]  # [T] cnt(τ)
    rewards: NDArray[np.float64]  # [T]
    tickets: NDArray[np.int64]  # [T] equal within a group
    s_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a method carries from step to step; kept in Redis and in the checkpoint."""

    phase: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    indices: NDArray[np.int64]  # [K_eff] into the pool, ascending
    state: State
    """The state after this step."""
    facts: dict[str, float] = field(default_factory=dict)
    """What the method wants logged, under `sdga/...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    budget: int
    """K, trajectories to train on."""
    phase_reserve: float = 0.0


Method = Callable[[Candidates, Settings, np.random.Generator, State], Selection]


def sdga_phase(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """SDGA-Phase: the phase is checked on this pool's capacities, before it selects."""
    capacities = sdga.count_depths(pool.depths, pool.s_max)
    phase = sdga.advance_phase(capacities, settings.budget, state.phase)
    plan = sdga.phase_plan(capacities, settings.budget, phase, settings.phase_reserve)
    trapped = settings.phase_reserve == 0 and sdga.is_phase_trapped(capacities, settings.budget, phase)
    return Selection(
        indices=_follow(plan, capacities, pool, rng),
        state=State(phase=phase),
        facts={"phase": phase, "phase_trapped": float(trapped)},
    )


def sdga_auto(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """SDGA-Auto: the deepest trajectories there are."""
    capacities = sdga.count_depths(pool.depths, pool.s_max)
    plan = sdga.auto_plan(pool.s_max, settings.budget)
    return Selection(indices=_follow(plan, capacities, pool, rng), state=state)


def sdga_anti(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """SDGA-Anti: the shallowest trajectories there are."""
    capacities = sdga.count_depths(pool.depths, pool.s_max)
    plan = sdga.anti_plan(pool.s_max, settings.budget)
    return Selection(indices=_follow(plan, capacities, pool, rng), state=state)


def random(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """K of the pool, uniformly."""
    order = rng.permutation(len(pool.depths))
    return Selection(indices=np.sort(order[: settings.budget]), state=state)


def topk_reward(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """The K highest rewards; ties are broken at random."""
    order = np.lexsort((rng.random(len(pool.rewards)), -pool.rewards))
    return Selection(indices=np.sort(order[: settings.budget]), state=state)


def grpo_full(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """The whole pool."""
    return Selection(indices=np.arange(len(pool.depths)), state=state)


def dapo(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """Groups whose rewards are not all equal (DAPO's dynamic sampling, without refill)."""
    keep = np.zeros(len(pool.rewards), dtype=bool)
    for ticket in np.unique(pool.tickets):
        members = pool.tickets == ticket
        keep[members] = np.ptp(pool.rewards[members]) > 1e-9
    return Selection(indices=np.flatnonzero(keep), state=state)


METHODS: dict[str, Method] = {
    "sdga_phase": sdga_phase,
    "sdga_auto": sdga_auto,
    "sdga_anti": sdga_anti,
    "random": random,
    "topk_reward": topk_reward,
    "grpo_full": grpo_full,
    "dapo": dapo,
}


def _follow(plan: sdga.Plan, capacities: list[int], pool: Candidates, rng: np.random.Generator) -> NDArray[np.int64]:
    allocation = sdga.allocate(capacities, plan.targets, plan.priorities)
    return sdga.sample_buckets(pool.depths, allocation, rng)
