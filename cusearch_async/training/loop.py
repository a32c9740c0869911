"""The training loop: the paper's Algorithm "CuSearch Training Loop", its rollout phase replaced by a pool that
the workers fill."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config
from cusearch_async.errors import NonFiniteUpdate, NothingLearned
from cusearch_async.metrics.table import Metrics
from cusearch_async.training.background import Background, InThread
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState
from cusearch_async.training.heartbeat import Heartbeat
from cusearch_async.training.publisher import Publisher, Saver
from cusearch_async.training.recorder import Recorder
from cusearch_async.training.report import StepReport
from cusearch_async.training.selector import Chosen, Selector
from cusearch_async.training.watchdog import Watchdog
from cusearch_async.transport.interface import LearnerBuffer
from cusearch_async.types import Pool
from cusearch_async.weights.folder import WeightStore

log = logging.getLogger(__name__)

POLL_S = 0.02
LOOK_EVERY = 25
"""Polls between two looks at whether anything moves."""


async def train(
    learner: InThread,
    buffer: LearnerBuffer,
    store: WeightStore,
    checkpoints: Checkpoints,
    start: CheckpointState,
    questions: RunQuestions,
    config: Config,
    heartbeat: Heartbeat,
    stop: asyncio.Event,
) -> int:
    """Consumes pools from `buffer`, produces weight versions in `store`; returns the steps that are done.

    Waits for a complete pool; unblocked by the workers' `put`. Weights and checkpoints are written during the next
    update. Ends after run.steps, or before the next step once `stop` is set, with a checkpoint of what is committed;
    after a failure the run resumes from its newest one. Raises: NothingLearned when none of its steps had an advantage,
    or when all episodes of a pool have failed: the next start retries them."""
    selector = Selector(config, questions, start.method)
    async with (
        Publisher(learner, buffer, store, config.learner.publish_every, config.run.steps) as publisher,
        Saver(learner, buffer, checkpoints, config.learner.checkpoint_every, start) as saver,
        Recorder(config.folder, config.run.records_mib, buffer.epoch) as recorder,
    ):
        meanwhile = publisher, saver, heartbeat
        watchdog = Watchdog(buffer, config, publisher.republish)
        step, remembered = start.step, start.method
        await publisher.publish(step)
        report = StepReport(buffer, config, step)
        await report.begin()
        has_learned = False
        while step < config.run.steps:
            heartbeat.step = step
            pool = await wait_for_pool(buffer, step, watchdog, stop, selector.question_of, meanwhile)
            if pool is None:
                break
            async with learner.active():
                report.done("wait")
                chosen = selector.choose(pool)
                has_learned |= bool(chosen.advantages.values.any())
                recorder.write(chosen)
                update = await _updated(learner, chosen, step)
                remembered = chosen.remembered
                await buffer.commit(pool, chosen.trajectories, remembered)
                report.done("update")
                step += 1
                await publisher.publish_if_due(step)
                report.done("publish")
                await report.write(chosen, update, publisher.took_s, learner.waited_s)
                await saver.save_if_due(step, remembered)  # after the row: a resumed learner does not write it again
                report.done("checkpoint")
        await publisher.finish()
        await saver.save(step, remembered)
        await saver.finish()
        await recorder.finish()
    if step == config.run.steps:
        await buffer.finish()
    await report.close()
    needs_advantages = not config.loss.entropy_coef and ":" not in config.loss.objective
    if start.step == 0 < step == config.run.steps and needs_advantages and not has_learned:
        raise NothingLearned(
            f"no trajectory of the {step} steps had an advantage: within each group all rewards were equal, so the "
            "policy has learned nothing; check the reward, and whether the questions are all too hard or all too easy"
        )
    log.info("%s at step %d; checkpoint saved", "finished" if step == config.run.steps else "stopped", step)
    return step


async def _updated(learner: InThread, chosen: Chosen, step: int) -> Metrics:
    try:
        return await learner.update(chosen.trajectories, chosen.advantages.values, step)
    except NonFiniteUpdate as error:
        raise NonFiniteUpdate(
            f"{error}, and their pool stays claimed. A restarted learner gets the same pool: change a setting, or "
            "inspect the trajectory (`cusearch buffer peek CONFIG ID`) and take it out of the pool (`cusearch buffer "
            "quarantine CONFIG ID`)"
        ) from error


async def wait_for_pool(
    buffer: LearnerBuffer,
    step: int,
    watchdog: Watchdog,
    stop: asyncio.Event,
    question_of: Callable[[int], str] | None = None,
    meanwhile: Sequence[Background] = (),
) -> Pool | None:
    """The pool of `step` as soon as it is complete; None once `stop` is set. Raises: Stalled; NothingLearned for a pool
    without any trajectory; errors of the work `meanwhile`."""
    for attempt in itertools.count():
        for work in meanwhile:
            work.check()
        if stop.is_set():
            return None
        pool = await buffer.claim(step, question_of)
        if pool is not None:
            if not pool.trajectories:
                raise NothingLearned(await watchdog.explain_empty_pool(step))
            return pool
        if attempt % LOOK_EVERY == 0:
            await watchdog.look(step)
        await asyncio.sleep(POLL_S)
    return None
