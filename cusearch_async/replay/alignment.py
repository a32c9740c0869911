"""How well what a method trains on points along the reward gradient of a fixed policy.

For a trajectory τ with reward r, let v(τ) be the gradient of its log-probability, projected to fewer numbers. The
reward gradient of a set of groups is Σ (r - the mean reward of its group) v(τ), over all of their trajectories. A
method's update is Σ A(τ) v(τ) over those that it selects, with its advantages: GRPO's first step on a pool of the same
policy. Its alignment is the cosine between its update from one pool and the reward gradient of the policy's *other*
pools, which are as noisy; so even the best method is far below 1, and only differences tell. As all cosines share
these pools, the error of their mean is that of the jackknife over pools, not of independent numbers; and as policies
have pools of the same questions and random numbers, over pools of all of them together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import group_advantages, in_mixed_groups
from cusearch_async.algorithm.methods import Candidates
from cusearch_async.config import MethodConfig
from cusearch_async.training.selector import advantages_of, select
from cusearch_async.types import Singleton

Vector = NDArray[np.float64]
SINGLETONS: tuple[Singleton, ...] = get_args(Singleton)
PARTS = ("all", "search")
"""Of a trajectory's sampled tokens: all, and those of the turns that something follows."""


@dataclass(frozen=True)
class MeasuredPool:
    candidates: Candidates
    gradients: Mapping[str, NDArray[np.float32]]
    """Part -> v [T, D]."""

    @cached_property
    def reward_gradients(self) -> Mapping[str, Vector]:
        """Part -> [D]; the same for every method."""
        rewards, tickets = self.candidates.rewards, self.candidates.tickets
        centred = group_advantages(rewards, tickets, rewards, tickets, "zero", divide_by_std=False).values
        return {part: self.update(np.arange(len(rewards)), centred, part) for part in self.gradients}

    def update(self, indices: NDArray[np.int64], advantages: Vector, part: str) -> Vector:
        """[D]"""
        return advantages @ self.gradients[part][indices].astype(np.float64)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a method takes from a pool."""

    indices: NDArray[np.int64]  # [K_eff]
    advantages: Mapping[Singleton, Vector]  # [K_eff] by each rule for singletons
    alone: int
    usable: NDArray[np.bool_]  # [K_eff] in groups of which two or more are selected, with unequal rewards


@dataclass(frozen=True, slots=True)
class Cosines:
    """Of updates with reward gradients of pools that they are not of."""

    values: list[float]
    without: list[list[float]]
    """Policy -> the mean without each of its pools, which are of the same questions at every policy; none where one
    pool is part of all updates: no other tells of its noise."""

    def __add__(self, later: Cosines) -> Cosines:
        """With those of another policy's pools."""
        return Cosines(self.values + later.values, self.without + later.without)

    @property
    def error(self) -> float:
        """Standard error of the mean over policies of about as many updates each, by leaving out one pool of all
        policies after the other; NaN where it is not known."""
        if not all(self.without):
            return math.nan
        means = np.mean(self.without, axis=0)
        return float(np.sqrt((len(means) - 1) * np.var(means)))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one method, over pools."""

    selected: list[int]
    usable: list[int]
    alone: list[int]
    """Trajectories of each pool."""
    by_singleton: Mapping[Singleton, Cosines]
    """Of each pool's update with all other pools, on all tokens."""
    on_search: Cosines
    """The same with `raw` singletons, on search tokens."""
    at_equal: Cosines
    """Of updates of equally many usable trajectories each with equally many other pools, in the order of the pools."""

    def __add__(self, later: Figures) -> Figures:
        """With those of another policy's pools."""
        by_singleton = {rule: found + later.by_singleton[rule] for rule, found in self.by_singleton.items()}
        counts = self.selected + later.selected, self.usable + later.usable, self.alone + later.alone
        return Figures(*counts, by_singleton, self.on_search + later.on_search, self.at_equal + later.at_equal)


def chosen_by(settings: MethodConfig, pools: Sequence[MeasuredPool], seed: int) -> Iterator[Chosen]:
    """The method's choice from each pool, one after the other, as in a run whose policy stands still."""
    method = settings.make()
    memory: Any = method.decode("", pools[0].candidates.s_max)
    for step, pool in enumerate(pools):
        selection = select(pool.candidates, step, method, memory, settings, seed)
        indices, memory = selection.indices, selection.memory
        by_rule = {
            rule: advantages_of(indices, pool.candidates, step, method, settings.model_copy(update={"singleton": rule}))
            for rule in SINGLETONS
        }
        usable = in_mixed_groups(pool.candidates.tickets[indices], pool.candidates.rewards[indices])
        values = {rule: found.values for rule, found in by_rule.items()}
        yield Chosen(indices, values, by_rule["raw"].alone, usable)


def figures_of(settings: MethodConfig, pools: Sequence[MeasuredPool], seed: int, equal: int) -> Figures:
    """`pools` are of one policy, three or more; `equal` is the size of the updates of `at_equal`."""
    taken = list(chosen_by(settings, pools, seed))
    own = np.eye(len(pools), dtype=np.bool_)

    def of_all(rule: Singleton, part: str) -> Cosines:
        both = zip(pools, taken, strict=True)
        updates = np.stack([pool.update(one.indices, one.advantages[rule], part) for pool, one in both])
        return cosines_of(updates, _reward_gradients(pools, part), own, ~own)

    return Figures(
        selected=[len(one.indices) for one in taken],
        usable=[int(one.usable.sum()) for one in taken],
        alone=[one.alone for one in taken],
        by_singleton={rule: of_all(rule, "all") for rule in SINGLETONS},
        on_search=of_all("raw", "search"),
        at_equal=_at_equal(pools, taken, equal),
    )


def _reward_gradients(pools: Sequence[MeasuredPool], part: str) -> NDArray[np.float64]:
    """[P, D]"""
    return np.stack([pool.reward_gradients[part] for pool in pools])


def _at_equal(pools: Sequence[MeasuredPool], taken: Sequence[Chosen], size: int) -> Cosines:
    """Of updates on `size` usable trajectories each, of one pool or several, with half of all pools: those after the
    update's own, and from the first again. With fewer of them a method that needs several pools for an update would
    have the noisier reward gradient. A rest of fewer trajectories is left out, and an update of more pools."""
    count = len(pools)
    updates, own, others = [], [], []
    usable = [(pool, place) for pool, one in enumerate(taken) for place in np.flatnonzero(one.usable)]
    for first in range(0, len(usable) - size + 1, size):
        members = usable[first : first + size]
        numbers = sorted({pool for pool, _ in members})
        after = [place for place in np.roll(np.arange(count), -numbers[-1] - 1).tolist() if place not in numbers]
        if len(after) < count // 2:
            continue
        update = np.zeros(pools[0].gradients["all"].shape[1])
        for number in numbers:
            places = np.array([place for pool, place in members if pool == number])
            one = taken[number]
            update += pools[number].update(one.indices[places], one.advantages["raw"][places], "all")
        updates.append(update)
        own.append(np.isin(np.arange(count), numbers))
        others.append(np.isin(np.arange(count), after[: count // 2]))
    if not updates:
        return Cosines([], [])
    return cosines_of(np.stack(updates), _reward_gradients(pools, "all"), np.stack(own), np.stack(others))


def cosines_of(updates: Vector, gradients: Vector, own: NDArray[np.bool_], others: NDArray[np.bool_]) -> Cosines:
    """`updates` [N, D], `gradients` [P, D] of pools; `own` [N, P]: the pools that an update is of; `others` [N, P]:
    those whose sum it is compared with. Without a pool, updates of it are left out, and it is part of no sum."""
    products, between = updates @ gradients.T, gradients @ gradients.T
    dots, toward = others * products, others * (others @ between)
    lengths = np.linalg.norm(updates, axis=1)
    smallest = 1e-12 * between.trace()
    whole = _cosines(dots.sum(axis=1), lengths, toward.sum(axis=1), smallest)
    dots_without = dots.sum(axis=1, keepdims=True) - dots
    squares_without = toward.sum(axis=1, keepdims=True) - 2 * toward + others * np.diag(between)
    without = _cosines(dots_without, lengths[:, None], squares_without, smallest)
    if own.all(axis=0).any():
        return Cosines(whole.tolist(), [[]])
    means: Vector = (without * ~own).sum(axis=0) / (~own).sum(axis=0)
    return Cosines(whole.tolist(), [means.tolist()])


def _cosines(dots: Vector, lengths: Vector, squares: Vector, smallest: float) -> Vector:
    """Where an update, or what it is compared with, is 0 but for rounding, 0: training on nothing points nowhere."""
    found: Vector = np.zeros_like(dots)
    np.divide(dots, lengths * np.sqrt(np.abs(squares)), out=found, where=(lengths > 0) & (squares > smallest))
    return found
