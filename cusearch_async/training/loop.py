"""The training loop: the paper's Algorithm "CuSearch Training Loop", its rollout phase replaced by a pool that
the workers fill."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cusearch_async.algorithm.advantages import Advantages, group_advantages
from cusearch_async.algorithm.methods import Candidates, Method, Selection
from cusearch_async.algorithm.staleness import question_index
from cusearch_async.config import Config
from cusearch_async.errors import WeightsUnavailable
from cusearch_async.metrics.log import MetricsLog
from cusearch_async.metrics.step import describe_ledger, describe_step, describe_times
from cusearch_async.metrics.table import Metrics
from cusearch_async.metrics.workers import WorkerRates
from cusearch_async.streams import Stream, stream
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState
from cusearch_async.training.heartbeat import Heartbeat
from cusearch_async.training.watchdog import Watchdog
from cusearch_async.transport.contract import LearnerBuffer, MethodState
from cusearch_async.transport.weights import WeightStore
from cusearch_async.types import Pool, Question, Trajectory

if TYPE_CHECKING:  # it brings DeepSpeed
    from cusearch_async.training.learner import Learner

log = logging.getLogger(__name__)

POLL_S = 0.02
LOOK_EVERY = 25
"""Polls between two looks at whether anything moves."""


async def train(
    learner: Learner,
    buffer: LearnerBuffer,
    store: WeightStore,
    checkpoints: Checkpoints,
    start: CheckpointState,
    questions: Sequence[Question],
    config: Config,
    heartbeat: Heartbeat,
    stop: asyncio.Event,
) -> None:
    """Consumes pools from `buffer`, produces weight versions in `store`.

    Waits for a complete pool; unblocked by the workers' `put`. Ends after run.steps, or before the next step
    once `stop` is set, with a checkpoint of what is committed; after a failure the run goes on from its newest one."""
    metrics_log = MetricsLog(config.folder, buffer.epoch, start.step)
    rates, watchdog = WorkerRates(), Watchdog(buffer, config, functools.partial(republish, learner, buffer, store))
    question_of = question_names(questions, config)
    method = config.method.make()
    memory, remembered = method.decode(start.method.memory), start.method
    await publish(learner, buffer, store, start.step)
    step = saved = start.step
    checkpoint_s = 0.0
    while step < config.run.steps:
        heartbeat.step = step
        began = time.monotonic()
        pool = await wait_for_pool(buffer, step, watchdog, stop, question_of)
        if pool is None:
            break
        arrived = time.monotonic()
        selection = select(pool, method, memory, config)
        selected = [pool.trajectories[i] for i in selection.indices]
        advantages = advantages_of(selected, pool, config)
        report: Metrics = {**learner.update(selected, advantages.values, step)}
        memory = selection.memory
        sizes = {t: n for t, n in remembered.sizes.items() if t >= (step + 1) * config.questions_per_step}
        sizes |= plan_groups(step, method, memory, questions, config)
        remembered = remember(method, memory, sizes)
        await buffer.commit(pool, selected, remembered)
        updated = time.monotonic()
        step += 1
        if step % config.learner.publish_every == 0 or step == config.run.steps:
            await publish(learner, buffer, store, step)
        published = time.monotonic()
        report |= describe_step(pool, selected, advantages, config.method.budget, config.episode.s_max)
        report |= {f"selection/{name}": value for name, value in selection.metrics.items()}
        report |= rates.since_last(await buffer.workers())
        report |= describe_ledger(await buffer.ledger())
        tokens = sum(len(t.token_ids) for t in selected)
        report |= describe_times(arrived - began, updated - arrived, published - updated, checkpoint_s, tokens)
        metrics_log.write(pool.step, report)
        checkpoint_s = 0.0
        if step % config.learner.checkpoint_every == 0:  # behind the row, which a learner that dies now could not redo
            await save_checkpoint(learner, buffer, checkpoints, state_at(step, remembered, config))
            saved, checkpoint_s = step, time.monotonic() - published
    if step > saved:
        await save_checkpoint(learner, buffer, checkpoints, state_at(step, remembered, config))
    metrics_log.close()
    log.info("%s at step %d; checkpoint saved", "finished" if step == config.run.steps else "stopped", step)


async def wait_for_pool(
    buffer: LearnerBuffer,
    step: int,
    watchdog: Watchdog,
    stop: asyncio.Event,
    question_of: Callable[[int], str] | None = None,
) -> Pool | None:
    """The pool of `step` as soon as it is complete, of the questions that its tickets stand for; None once `stop` is
    set. Raises: Stalled."""
    for attempt in itertools.count():
        if stop.is_set():
            return None
        pool = await buffer.claim(step, question_of)
        if pool is not None:
            return pool
        if attempt % LOOK_EVERY == 0:
            await watchdog.look(step)
        await asyncio.sleep(POLL_S)
    return None


def select(pool: Pool, method: Method[Any], memory: Any, config: Config) -> Selection[Any]:
    """The configured method's selection from a pool, seeded by (run seed, step); none from an empty one."""
    if not pool.trajectories:
        log.warning("step %d trains on nothing: every trajectory of its pool failed or was taken out", pool.step)
        return Selection(indices=np.zeros(0, dtype=np.int64), memory=memory)
    candidates = Candidates(
        depths=np.array([t.depth for t in pool], dtype=np.int64),
        rewards=np.array([t.reward for t in pool]),
        passed=np.array([t.f1 > 0 for t in pool]),
        tickets=np.array([t.ticket for t in pool], dtype=np.int64),
        rollouts=np.array([t.rollout for t in pool], dtype=np.int64),
        questions=[t.question_id for t in pool],
        s_max=config.episode.s_max,
    )
    rng = stream(Stream.SELECTION, config.run.seed, pool.step)
    selection = method.select(candidates, memory, rng)
    for warning in selection.warnings:
        log.warning("step %d: %s", pool.step, warning)
    if len(selection.indices) == 0:
        log.warning("step %d trains on nothing: method %s selected none", pool.step, config.method.name)
    return selection


def plan_groups(
    step: int, method: Method[Any], memory: Any, questions: Sequence[Question], config: Config
) -> dict[int, int]:
    """Rollouts of the tickets that the version after `step` opens, step + 1 + max_staleness pools from the start;
    none where the method leaves them at G."""
    count = config.questions_per_step
    block = step + 1 + config.pool.max_staleness
    opened = range(block * count, (block + 1) * count)
    question_of = question_names(questions, config)
    visited = [question_of(ticket) for ticket in opened]
    sizes = method.group_sizes(memory, visited, config.pool.rollouts)
    return {} if sizes is None else dict(zip(opened, sizes, strict=True))


def remember(method: Method[Any], memory: Any, sizes: dict[int, int]) -> MethodState:
    """What the buffer and the checkpoint keep of a method."""
    return MethodState(memory=method.encode(memory), fields=method.fields(memory), sizes=sizes)


def at_start(config: Config) -> CheckpointState:
    """What a run begins with."""
    method = config.method.make()
    return state_at(0, remember(method, method.decode(""), {}), config)


def question_names(questions: Sequence[Question], config: Config) -> Callable[[int], str]:
    """The id of the question that a ticket stands for."""
    return lambda ticket: questions[question_index(ticket, len(questions), config.run.seed)].id


def advantages_of(selected: list[Trajectory], pool: Pool, config: Config) -> Advantages:
    return group_advantages(
        np.array([t.reward for t in selected]),
        np.array([t.ticket for t in selected], dtype=np.int64),
        np.array([t.reward for t in pool]),
        np.array([t.ticket for t in pool], dtype=np.int64),
        config.method.singleton,
        config.method.advantage_std,
    )


async def publish(learner: Learner, buffer: LearnerBuffer, store: WeightStore, version: int) -> None:
    """Write the policy as weight version `version`, then announce it."""
    directory = store.publish(version, buffer.epoch, learner.tensors(), learner.canary())
    await buffer.announce(version, directory)


async def republish(learner: Learner, buffer: LearnerBuffer, store: WeightStore, version: int) -> None:
    """Publish the policy again if the announced weights cannot be read any more: nobody could start with them."""
    try:
        await asyncio.to_thread(store.verify, (await buffer.state()).weights)
    except WeightsUnavailable as error:
        log.warning("%s; publishing it again", error)
        await publish(learner, buffer, store, version)


def state_at(step: int, method: MethodState, config: Config) -> CheckpointState:
    """What a checkpoint after `step` steps has to say besides the weights."""
    return CheckpointState(
        step=step,
        method=method,
        ranks=config.learner.ranks,
        zero_stage=config.learner.zero_stage,
        dtype=config.model.dtype,
        questions=config.questions_per_step,
        rollouts=config.pool.rollouts,
    )


async def save_checkpoint(
    learner: Learner, buffer: LearnerBuffer, checkpoints: Checkpoints, state: CheckpointState
) -> None:
    """Save, then let Redis forget the pools that no kept checkpoint needs any more.

    Redis is asked last before each change on disk whether another learner has taken over (`checkpoint(0)` forgets
    nothing); and what may go is decided before it is asked, when there is no successor that could need it."""
    with checkpoints.write(state) as folder:
        learner.save(folder)
    await buffer.checkpoint(0)
    checkpoints.finish(state.step)
    superfluous = checkpoints.superfluous()
    await buffer.checkpoint(checkpoints.oldest_kept())
    checkpoints.remove(superfluous)
