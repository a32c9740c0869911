"""How well what a method trains on points along the reward gradient of a fixed policy.

For a trajectory τ with reward r, let v(τ) be the gradient of its log-probability, projected to fewer numbers. The
reward gradient of a set of groups is Σ (r - the mean reward of its group) v(τ), over all of their trajectories. A
method's update is Σ A(τ) v(τ) over those that it selects, with its advantages: GRPO's first step on a pool of the same
policy. Its alignment is the cosine between its update from one pool and the reward gradient of the policy's *other*
pools, which are as noisy; so even the best method is far below 1, and only differences tell."""

from __future__ import annotations

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
class Figures:
    """Of one method, over pools."""

    selected: list[int]
    usable: list[int]
    alone: list[int]
    """Trajectories of each pool."""
    by_singleton: Mapping[Singleton, list[float]]
    """Cosine of each pool, on all tokens."""
    on_search: list[float]
    """The same with `raw` singletons, on search tokens."""
    at_equal: list[float]
    """Cosines of updates of equally many usable trajectories each, in the order of the pools."""

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
    """`pools` are of one policy; `equal` is the size of the updates of `at_equal`."""
    taken = list(chosen_by(settings, pools, seed))
    found = Figures([], [], [], {rule: [] for rule in SINGLETONS}, [], _at_equal(pools, taken, equal))
    others = {part: _of_others(pools, part) for part in PARTS}
    for number, (pool, one) in enumerate(zip(pools, taken, strict=True)):
        found.selected.append(len(one.indices))
        found.usable.append(int(one.usable.sum()))
        found.alone.append(one.alone)
        for rule, values in one.advantages.items():
            update = pool.update(one.indices, values, "all")
            found.by_singleton[rule].append(cosine(update, others["all"][number]))
        update = pool.update(one.indices, one.advantages["raw"], "search")
        found.on_search.append(cosine(update, others["search"][number]))
    return found


def _of_others(pools: Sequence[MeasuredPool], part: str) -> NDArray[np.float64]:
    """[P, D] For each pool the reward gradient of all the others."""
    own = np.stack([pool.reward_gradients[part] for pool in pools])
    return np.asarray(own.sum(axis=0) - own)


def _at_equal(pools: Sequence[MeasuredPool], taken: Sequence[Chosen], size: int) -> list[float]:
    """Cosines of updates on `size` usable trajectories each, of one pool or several, with the reward gradient of the
    pools that they are not of; a rest of fewer is left out, and what is of all pools."""
    found = []
    own = np.stack([pool.reward_gradients["all"] for pool in pools])
    usable = [(pool, place) for pool, one in enumerate(taken) for place in np.flatnonzero(one.usable)]
    for first in range(0, len(usable) - size + 1, size):
        members = usable[first : first + size]
        numbers = sorted({pool for pool, _ in members})
        others = np.delete(own, numbers, axis=0)
        if not len(others):
            continue
        update = np.zeros(own.shape[1])
        for number in numbers:
            places = np.array([place for pool, place in members if pool == number])
            one = taken[number]
            update += pools[number].update(one.indices[places], one.advantages["raw"][places], "all")
        found.append(cosine(update, others.sum(axis=0)))
    return found


def cosine(one: Vector, other: Vector) -> float:
    """0 where one of them is 0: training on nothing points nowhere."""
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0
