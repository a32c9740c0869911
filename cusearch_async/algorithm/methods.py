"""Selection methods: which trajectories of a pool to train on, and how many to generate.

A method is a function (candidates, settings, rng, state) -> Selection and one line in METHODS. A selection is a
pure function of its arguments; the learner seeds `rng` from (run seed, step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm import ar3po, sdga
from cusearch_async.algorithm.advantages import EQUAL
from cusearch_async.errors import InvalidTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A pool as a method sees it, ordered by (ticket, rollout).

    Raises: InvalidTrajectory naming the trajectory whose depth or reward cannot be, or when there is none."""

    depths: NDArray[np.int64]  # [T] cnt(τ), 0..s_max
    rewards: NDArray[np.float64]  # [T]
    passed: NDArray[np.bool_]  # [T] whether the answer scored at all: F1 > 0
    tickets: NDArray[np.int64]  # [T] equal within a group
    rollouts: NDArray[np.int64]  # [T] index within the group
    questions: Sequence[str]  # [T] ids
    s_max: int

    def __post_init__(self) -> None:
        lengths = [len(getattr(self, name)) for name in self.__slots__ if name != "s_max"]
        if len(set(lengths)) != 1:
            raise ValueError(f"all of a pool's columns must have one length, got {lengths}")
        if not lengths[0]:
            raise InvalidTrajectory("the pool is empty; a method selects from one trajectory or more")
        if (np.diff(self.tickets) < 0).any():
            raise ValueError("a pool must be ordered by ticket")
        self._refuse((self.depths < 0) | (self.depths > self.s_max), f"depth must be in [0, {self.s_max}]", self.depths)
        self._refuse(~np.isfinite(self.rewards), "reward must be finite", self.rewards)

    def _refuse(self, bad: NDArray[np.bool_], rule: str, values: NDArray[np.generic]) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise InvalidTrajectory(f"trajectory {self.tickets[i]}:{self.rollouts[i]}: {rule}, got {values[i]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a method carries from step to step; kept in Redis and in the checkpoint."""

    phase: int = 0
    """SDGA-Phase's global phase counter k."""
    visits: Mapping[str, ar3po.Visits] = field(default_factory=dict)
    """AR3PO's history: question id -> its last visits."""


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


Select = Callable[[Candidates, Settings, np.random.Generator, State], Selection]


def sdga_phase(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """SDGA-Phase: the phase is checked on this pool's capacities, before it selects."""
    capacities = sdga.count_depths(pool.depths, pool.s_max)
    phase = sdga.advance_phase(capacities, settings.budget, state.phase)
    plan = sdga.phase_plan(capacities, settings.budget, phase, settings.phase_reserve)
    is_literal = math.floor(settings.phase_reserve * settings.budget) == 0
    trapped = is_literal and sdga.is_phase_trapped(capacities, settings.budget, phase)
    return Selection(
        indices=_follow(plan, capacities, pool, rng),
        state=replace(state, phase=phase),
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
    shuffled = rng.permutation(len(pool.rewards))
    best_first = shuffled[np.argsort(-pool.rewards[shuffled], kind="stable")]
    return Selection(indices=np.sort(best_first[: settings.budget]), state=state)


def whole_pool(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """GRPO: everything that was generated, N G trajectories (GRPO-Full) or K (GRPO-Half)."""
    return Selection(indices=np.arange(len(pool.depths)), state=state)


def dapo(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """Groups whose rewards are not all equal (DAPO's dynamic sampling, without refill)."""
    _, first, group = np.unique(pool.tickets, return_index=True, return_inverse=True)
    spread = np.maximum.reduceat(pool.rewards, first) - np.minimum.reduceat(pool.rewards, first)
    return Selection(indices=np.flatnonzero(spread[group] >= EQUAL), state=state)


def ar3po_adaptive(pool: Candidates, settings: Settings, rng: np.random.Generator, state: State) -> Selection:
    """AR3PO: everything, and remember how each question fared; `rollouts_by_history` spends the next budget by it."""
    visits = dict(state.visits)
    _, first, played = np.unique(pool.tickets, return_index=True, return_counts=True)
    passed = np.add.reduceat(pool.passed, first, dtype=np.int64)
    for member, *visit in zip(first, passed.tolist(), played.tolist(), strict=True):
        question = pool.questions[member]
        visits[question] = ar3po.add_visit(visits.get(question, ()), *visit)
    return Selection(indices=np.arange(len(pool.depths)), state=replace(state, visits=visits))


def all_questions(questions: int, rollouts: int, budget: int) -> int:
    """N groups per step."""
    return questions


def questions_of_budget(questions: int, rollouts: int, budget: int) -> int:
    """K / G groups per step: only what will be trained on is generated."""
    return budget // rollouts


def rollouts_by_history(state: State, questions: Sequence[str], rollouts: int) -> list[int]:
    """Rollouts of each of the questions of a coming pool, by what is known of them."""
    return ar3po.divide_rollouts([state.visits.get(question, ()) for question in questions], rollouts)


@dataclass(frozen=True, slots=True)
class Method:
    select: Select
    questions: Callable[[int, int, int], int] = all_questions
    """(N, G, K) -> groups generated per step."""
    rollouts: Callable[[State, Sequence[str], int], list[int]] | None = None
    """(state, question ids of a coming pool, G) -> rollouts of each, at most 2 G; None: G each."""


METHODS: dict[str, Method] = {
    "sdga_phase": Method(sdga_phase),
    "sdga_auto": Method(sdga_auto),
    "sdga_anti": Method(sdga_anti),
    "random": Method(random),
    "topk_reward": Method(topk_reward),
    "grpo_full": Method(whole_pool),
    "grpo_half": Method(whole_pool, questions=questions_of_budget),
    "dapo": Method(dapo),
    "ar3po": Method(ar3po_adaptive, rollouts=rollouts_by_history),
}


def _follow(plan: sdga.Plan, capacities: list[int], pool: Candidates, rng: np.random.Generator) -> NDArray[np.int64]:
    allocation = sdga.allocate(capacities, plan.targets, plan.priorities)
    return sdga.sample_buckets(pool.depths, allocation, rng)
