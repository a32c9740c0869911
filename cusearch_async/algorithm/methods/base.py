"""The interface of selection methods: which trajectories of a pool to train on, with which advantages, and how many
to generate.

A method is a subclass of `Method`, made once per process. Its memory from step to step is a `Memory`, which all others
carry as text. A selection is a pure function of pool, memory and `rng`, which the learner seeds from (run seed, step).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import Advantages, group_advantages, in_mixed_groups
from cusearch_async.errors import InvalidTrajectory
from cusearch_async.extensions import Settings
from cusearch_async.types import Singleton


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """A pool as a method sees it, ordered by (ticket, rollout).

    Raises: InvalidTrajectory naming the trajectory whose depth or reward cannot be, or when there is none."""

    depths: NDArray[np.int64]  # [T] cnt(τ), 0..s_max
    rewards: NDArray[np.float64]  # [T]
    passed: NDArray[np.bool_]  # [T] whether the answer scored at all: F1 > 0 or EM > 0
    tickets: NDArray[np.int64]  # [T] equal within a group
    rollouts: NDArray[np.int64]  # [T] index within the group
    tokens: NDArray[np.int64]  # [T] sampled tokens, which are what is trained on
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

    @property
    def in_mixed_groups(self) -> NDArray[np.bool_]:
        """[T] Whether the rewards of a trajectory's group differ."""
        return in_mixed_groups(self.tickets, self.rewards)

    def _refuse(self, bad: NDArray[np.bool_], rule: str, values: NDArray[np.generic]) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise InvalidTrajectory(f"trajectory {self.tickets[i]}:{self.rollouts[i]}: {rule}, got {values[i]}")


class MethodSettings(Settings):
    """A method's own settings: keys of the config's [method], in addition to the shared ones."""


METRICS_OF_ALL = frozenset({"budget_filled", "coverage", "coverage_of_best", "singleton_mass", "usable_share"})
"""What is logged under `selection/...` whatever the method."""


class NoMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Not that of another method, either."""


M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[M]):
    indices: NDArray[np.int64]  # [K_eff] into the pool, ascending
    memory: M
    """The method's memory after this step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged under `selection/...`."""
    warnings: tuple[str, ...] = ()
    """Logged for the operator."""

    def problem(self, size: int) -> str | None:
        """Why it is no selection from a pool of `size` trajectories; None if it is."""
        indices = self.indices
        if not isinstance(indices, np.ndarray) or indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
            return f"{indices!r:.200}; its indices must be a one-dimensional numpy array of integers"
        outside = indices[(indices < 0) | (indices >= size)]
        if outside.size:
            return f"the index {outside[0]}; a pool of {size} trajectories has 0 to {size - 1}"
        falls = np.flatnonzero(indices[1:] <= indices[:-1])
        if falls.size:
            i = int(falls[0])
            return f"the index {indices[i + 1]} after {indices[i]}; they must ascend, each once"
        for name, value in self.metrics.items():
            if name in METRICS_OF_ALL:
                return f"a metric {name!r}, which every step has already; name it otherwise"
            if not isinstance(value, int | float | np.number | np.bool_) or not np.isfinite(value):
                return f"{value!r:.200} as its metric {name!r}, which must be a finite number"
        return None


class Method(Generic[M]):
    """One selection method; `budget` is K, the trajectories to train on."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    Memory: ClassVar[type[Any]] = NoMemory
    """A msgspec Struct or dataclass; all fields have defaults, which are its values before step 0. Those that are
    numbers are shown in Redis' `state`."""
    uses_whole_pool: ClassVar[bool] = False
    """Whether it trains on groups as they are: then `method.budget` chooses nothing."""

    def __init__(self, settings: Any, budget: int) -> None:
        self.settings = settings
        self.budget = budget

    def select(self, pool: Candidates, memory: M, rng: np.random.Generator) -> Selection[M]:
        """The trajectories to train on, and the next memory."""
        raise NotImplementedError

    def advantages(
        self, pool: Candidates, selected: NDArray[np.int64], singleton: Singleton, divide_by_std: bool
    ) -> Advantages:
        """Advantages [K_eff] of the `selected` [K_eff] of the pool; `singleton` and `divide_by_std` are the config's
        method.singleton and method.advantage_std. GRPO's, over the selected members of each group."""
        return group_advantages(
            pool.rewards[selected], pool.tickets[selected], pool.rewards, pool.tickets, singleton, divide_by_std
        )

    def encode(self, memory: M) -> str:
        """The memory as text, for the checkpoint and for Redis."""
        return msgspec.json.encode(memory).decode()

    def decode(self, text: str, s_max: int) -> M:
        """The memory that `encode` wrote; the one before step 0 for an empty text.

        Raises: ValueError for the memory of another method; ConfigError for one that episode.s_max does not fit."""
        memory: M = msgspec.json.decode(text, type=self.Memory) if text else self.Memory()
        return memory

    def fields(self, memory: M) -> dict[str, float]:
        """The numbers among the memory's fields."""
        is_struct = isinstance(memory, msgspec.Struct)
        kept = msgspec.structs.fields(self.Memory) if is_struct else dataclasses.fields(self.Memory)
        found = {one.name: getattr(memory, one.name) for one in kept}
        return {name: value for name, value in found.items() if type(value) in (int, float)}


class PlansRollouts(Method[M]):
    """A method that decides how many rollouts are generated; without it they are N groups of G."""

    def questions(self, questions: int, rollouts: int) -> int:
        """Groups to generate per step, for N and G."""
        return questions

    def largest_group(self, rollouts: int) -> int:
        """Most rollouts that a question can get, for G."""
        return rollouts

    def group_sizes(self, memory: M, questions: Sequence[str], rollouts: int) -> Sequence[int] | None:
        """Rollouts of each question (id) of a coming pool, 1 to `largest_group`, by the memory; None for G each."""
        return None
