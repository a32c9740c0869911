"""Search-Depth Greedy Allocation: how many trajectories of each search depth to train on.

Source: CuSearch, Algorithm "SDGA: Detailed Version" and appendices "SDGA-Auto", "SDGA-Phase", "SDGA-Anti".
Depths run 0..S_max, so every list here has S_max + 1 entries; `capacities[s]` is c_s, the size of bucket s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cusearch_async.algorithm.methods.base import Candidates, Method, MethodSettings, NoMemory, Selection
from cusearch_async.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the budget should go, before capacities are looked at."""

    targets: list[int]  # [S+1] trajectories wanted per depth, sums to the budget K
    priorities: list[int]  # [S+1] smaller is served first


def count_depths(depths: NDArray[np.int64], s_max: int) -> list[int]:
    """Capacities c_s of the buckets 0..s_max. `s_max` is the cap on search turns too: nothing can be deeper.

    Raises: ValueError on a depth outside 0..s_max."""
    outside = depths[(depths < 0) | (depths > s_max)]
    if len(outside):
        raise ValueError(f"depths must be in [0, {s_max}], got {int(outside[0])}")
    counts: list[int] = np.bincount(depths, minlength=s_max + 1).tolist()
    return counts


def allocate(capacities: Sequence[int], targets: Sequence[int], priorities: Sequence[int]) -> list[int]:
    """Turn wanted allocations into feasible ones: 0 <= f_s <= c_s, and sum(f) = min(sum(targets), sum(c)).

    Overflow of a bucket goes to the buckets after it in priority order, what is left then to those before it,
    nearest first. Equal priorities are served in order of depth, shallower first.
    Raises: ValueError on unequal lengths or negative entries.
    Source: CuSearch, Algorithm "SDGA: Detailed Version". Its guard `spare > 0` is needed here, where nothing stops the
    loop once the overflow is used up; the main text's version stops there, and comes to the same without the guard.
    """
    if not len(capacities) == len(targets) == len(priorities):
        raise ValueError(
            "capacities, targets and priorities must have one entry per depth, "
            f"got {len(capacities)}, {len(targets)} and {len(priorities)}"
        )
    if min(capacities, default=0) < 0 or min(targets, default=0) < 0:
        raise ValueError(f"capacities and targets must be >= 0, got {list(capacities)} and {list(targets)}")
    filled = list(targets)
    order = sorted(range(len(priorities)), key=lambda s: priorities[s])
    for place, s in enumerate(order):
        overflow = filled[s] - capacities[s]
        if overflow <= 0:
            continue
        filled[s] = capacities[s]
        for r in order[place + 1 :] + order[:place][::-1]:
            spare = capacities[r] - filled[r]
            if spare > 0:
                moved = min(spare, overflow)
                filled[r] += moved
                overflow -= moved
    return filled


def auto_plan(s_max: int, budget: int) -> Plan:
    """SDGA-Auto: the whole budget at the deepest bucket; p_s = S_max - s + 1."""
    _check(s_max, budget)
    depths = range(s_max + 1)
    return Plan([budget if s == s_max else 0 for s in depths], [s_max - s + 1 for s in depths])


def anti_plan(s_max: int, budget: int) -> Plan:
    """SDGA-Anti: the whole budget at depth 0; p_s = s + 1."""
    _check(s_max, budget)
    depths = range(s_max + 1)
    return Plan([budget if s == 0 else 0 for s in depths], [s + 1 for s in depths])


def phase_plan(capacities: Sequence[int], budget: int, phase: int, reserve: float = 0.0) -> Plan:
    """SDGA-Phase: aim the budget at depth k+1, then deeper, then shallower.

        t_s = K if s = k+1 else 0;     p(s, k) = s - k if s >= k+1 else S_max + 1 - s

    `reserve` r (not in the paper; 0 is the paper) aims up to floor(r K) of the budget at what lies deeper than
    k+1, deepest first, so that deep trajectories are trained on while bucket k+1 could fill the budget alone.
    Raises: ValueError unless 0 <= phase < s_max, budget >= 1 and 0 <= reserve < 1.
    """
    s_max = len(capacities) - 1
    _check(s_max, budget)
    if not 0 <= phase < s_max:
        raise ValueError(f"phase must be in [0, {s_max - 1}], got {phase}")
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve must be in [0, 1), got {reserve}")
    targets = [0] * (s_max + 1)
    reserved = reserved_of(reserve, budget)
    for s in range(s_max, phase + 1, -1):
        targets[s] = min(capacities[s], reserved)
        reserved -= targets[s]
    targets[phase + 1] = budget - sum(targets)
    return Plan(targets, [s - phase if s >= phase + 1 else s_max + 1 - s for s in range(s_max + 1)])


def reserved_of(reserve: float, budget: int) -> int:
    """floor(r K) for r as it is written: 29 for 0.29 and 100, where floating point gives 28."""
    return math.floor(Fraction(str(reserve)) * budget)


def advance_phase(capacities: Sequence[int], budget: int, phase: int) -> int:
    """The phase after looking at a pool: k+1 if sum over s > k+1 of c_s >= K, else k. At most one advance;
    never back, and never beyond S_max - 1, as nothing is deeper than that. K >= 1.
    Source: CuSearch, "Phase Transition"."""
    return phase + 1 if sum(capacities[phase + 2 :]) >= budget else phase


def is_phase_trapped(capacities: Sequence[int], budget: int, phase: int) -> bool:
    """Whether bucket k+1 alone fills the budget while the deeper ones together cannot (c_{k+1} >= K > sum of deeper).

    Literal SDGA-Phase then trains on depth k+1 only and nothing deeper is ever reinforced. Never at the last phase,
    which has nothing deeper."""
    return phase < len(capacities) - 2 and capacities[phase + 1] >= budget > sum(capacities[phase + 2 :])


def sample_buckets(depths: NDArray[np.int64], allocation: Sequence[int], rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices [K] of `allocation[s]` trajectories of every depth s, uniform without replacement, ascending.

    `depths` [T] must come in a canonical order (by ticket and rollout), so that arrival order cannot matter.
    Raises: ValueError when a bucket holds fewer than its allocation."""
    order = rng.random(len(depths))
    chosen = []
    for s, wanted in enumerate(allocation):
        members = np.flatnonzero(depths == s)
        if wanted > len(members):
            raise ValueError(f"depth {s} holds {len(members)} trajectories, cannot take {wanted}")
        if 0 < wanted < len(members):
            members = members[np.argpartition(order[members], wanted - 1)[:wanted]]
        chosen.append(members[:wanted])
    return np.sort(np.concatenate(chosen))


class BucketSettings(MethodSettings):
    mixed_groups_only: bool = False
    """sdga_phase, sdga_auto, sdga_anti: buckets, capacities and the phase count only trajectories of groups whose
    rewards differ, as dapo's selection does; false is the paper's rule. random_siblings and random_tokens follow."""


class SdgaSettings(BucketSettings):
    phase_reserve: float = Field(0.0, ge=0, lt=1)
    """Share of the budget that sdga_phase keeps for depths beyond its target; 0 is the paper's rule. random_siblings
    and random_tokens follow."""


class SdgaMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    phase: int = 0
    """The global phase counter k."""


class SdgaPhase(Method[SdgaMemory]):
    """SDGA-Phase: the phase is checked on this pool's capacities, before it selects."""

    Settings = SdgaSettings
    Memory = SdgaMemory

    def select(self, pool: Candidates, memory: SdgaMemory, rng: np.random.Generator) -> Selection[SdgaMemory]:
        reserve, budget = self.settings.phase_reserve, self.budget
        places = in_buckets(pool, self.settings)
        capacities = count_depths(pool.depths[places], pool.s_max)
        phase = advance_phase(capacities, budget, memory.phase)
        plan = phase_plan(capacities, budget, phase, reserve)
        is_literal = reserved_of(reserve, budget) == 0
        trapped = is_literal and is_phase_trapped(capacities, budget, phase)
        warning = (
            f"the phase is trapped: depth {phase + 1} alone fills the budget, and no deeper trajectory is trained on; "
            "consider method.phase_reserve"
        )
        return Selection(
            indices=_follow(plan, pool, places, rng),
            memory=SdgaMemory(phase),
            metrics={"phase": phase, "phase_trapped": float(trapped)},
            warnings=(warning,) if trapped else (),
        )

    def decode(self, text: str, s_max: int) -> SdgaMemory:
        memory = super().decode(text, s_max)
        if memory.phase >= s_max:
            reached = f"the run has reached phase {memory.phase}; set it to {memory.phase + 1} or more"
            raise ConfigError(f"episode.s_max = {s_max}, but {reached}")
        return memory


class SdgaAuto(Method[NoMemory]):
    """SDGA-Auto: the deepest trajectories there are."""

    Settings = BucketSettings
    plan = staticmethod(auto_plan)

    def select(self, pool: Candidates, memory: NoMemory, rng: np.random.Generator) -> Selection[NoMemory]:
        places = in_buckets(pool, self.settings)
        return Selection(indices=_follow(self.plan(pool.s_max, self.budget), pool, places, rng), memory=memory)


class SdgaAnti(SdgaAuto):
    """SDGA-Anti: the shallowest trajectories there are."""

    plan = staticmethod(anti_plan)


def in_buckets(pool: Candidates, settings: BucketSettings) -> NDArray[np.int64]:
    """Places in the pool of the trajectories that the buckets hold: all, in the paper."""
    return np.flatnonzero(pool.in_mixed_groups) if settings.mixed_groups_only else np.arange(len(pool.depths))


def _follow(plan: Plan, pool: Candidates, places: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """[K_eff] Places of what is taken from the buckets, which hold `places`."""
    depths = pool.depths[places]
    allocation = allocate(count_depths(depths, pool.s_max), plan.targets, plan.priorities)
    return places[sample_buckets(depths, allocation, rng)]


def _check(s_max: int, budget: int) -> None:
    if s_max < 1:
        raise ValueError(f"s_max must be >= 1, got {s_max}")
    if budget < 1:
        raise ValueError(f"budget must be >= 1, got {budget}")
