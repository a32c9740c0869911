"""From a pool to the trajectories of an update: selection, advantages, and the method's memory for coming steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.algorithm.advantages import Advantages
from cusearch_async.algorithm.methods import Candidates, Method, PlansRollouts, Selection
from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config, MethodConfig, PoolConfig
from cusearch_async.errors import ConfigError, MethodFailed, first_line
from cusearch_async.streams import Stream, stream
from cusearch_async.transport.interface import MethodState
from cusearch_async.types import Pool, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selection of a step."""

    pool: Pool
    memory: str
    """The method's memory before the step."""
    indices: NDArray[np.int64]
    """[K_eff] Places in the pool."""
    advantages: Advantages
    remembered: MethodState
    """The method's memory after the step."""
    metrics: Mapping[str, float]
    """The method's metrics of the selection."""

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
        config, method, step = self._config, self._method, pool.step
        before, candidates = method.encode(self._memory), candidates_of(pool, config.episode.s_max)
        selection = select(candidates, step, method, self._memory, config.method, config.run.seed)
        self._memory, count = selection.memory, config.questions_per_step
        self._sizes = {ticket: size for ticket, size in self._sizes.items() if ticket >= (step + 1) * count}
        self._sizes |= plan_groups(step, method, self._memory, self.question_of, count, config.pool)
        try:
            remembered = method_state(method, self._memory, self._sizes, config.episode.s_max)
        except ValueError as error:
            raise MethodFailed(f"step {step}: method.name {config.method.name}: {error}") from error
        advantages = advantages_of(selection.indices, candidates, step, method, config.method)
        return Chosen(pool, before, selection.indices, advantages, remembered, selection.metrics)


def select(
    pool: Candidates, step: int, method: Method[Any], memory: Any, settings: MethodConfig, seed: int
) -> Selection[Any]:
    """The method's selection from the pool of `step`, seeded by (run seed, step).

    Raises: MethodFailed for one that is not a selection from this pool."""
    selection = method.select(pool, memory, stream(Stream.SELECTION, seed, step))
    is_one = isinstance(selection, Selection)
    problem = selection.problem(len(pool.depths)) if is_one else f"{selection!r:.200}, which is no Selection"
    if problem:
        raise MethodFailed(f"step {step}: method.name {settings.name}: select() gave {problem}")
    selection = replace(selection, metrics=_in_python(selection.metrics))
    for warning in selection.warnings:
        log.warning("step %d: %s", step, warning)
    if len(selection.indices) == 0:
        log.warning("step %d trains on nothing: method %s selected no trajectory", step, settings.name)
    return selection


def _in_python(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same numbers, also where they were numpy's, which are not written as JSON, or booleans, which a record's
    numbers cannot be."""
    numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}
    return {name: int(number) if isinstance(number, bool) else number for name, number in numbers.items()}


def advantages_of(
    indices: NDArray[np.int64], pool: Candidates, step: int, method: Method[Any], settings: MethodConfig
) -> Advantages:
    """The method's advantages of the selected `indices` [K_eff] of the pool of `step`.

    Raises: MethodFailed unless there is a finite one for each."""
    found = method.advantages(pool, indices, settings.singleton, settings.advantage_std)
    values = found.values if isinstance(found, Advantages) else None
    if not isinstance(values, np.ndarray) or values.shape != indices.shape or not np.isfinite(values).all():
        raise MethodFailed(
            f"step {step}: method.name {settings.name}: advantages() must give Advantages with an array of one finite "
            f"number for each of the {len(indices)} selected trajectories, got {found!r:.200}"
        )
    return found


def candidates_of(pool: Pool, s_max: int) -> Candidates:
    """A pool with a trajectory or more, as its method sees it."""
    return Candidates(
        depths=np.array([t.depth for t in pool], dtype=np.int64),
        rewards=np.array([t.reward for t in pool]),
        passed=np.array([t.f1 > 0 or t.em > 0 for t in pool]),
        tickets=np.array([t.ticket for t in pool], dtype=np.int64),
        rollouts=np.array([t.rollout for t in pool], dtype=np.int64),
        tokens=np.array([t.sampled_tokens for t in pool], dtype=np.int64),
        questions=[t.question_id for t in pool],
        s_max=s_max,
    )


def plan_groups(
    step: int, method: Method[Any], memory: Any, question_of: Callable[[int], str], count: int, pool: PoolConfig
) -> dict[int, int]:
    """Rollouts of the tickets that the version after `step` opens, step + 1 + max_staleness pools of `count` groups
    from the start; none where the method leaves them at G.

    Raises: MethodFailed for sizes that no worker could run."""
    if not isinstance(method, PlansRollouts):
        return {}
    block = step + 1 + pool.max_staleness
    opened = range(block * count, (block + 1) * count)
    sizes = method.group_sizes(memory, [question_of(ticket) for ticket in opened], pool.rollouts)
    if sizes is None:
        return {}
    most = method.largest_group(pool.rollouts)
    whole = np.asarray(sizes)
    if whole.shape != (count,) or whole.dtype.kind not in "iu" or whole.min() < 1 or whole.max() > most:
        raise MethodFailed(
            f"step {step}: {type(method).__name__}.group_sizes() must give for each of the {count} questions a whole "
            f"number from 1 to largest_group() ({most}), got {sizes!r:.200}"
        )
    return dict(zip(opened, whole.tolist(), strict=True))


def method_state(method: Method[Any], memory: Any, sizes: dict[int, int], s_max: int) -> MethodState:
    """A method's memory, as the buffer and the checkpoint keep it.

    Raises: ValueError for one that no later learner could read, or whose fields the buffer does not show."""
    try:
        text = method.encode(memory)
        method.decode(text, s_max)
    except (TypeError, ValueError) as error:
        hint = "NaN and infinity cannot be kept, nor numpy's numbers"
        raise ValueError(f"its memory {memory!r:.300} could not be read back: {first_line(error)}; {hint}") from error
    return MethodState(memory=text, fields=method.fields(memory), sizes=sizes)


def initial_method_state(settings: MethodConfig, s_max: int) -> MethodState:
    """The method's memory when a run begins. Raises: ConfigError for one whose fields the buffer does not show."""
    method = settings.make()
    try:
        return method_state(method, method.decode("", s_max), {}, s_max)
    except ValueError as error:
        raise ConfigError(f"method.name {settings.name}: {error}") from error
