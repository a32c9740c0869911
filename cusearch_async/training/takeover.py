"""Rank 0 of the learner: takes over the run, continues from the newest checkpoint, and trains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.config import Config, as_toml
from cusearch_async.errors import ConfigError, CusearchError, Fenced, WriteFailed, first_line
from cusearch_async.learner.interface import Learner
from cusearch_async.lifecycle.gpu_share import GpuLock
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import stop_on_signals
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import changes_since_last_start, place_of_buffer, read_starts, record_start, record_stop
from cusearch_async.run.identity import ACCEPT_CHANGES, Difference, Identity, not_this_run
from cusearch_async.run.provenance import weights_of
from cusearch_async.training.alarms import tell_of_end
from cusearch_async.training.background import in_thread
from cusearch_async.training.checkpoint import Checkpoint, CheckpointState, check_same_run, state_at
from cusearch_async.training.checkpoint_objects import learner_checkpoints
from cusearch_async.training.heartbeat import BEAT_S, Heartbeat
from cusearch_async.training.loop import train
from cusearch_async.training.selector import initial_method_state
from cusearch_async.transport.interface import LearnerBuffer, LearnerStatus, RunState
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.transports import transport_of

if TYPE_CHECKING:
    from cusearch_async.learner.ranks import Ranks

log = logging.getLogger(__name__)

TAKE_OVER_S = 60.0
"""For which another learner may be taking over the same folder; nothing else is done meanwhile."""


class Leader:
    """Rank 0 of one learner process."""

    def __init__(
        self,
        open_buffer: Callable[..., AbstractAsyncContextManager[LearnerBuffer]],
        ranks: Ranks,
        questions: RunQuestions,
        identity: Identity,
        config: Config,
        accept_changes: bool,
        lock: GpuLock | None = None,
    ) -> None:
        """`lock` is taken, if the run is colocated.

        Raises: ConfigError, MissingExtra: of the transport of weights, or of learner.checkpoint_objects."""
        self._open_buffer = open_buffer
        self._ranks = ranks
        self._questions = questions
        self._identity = identity.in_folder(config.folder)
        self._config = config
        self._accepts_changes = accept_changes
        self._lock = lock
        self._checkpoints = learner_checkpoints(config)
        self._transport = transport_of(config)

    def lead(self, make_learner: Callable[[Config, Ranks], Learner]) -> bool:
        """Train until the run is finished, or a signal arrives; whether it is finished.

        Raises: ContractMismatch when it is another run; ConfigError; BufferUnavailable; Fenced, which names the new
        learner; and all errors of training."""
        config = self._config
        newest = asyncio.run(self._newest_checkpoint())
        # The others load nothing before, and wait in no collective, which would time out.
        self._ranks.tell(as_toml(config).encode())
        with log_waiting(log, f"waiting for {config.model.location} to be loaded"):
            learner = make_learner(config, self._ranks)
        latest = self._checkpoints.latest()
        if (latest and latest.path) != (newest and newest.path):  # another learner has saved or deleted one meanwhile
            newest = asyncio.run(self._newest_checkpoint())
        self._ranks.tell(str(newest.path if newest else "").encode())
        start = state_at(0, initial_method_state(config.method, config.episode.s_max), config)
        if newest is not None:
            with log_waiting(log, f"waiting for {newest.path} to be loaded"):
                learner.load(newest.path)
            start = newest.state
        start = msgspec.structs.replace(start, weights=weights_of(config.model.location))  # it is on this machine now
        is_finished = False
        try:
            is_finished = asyncio.run(self._train(learner, start)) == config.run.steps
        finally:
            learner.stop(is_finished)
        self._ranks.close()
        return is_finished

    async def _newest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, verified, of the run of the folder and of Redis, with the state to continue with; None
        without one."""
        config = self._config
        for change in changes_since_last_start(config, self._accepts_changes, self._identity):
            log.info("since the last start: %s", change)
        async with self._open_buffer(config, config.run.wait_s, identity=self._identity) as buffer:
            await buffer.check_identity(self._accepts_changes)
            await self._refuse_another_buffer(buffer)
            state = await buffer.state()
        # In ticket order a step's tickets are known, whatever Redis has forgotten; else it must know what was trained.
        known = RunState() if config.pool.order == "ticket" else state
        with log_waiting(log, "waiting for the newest checkpoint to be verified"):
            newest = self._checkpoints.newest(known)
        if newest is None:
            log.info("no checkpoint, starting at step 0")
            return None
        method = check_same_run(newest.path, newest.state, config, self._accepts_changes)
        log.info("resuming from step %d (checkpoint %s)", newest.state.step, newest.path)
        return replace(newest, state=state_at(newest.state.step, method, config))

    async def _refuse_another_buffer(self, buffer: LearnerBuffer) -> None:
        """A folder has one buffer: two would give the same epochs, and mix two courses of the run in its files.

        A buffer at the same place that has lost its data is no other one. Raises: ContractMismatch for a buffer that
        did not give the newest learner of this folder its epoch, unless changes are accepted."""
        starts = read_starts(self._config.folder)
        if not starts or await buffer.epoch_of(starts[-1].nonce) == starts[-1].epoch:
            return
        last, here = starts[-1], place_of_buffer(self._config.redis)
        if here != last.buffer and not self._accepts_changes:
            raise not_this_run(
                self._config.run.name,
                [Difference("redis.url", here, last.buffer)],
                f"if that Redis is gone and no learner of it (the last had epoch {last.epoch}) is alive, "
                f"{ACCEPT_CHANGES} continues from the newest checkpoint",
            )
        log.warning("Redis at %s has no record of this folder's learner of epoch %d; continuing", here, last.epoch)

    async def _train(self, learner: Learner, start: CheckpointState) -> int:
        """The step that was reached."""
        config, stop = self._config, stop_on_signals()
        store = self._transport.store()
        opened = self._open_buffer(config, config.redis.outage_s, stop, learner.vocab_size, self._identity)
        async with opened as buffer:
            await self.take_over(buffer, store, start)
            stall_s, collective_s = config.run.stall_s, config.learner.collective_timeout_s

            async def tell(error: Exception) -> None:
                record_stop(config.folder, buffer.epoch, None, first_line(error))
                await tell_of_end(config, error, heartbeat.step)

            heartbeat = Heartbeat(buffer, self._ranks, stall_s, collective_s, stop, start.step, tell)
            try:
                async with self._transport.serving(), heartbeat, in_thread(learner, self._lock) as trainer:
                    await asyncio.to_thread(self._checkpoints.tell_start)  # it may have to upload all of one
                    step = await train(
                        trainer, buffer, store, self._checkpoints, start, self._questions, config, heartbeat, stop
                    )
                record_stop(config.folder, buffer.epoch, step, "finished" if step == config.run.steps else "stopped")
                await asyncio.to_thread(self._checkpoints.tell_stop)
                return step
            except Exception as error:
                explained = await explain(buffer, error)
                await tell(explained)
                await asyncio.to_thread(self._checkpoints.tell_stop)
                if explained is error:
                    raise
                raise explained from error

    async def take_over(self, buffer: LearnerBuffer, store: WeightStore, start: CheckpointState) -> None:
        """Fence off earlier learners, and clear what they left half done. One learner at a time does so in a folder."""
        with run_folder.hold_for_take_over(self._config.folder, TAKE_OVER_S):
            await self._refuse_another_buffer(buffer)
            earlier = await buffer.learner()
            if earlier and (await buffer.state()).checkpoint > start.step:
                raise ConfigError(
                    f"the checkpoint of step {start.step} is too old now: another learner of this run is alive "
                    f"({_describe(earlier)}) and has saved later ones; start this one again"
                )
            least_epoch = max(self._checkpoints.highest_epoch(), store.highest_epoch())
            await buffer.recover(start.step, start.method, least_epoch, self._accepts_changes)
            self._checkpoints.begin(buffer.epoch, start.step)  # first, as what is half done may fill the disk
            store.begin(buffer.epoch)
            record_start(self._config, buffer.epoch, start.step, self._identity, buffer.nonce)
        if earlier:
            log.warning(
                "epoch %d takes over from a learner that may be alive (%s, last heard of %.1f s ago); it will end",
                buffer.epoch,
                _describe(earlier),
                earlier.heartbeat_age_s,
            )


async def explain(buffer: LearnerBuffer, error: Exception) -> Exception:
    """`error`, or Fenced naming the learner that has taken over. WriteFailed too may mean that: a new learner clears
    away what the earlier one is still writing."""
    if isinstance(error, WriteFailed):
        try:
            await buffer.checkpoint(0)
        except Fenced as fenced:
            error = fenced
        except CusearchError as unknown:  # the same full disk may have ended Redis
            log.warning("whether another learner has taken over cannot be asked: %s", unknown)
    if not isinstance(error, Fenced):
        return error
    deadline = time.monotonic() + BEAT_S  # by then the successor has reported itself
    while time.monotonic() < deadline:
        learner = await buffer.learner()
        if learner and learner.epoch > buffer.epoch:
            return Fenced(f"{error} (it is {_describe(learner)})")
        await asyncio.sleep(0.05)
    return Fenced(str(error))


def _describe(learner: LearnerStatus) -> str:
    return f"epoch {learner.epoch} on {learner.host}, process {learner.pid}"
