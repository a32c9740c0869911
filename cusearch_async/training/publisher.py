"""The learner's output: weight versions for the workers, checkpoints for its successor.

Both are written asynchronously, while the next update runs. The loop waits only until what it is about to change has
been copied: the parameters before the next optimizer step, the optimizer at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

import msgspec

from cusearch_async.errors import NonFiniteUpdate, NothingLearned, StoppedByAlarm, WeightsUnavailable
from cusearch_async.learner.interface import Lent
from cusearch_async.training.background import Background, InThread
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState
from cusearch_async.transport.interface import LearnerBuffer, MethodState
from cusearch_async.weights.folder import WeightStore
from cusearch_async.weights.interface import Canary

log = logging.getLogger(__name__)


class Publisher(Background):
    """Weight versions, one every `every` steps and one after the `last`."""

    def __init__(
        self, learner: InThread, buffer: LearnerBuffer, store: WeightStore, every: int = 1, last: int = 0
    ) -> None:
        super().__init__()
        self._learner = learner
        self._buffer = buffer
        self._store = store
        self._every = every
        self._last = last
        self.took_s = 0.0
        """From the beginning of the newest publication to its announcement."""
        self._announced: tuple[int, str] | None = None
        """Version and name that were announced last."""

    async def publish(self, version: int) -> None:
        """Begin to write, then announce, the policy as weight version `version`. The version before is finished first.
        Raises: the error of that one."""
        await self.finish()
        began = time.monotonic()
        async with self._learner.active():
            lent = await self._learner.lend()
            self.start(self._publish(version, lent, self._learner.canary(), began))  # before the next update

    async def publish_if_due(self, version: int) -> None:
        if version % self._every == 0 or version == self._last:
            await self.publish(version)

    async def republish(self, version: int) -> None:
        """Publish the policy again if the announced weights cannot be read: no worker could start with them. Announce
        it again if Redis has forgotten that: without it workers may be granted nothing."""
        await self.finish()
        state = await self._buffer.state()
        if self._announced and state.published < self._announced[0]:
            log.warning("Redis has forgotten the announcement of version %d; announcing it again", self._announced[0])
            await self._buffer.announce(*self._announced)
            return
        workers = (await self._buffer.workers()).values()
        if any(one.is_alive and not one.starting and one.version == state.published for one in workers):
            return  # it has read them, which takes minutes where they are large
        try:
            await asyncio.to_thread(self._store.verify, state.weights)
        except WeightsUnavailable as error:
            log.warning("%s; publishing it again", error)
            await self.publish(version)

    async def _publish(self, version: int, lent: Lent, canary: asyncio.Future[Canary], began: float) -> None:
        async with self._learner.active():
            try:
                computed = await canary
            except BaseException:
                lent.release()
                raise
            name = await asyncio.to_thread(
                self._store.publish, version, self._buffer.epoch, lent.tensors, computed, lent.release, lent.adapter
            )
            await self._buffer.announce(version, name)
            self._announced = version, name
            self.took_s = time.monotonic() - began


class Saver(Background):
    """Checkpoints, one every `every` steps and one at the end."""

    def __init__(
        self, learner: InThread, buffer: LearnerBuffer, checkpoints: Checkpoints, every: int, start: CheckpointState
    ) -> None:
        """`start` is the state from which the run has continued."""
        super().__init__()
        self._learner = learner
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._every = every
        self._start = start
        self._saved = start.step

    async def __aexit__(self, *ended: type[BaseException] | BaseException | TracebackType | None) -> None:
        if isinstance(ended[1], NonFiniteUpdate | NothingLearned | StoppedByAlarm):
            await self.finish()  # it is of the steps before: a restart would make them again
        await super().__aexit__(*ended)

    async def save_if_due(self, step: int, method: MethodState) -> None:
        if step % self._every == 0:
            await self.save(step, method)

    async def save(self, step: int, method: MethodState) -> None:
        """Begin to save, unless that is done; the checkpoint before is finished first. Raises: the error of that
        one."""
        await self.finish()
        if step != self._saved:
            folder = self._checkpoints.begin_write(step)
            async with self._learner.active():
                write = await self._learner.capture(folder)
            self.start(self._save(msgspec.structs.replace(self._start, step=step, method=method), write))

    async def _save(self, state: CheckpointState, write: Callable[[], None]) -> None:
        """Write, then let Redis forget the pools that no kept checkpoint needs any more.

        Just before each change on disk, `checkpoint(0)`, which forgets nothing, checks that no other learner has taken
        over. The old checkpoints are chosen before that check, so a new learner cannot need one of them."""
        checkpoints = self._checkpoints

        def write_all() -> None:
            with checkpoints.write(state):
                write()

        await asyncio.to_thread(write_all)
        await self._buffer.checkpoint(0)
        await asyncio.to_thread(checkpoints.finish, state.step)
        superfluous, oldest = await asyncio.to_thread(lambda: (checkpoints.superfluous(), checkpoints.oldest_kept()))
        await self._buffer.checkpoint(oldest)
        await asyncio.to_thread(checkpoints.remove, superfluous)
        self._saved = state.step
