"""Group-relative advantages over the selected trajectories.

Source: CuSearch, "CuSearch modification" (within-group reward normalisation over T); GRPO as VERL computes
it: A = (r - mean) / (std + 1e-6) with the sample standard deviation. Without the division: Dr. GRPO (Liu et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.shapes import require_mode, require_vectors
from cusearch_async.types import Singleton

EPSILON = 1e-6
EQUAL = 1e-9
"""Rewards of a group closer than this are equal; floating noise must not become an advantage of ±1."""


def in_mixed_groups(tickets: NDArray[np.int64], rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[K] Whether the rewards of a trajectory's group differ: only then GRPO's advantages are not 0. `tickets` [K]
    ascend."""
    _, first, group = np.unique(tickets, return_index=True, return_inverse=True)
    spread = np.maximum.reduceat(rewards, first) - np.minimum.reduceat(rewards, first)
    return np.asarray(spread[group] >= EQUAL)


@dataclass(frozen=True, slots=True)
class Advantages:
    """Of the selected trajectories, each of which is alone in its group, in a flat group, or usable."""

    values: NDArray[np.float64]  # [K]
    alone: int
    """Selected trajectories whose group has no other selected one."""
    flat: int
    """Selected trajectories in groups of which two or more are selected, with equal rewards."""

    @property
    def singleton_share(self) -> float:
        return self._share(self.alone)

    @property
    def zero_variance_share(self) -> float:
        return self._share(self.flat)

    @property
    def usable_share(self) -> float:
        """Share of the selected in groups of which two or more are selected, with unequal rewards: those with a
        group-relative advantage. It is 0 for one whose reward is just the group's mean, which counts too."""
        return self._share(len(self.values) - self.alone - self.flat)

    def _share(self, count: int) -> float:
        return count / max(len(self.values), 1)


def group_advantages(
    rewards: NDArray[np.float64],
    tickets: NDArray[np.int64],
    pool_rewards: NDArray[np.float64],
    pool_tickets: NDArray[np.int64],
    singleton: Singleton,
    divide_by_std: bool = True,
) -> Advantages:
    """Advantages [K] of the selected trajectories.

    Groups of two or more are normalised by their selected members. A group with one selected member has no
    spread; `singleton` is its rule: `raw` its reward (VERL), `zero` nothing, `pool` the
    statistics of the whole group [T], selected or not. Without `divide_by_std` rewards are centred and not scaled.
    Raises: ValueError on non-finite rewards, on vectors of other lengths, on another rule, and on a selected ticket of
    which the pool knows nothing.
    """
    require_vectors(rewards.size, rewards=rewards, tickets=tickets)
    require_vectors(pool_rewards.size, pool_rewards=pool_rewards, pool_tickets=pool_tickets)
    require_mode("the singleton rule", singleton, Singleton)
    strangers = np.setdiff1d(tickets, pool_tickets)
    if strangers.size:
        raise ValueError(f"every selected ticket must be one of the pool's, got {strangers[0]}")
    if not np.isfinite(rewards).all() or not np.isfinite(pool_rewards).all():
        raise ValueError("rewards must be finite")
    values = np.zeros(len(rewards))
    alone = flat = 0
    for ticket in np.unique(tickets):
        members = np.flatnonzero(tickets == ticket)
        group = rewards[members]
        if len(members) == 1:
            alone += 1
            values[members] = _singleton(group, pool_rewards[pool_tickets == ticket], singleton, divide_by_std)
        elif np.ptp(group) < EQUAL:
            flat += len(members)
        else:
            values[members] = _relative(group, group, divide_by_std)
    return Advantages(values, alone, flat)


def _singleton(
    reward: NDArray[np.float64], group: NDArray[np.float64], rule: Singleton, divide_by_std: bool
) -> NDArray[np.float64]:
    if rule == "raw":
        return reward
    if rule == "zero" or np.ptp(group) < EQUAL:
        return np.zeros(1)
    return _relative(reward, group, divide_by_std)


def _relative(rewards: NDArray[np.float64], group: NDArray[np.float64], divide_by_std: bool) -> NDArray[np.float64]:
    """`rewards` as seen from the mean of `group`, in its standard deviations or as they are."""
    deviations: NDArray[np.float64] = rewards - group.mean()
    return deviations / (group.std(ddof=1) + EPSILON) if divide_by_std else deviations
