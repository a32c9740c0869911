"""Rank 0 of the learner: takes over the run, continues from the newest checkpoint, and trains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config
from cusearch_async.errors import CusearchError, Fenced, WriteFailed, first_line
from cusearch_async.learner.interface import Learner, is_sealed
from cusearch_async.lifecycle.gpu_share import GpuLock
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import stop_on_signals
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import (
    changes_since_last_start,
    place_of_buffer,
    read_starts,
    record_start,
    record_stop,
)
from cusearch_async.run.identity import ACCEPT_CHANGES, NOBODY, Difference, Identity, not_this_run
from cusearch_async.training.checkpoint import Checkpoint, Checkpoints, CheckpointState, check_same_run, checkpoints_of
from cusearch_async.training.heartbeat import BEAT_S, Heartbeat
from cusearch_async.training.in_thread import in_thread
from cusearch_async.training.loop import train
from cusearch_async.training.publisher import state_at
from cusearch_async.training.selector import initial_method_state
from cusearch_async.transport.interface import LearnerBuffer, LearnerStatus
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.transports import transport_of

if TYPE_CHECKING:
    from cusearch_async.learner.ranks import Ranks

log = logging.getLogger(__name__)

TAKE_OVER_S = 60.0
"""For which another learner may be taking over the same folder; nothing else is done meanwhile."""


class OpensBuffer(Protocol):
    """As `transport.buffer.open_buffer`."""

    def __call__(
        self,
        config: Config,
        patience_s: float,
        stop: asyncio.Event | None = None,
        vocab_size: int | None = None,
        identity: Identity = NOBODY,
    ) -> AbstractAsyncContextManager[LearnerBuffer]: ...


def lead(
    make_learner: Callable[[Config, Ranks], Learner],
    open_buffer: OpensBuffer,
    ranks: Ranks,
    questions: RunQuestions,
    identity: Identity,
    config: Config,
    accept_changes: bool,
    lock: GpuLock | None = None,
) -> None:
    """Run rank 0 until the run is done, or a signal arrives. `lock` is taken, if learner and engines take turns.

    Raises: as `before_loading`; Fenced, which names the new learner; and all errors of training."""
    identity = identity.in_folder(config.folder)
    checkpoints = checkpoints_of(config)
    newest = asyncio.run(before_loading(open_buffer, identity, checkpoints, config, accept_changes))
    with log_waiting(log, f"waiting for {config.model.location} to be loaded"):
        learner = make_learner(config, ranks)
    if newest is not None and not is_sealed(newest.path):  # a learner that is alive has deleted it: it has newer ones
        newest = asyncio.run(before_loading(open_buffer, identity, checkpoints, config, accept_changes))
    ranks.tell(str(newest.path if newest else "").encode())
    if newest is not None:
        with log_waiting(log, f"waiting for {newest.path} to be loaded"):
            learner.load(newest.path)
    start = newest.state if newest else state_at(0, initial_method_state(config), config)
    try:
        asyncio.run(
            _train(learner, open_buffer, ranks, checkpoints, start, questions, identity, config, accept_changes, lock)
        )
    finally:
        learner.stop()
    ranks.close()


async def before_loading(
    open_buffer: OpensBuffer, identity: Identity, checkpoints: Checkpoints, config: Config, accept_changes: bool
) -> Checkpoint | None:
    """Whether this is the run of the folder, of Redis and of its newest checkpoint, which is verified and returned;
    None without one.

    Raises: ContractMismatch when it is another run; ConfigError; BufferUnavailable."""
    for change in changes_since_last_start(config, accept_changes, identity):
        log.info("since the last start: %s", change)
    async with open_buffer(config, config.run.wait_s, identity=identity) as buffer:
        await buffer.check_identity(accept_changes)
        await refuse_another_buffer(buffer, config, accept_changes)
        state = await buffer.state()
    with log_waiting(log, "waiting for the newest checkpoint to be verified"):
        newest = checkpoints.newest(state)
    if newest is None:
        log.info("no checkpoint, starting at step 0")
        return None
    check_same_run(newest.path, newest.state, config)
    log.info("resuming from step %d (checkpoint %s)", newest.state.step, newest.path)
    return newest


async def refuse_another_buffer(buffer: LearnerBuffer, config: Config, accept_changes: bool) -> None:
    """A folder has one buffer: two would give the same epochs, and mix two courses of the run in its files.

    A buffer at the same place that has lost its data is no other one. Raises: ContractMismatch for a buffer that did
    not give the newest learner of this folder its epoch, unless the learner accepts changes."""
    starts = read_starts(config.folder)
    if not starts or await buffer.epoch_of(starts[-1].nonce) == starts[-1].epoch:
        return
    last, here = starts[-1], place_of_buffer(config.redis)
    if here != last.buffer and not accept_changes:
        raise not_this_run(
            config.run.name,
            [Difference("redis.url", here, last.buffer)],
            f"if that Redis is gone and no learner of it (the last had epoch {last.epoch}) is alive, {ACCEPT_CHANGES} "
            "continues from the newest checkpoint",
        )
    log.warning("Redis at %s has no record of this folder's learner of epoch %d; continuing", here, last.epoch)


async def _train(
    learner: Learner,
    open_buffer: OpensBuffer,
    ranks: Ranks,
    checkpoints: Checkpoints,
    start: CheckpointState,
    questions: RunQuestions,
    identity: Identity,
    config: Config,
    accept_changes: bool,
    lock: GpuLock | None,
) -> None:
    stop = stop_on_signals()
    transport = transport_of(config)
    store = transport.store()
    async with open_buffer(config, config.redis.outage_s, stop, learner.vocab_size, identity) as buffer:
        await take_over(buffer, store, checkpoints, start, identity, config, accept_changes)
        try:
            async with (
                transport.serving(),
                Heartbeat(buffer, ranks, config) as heartbeat,
                in_thread(learner, lock) as trainer,
            ):
                step = await train(trainer, buffer, store, checkpoints, start, questions, config, heartbeat, stop)
            record_stop(config.folder, buffer.epoch, step, "finished" if step == config.run.steps else "stopped")
        except (Fenced, WriteFailed) as error:
            explained = await explain(buffer, error)
            record_stop(config.folder, buffer.epoch, None, first_line(explained))
            raise explained from error
        except Exception as error:
            record_stop(config.folder, buffer.epoch, None, first_line(error))
            raise


async def take_over(
    buffer: LearnerBuffer,
    store: WeightStore,
    checkpoints: Checkpoints,
    start: CheckpointState,
    identity: Identity,
    config: Config,
    accept_changes: bool,
) -> None:
    """Fence off earlier learners, and clear what they left half done. One learner at a time does so in a folder."""
    with run_folder.hold_for_take_over(config.folder, TAKE_OVER_S):
        await refuse_another_buffer(buffer, config, accept_changes)
        earlier = await buffer.learner()
        least_epoch = max(checkpoints.highest_epoch(), store.highest_epoch())
        await buffer.recover(start.step, start.method, least_epoch, accept_changes)
        record_start(config, buffer.epoch, start.step, identity, buffer.nonce)
    if earlier:
        log.warning(
            "epoch %d takes over from a learner that may be alive (%s, last heard of %.1f s ago); it will end",
            buffer.epoch,
            _describe(earlier),
            earlier.heartbeat_age_s,
        )
    checkpoints.begin(buffer.epoch, start.step)
    store.begin(buffer.epoch)


async def explain(buffer: LearnerBuffer, error: CusearchError) -> CusearchError:
    """`error`, or Fenced naming who has taken over. WriteFailed too may mean that: a new learner clears away what the
    earlier one is still writing."""
    if isinstance(error, WriteFailed):
        try:
            await buffer.checkpoint(0)
        except CusearchError as fenced:
            error = fenced
    return Fenced(f"{error}{await _describe_successor(buffer)}") if isinstance(error, Fenced) else error


async def _describe_successor(buffer: LearnerBuffer) -> str:
    """Who has taken over, in words, as soon as it says so itself; nothing if it does not."""
    deadline = time.monotonic() + BEAT_S
    while time.monotonic() < deadline:
        learner = await buffer.learner()
        if learner and learner.epoch > buffer.epoch:
            return f" (it is {_describe(learner)})"
        await asyncio.sleep(0.05)
    return ""


def _describe(learner: LearnerStatus) -> str:
    return f"epoch {learner.epoch} on {learner.host}, process {learner.pid}"
