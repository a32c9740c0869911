"""What leaves the learner: weight versions for the workers, checkpoints for its successor."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

import torch

from cusearch_async.config import Config
from cusearch_async.errors import WeightsUnavailable
from cusearch_async.training.checkpoint import Checkpoints, CheckpointState
from cusearch_async.transport.interface import LearnerBuffer, MethodState
from cusearch_async.transport.weights import Canary, WeightStore

log = logging.getLogger(__name__)


class Policy(Protocol):
    """What can be published and saved."""

    def tensors(self) -> dict[str, torch.Tensor]: ...
    def canary(self) -> Canary: ...
    def save(self, folder: Path) -> None: ...


class Publisher:
    """Weight versions, one every learner.publish_every steps and one after the last."""

    def __init__(self, policy: Policy, buffer: LearnerBuffer, store: WeightStore, config: Config) -> None:
        self._policy = policy
        self._buffer = buffer
        self._store = store
        self._config = config

    async def publish(self, version: int) -> None:
        """Write the policy as weight version `version`, then announce it."""
        directory = self._store.publish(version, self._buffer.epoch, self._policy.tensors(), self._policy.canary())
        await self._buffer.announce(version, directory)

    async def publish_if_due(self, version: int) -> None:
        if version % self._config.learner.publish_every == 0 or version == self._config.run.steps:
            await self.publish(version)

    async def republish(self, version: int) -> None:
        """Publish the policy again if the announced weights cannot be read: no worker could start with them."""
        try:
            await asyncio.to_thread(self._store.verify, (await self._buffer.state()).weights)
        except WeightsUnavailable as error:
            log.warning("%s; publishing it again", error)
            await self.publish(version)


class Saver:
    """Checkpoints, one every learner.checkpoint_every steps and one at the end."""

    def __init__(
        self, policy: Policy, buffer: LearnerBuffer, checkpoints: Checkpoints, config: Config, saved: int
    ) -> None:
        """`saved` is the step that the run has gone on from."""
        self._policy = policy
        self._buffer = buffer
        self._checkpoints = checkpoints
        self._config = config
        self._saved = saved

    async def save_if_due(self, step: int, method: MethodState) -> None:
        if step % self._config.learner.checkpoint_every == 0:
            await self.save(step, method)

    async def save(self, step: int, method: MethodState) -> None:
        """Save unless that is done, then let Redis forget the pools that no kept checkpoint needs any more.

        Just before each change on disk, `checkpoint(0)`, which forgets nothing, checks that no other learner has taken
        over. The old checkpoints are chosen before that check, so a new learner cannot need one of them."""
        if step == self._saved:
            return
        checkpoints = self._checkpoints
        with checkpoints.write(state_at(step, method, self._config)) as folder:
            self._policy.save(folder)
        await self._buffer.checkpoint(0)
        checkpoints.finish(step)
        superfluous = checkpoints.superfluous()
        await self._buffer.checkpoint(checkpoints.oldest_kept())
        checkpoints.remove(superfluous)
        self._saved = step


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
