"""From a pool to what is trained on: selection, advantages, and what the method leaves to coming steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods import Candidates, Method, PlansRollouts, Selection
from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config
from cusearch_async.errors import ConfigError, MethodFailed
from cusearch_async.streams import Stream, stream
from cusearch_async.transport.interface import MethodState
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step trains on."""

    pool: Pool
    memory: str
    """What the method remembered before the step."""
    indices: NDArray[np.int64]
    """[K_eff] Places in the pool."""
    advantages: Advantages
    remembered: MethodState
    """What the method remembers when the step is done."""
    metrics: Mapping[str, float]
    """What the method says of the selection."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """[K_eff]"""
        return [self.pool.trajectories[i] for i in self.indices]


class Selector:
    """The configured method, with its memory, over the steps of a run."""

    def __init__(self, config: Config, questions: RunQuestions, start: MethodState) -> None:
        self._config = config
        self._method = config.method.make()
        self._memory = self._method.decode(start.memory, config.episode.s_max)
        self._sizes = start.sizes
        self.question_of = questions.id_of

    def choose(self, pool: Pool) -> Chosen:
        """Select from a pool, and update the method's memory. Called once per step."""
        before = self._method.encode(self._memory)
        selection = select(pool, self._method, self._memory, self._config)
        self._memory = selection.memory
        first = (pool.step + 1) * self._config.questions_per_step
        self._sizes = {ticket: size for ticket, size in self._sizes.items() if ticket >= first}
        self._sizes |= plan_groups(pool.step, self._method, self._memory, self.question_of, self._config)
        remembered = method_state(self._method, self._memory, self._sizes)
        advantages = advantages_of(selection.indices, pool, self._method, self._config)
        return Chosen(pool, before, selection.indices, advantages, remembered, selection.metrics)


def select(pool: Pool, method: Method[Any], memory: Any, config: Config) -> Selection[Any]:
    """The method's selection from a pool that is not empty, seeded by (run seed, step).

    Raises: MethodFailed for one that is not a selection from this pool."""
    rng = stream(Stream.SELECTION, config.run.seed, pool.step)
    selection = method.select(candidates_of(pool, config), memory, rng)
    problem = selection.problem(len(pool))
    if problem:
        raise MethodFailed(f"step {pool.step}: method.name {config.method.name}: select() gave {problem}")
    for warning in selection.warnings:
        log.warning("step %d: %s", pool.step, warning)
    if len(selection.indices) == 0:
        log.warning("step %d trains on nothing: method %s selected no trajectory", pool.step, config.method.name)
    return selection


def advantages_of(indices: NDArray[np.int64], pool: Pool, method: Method[Any], config: Config) -> Advantages:
    """The method's advantages of the selected `indices` [K_eff] of a pool.

    Raises: MethodFailed unless there is a finite one for each."""
    settings = config.method
    found = method.advantages(candidates_of(pool, config), indices, settings.singleton, settings.advantage_std)
    if np.shape(found.values) != np.shape(indices) or not np.isfinite(found.values).all():
        raise MethodFailed(
            f"step {pool.step}: method.name {settings.name}: advantages() must give one finite number for each of the "
            f"{len(indices)} selected trajectories, got {np.asarray(found.values).tolist()!r:.200}"
        )
    return found


def candidates_of(pool: Pool, config: Config) -> Candidates:
    """A pool with a trajectory or more, as its method sees it."""
    return Candidates(
        depths=np.array([t.depth for t in pool], dtype=np.int64),
        rewards=np.array([t.reward for t in pool]),
        passed=np.array([t.f1 > 0 for t in pool]),
        tickets=np.array([t.ticket for t in pool], dtype=np.int64),
        rollouts=np.array([t.rollout for t in pool], dtype=np.int64),
        tokens=np.array([t.sampled_tokens for t in pool], dtype=np.int64),
        questions=[t.question_id for t in pool],
        s_max=config.episode.s_max,
    )


def plan_groups(
    step: int, method: Method[Any], memory: Any, question_of: Callable[[int], str], config: Config
) -> dict[int, int]:
    """Rollouts of the tickets that the version after `step` opens, step + 1 + max_staleness pools from the start;
    none where the method leaves them at G."""
    if not isinstance(method, PlansRollouts):
        return {}
    count = config.questions_per_step
    block = step + 1 + config.pool.max_staleness
    opened = range(block * count, (block + 1) * count)
    sizes = method.group_sizes(memory, [question_of(ticket) for ticket in opened], config.pool.rollouts)
    return {} if sizes is None else dict(zip(opened, sizes, strict=True))


def method_state(method: Method[Any], memory: Any, sizes: dict[int, int]) -> MethodState:
    """What the buffer and the checkpoint keep of a method."""
    return MethodState(memory=method.encode(memory), fields=method.fields(memory), sizes=sizes)


def initial_method_state(config: Config) -> MethodState:
    """What the method remembers when a run begins. Raises: ConfigError for a method that shows what it must not."""
    method = config.method.make()
    try:
        return method_state(method, method.decode("", config.episode.s_max), {})
    except ValueError as error:
        raise ConfigError(f"method.name {config.method.name}: {error}") from error
