"""Follows the run for a worker or the evaluator: its first weights, each new version, its end.

A version that cannot be read does not stop the process: a shared disk may show a new folder seconds late, a file may be
damaged, an old version may be deleted before it is read, the disk may have no room for a copy. The loaded weights stay
loaded, and the version is tried again until it can be read or another one is announced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cusearch_async.concurrency import doubling_pause_s
from cusearch_async.errors import LearnerUnreachable, WeightsUnavailable, WriteFailed
from cusearch_async.lifecycle.progress import LOG_EVERY_S, log_waiting
from cusearch_async.transport.interface import IDLE_S, RunState, WorkerBuffer
from cusearch_async.weights.interface import WeightSource

if TYPE_CHECKING:  # it brings vLLM
    from cusearch_async.rollout.engine import Engine

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


async def wait_until_announced(buffer: WorkerBuffer, is_over: Callable[[], bool]) -> None:
    """Wait until the run has had weights, and has this process's contract, or `is_over`. The learner's `recover` and
    first `announce` end the wait. Raises: ContractMismatch."""
    with log_waiting(log, "waiting for the learner to publish weights"):
        while not is_over() and not (await buffer.state()).weights:
            await buffer.wait_for_news(IDLE_S)
    with log_waiting(log, "waiting for a learner of this version to take over the run"):
        while not is_over() and not await buffer.check_identity():
            await buffer.wait_for_news(IDLE_S)


class Finish:
    """Whether the run is finished, as one process sees it from the first state that it is shown.

    A run that was finished before the process came counts only if the process's own `steps` are done: with more steps,
    a learner that continues the run may be starting now."""

    def __init__(self, steps: int) -> None:
        """`steps`: run.steps of this process."""
        self._steps = steps
        self._before: int | None = None
        """Epoch of the learner that had finished the run when this process came; 0 for none."""

    def has_come(self, state: RunState) -> bool:
        if self._before is None:
            self._before = state.epoch if state.is_finished else 0
        return state.is_finished and (state.epoch != self._before or state.step >= self._steps)


class PatientLoader:
    """Loads versions into one engine."""

    def __init__(self, engine: Engine, source: WeightSource, patience_s: float) -> None:
        self._engine = engine
        self._source = source
        self._patience_s = patience_s
        self._failed = ""
        """The version that could not be loaded at the last attempt."""
        self._failures = 0
        """Failed attempts to load it."""
        self._next_try = 0.0
        self._idle_since: float | None = None
        self._logged_at = float("-inf")

    @property
    def is_failing(self) -> bool:
        """Whether the announced version could not be loaded at the last attempt."""
        return bool(self._failed)

    async def load(self, name: str, check: bool, idle: bool, is_finished: bool = False) -> bool:
        """Load the announced version; False when it cannot be read now. `idle`: the process has nothing else to do;
        `is_finished`: the run is.

        Raises: WeightsUnavailable or WriteFailed when nothing could be loaded for `patience_s` while idle, unless the
        engine has weights and the learner, who does not answer, may come back; WeightsMismatch."""
        if name == self._failed and time.monotonic() < self._next_try:
            return False
        try:
            await self._engine.load(self._source, name, check)
        except (WeightsUnavailable, WriteFailed) as error:
            may_come_back = isinstance(error, LearnerUnreachable) and not is_finished
            self._note_failure(name, error, idle and not (may_come_back and self._engine.loaded))
            return False
        self._failed, self._idle_since = "", None
        return True

    def _note_failure(self, name: str, error: WeightsUnavailable | WriteFailed, is_urgent: bool) -> None:
        now = time.monotonic()
        self._failures = self._failures + 1 if name == self._failed else 1
        self._failed = name
        self._next_try = now + doubling_pause_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        if not is_urgent or self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since > self._patience_s:
            self._idle_since = None  # an evaluator leaves this version out, and begins with another
            if isinstance(error, WriteFailed):
                raise WriteFailed(f"{error}; no version could be loaded for {self._patience_s:g} s") from error
            raise WeightsUnavailable(
                f"{error}; no other version was announced for {self._patience_s:g} s; restart the learner, which "
                "publishes its weights under a new name"
            ) from error
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            kept = self._engine.loaded or "nothing loaded"
            log.warning("%s; continuing with %s, will try again", error, kept)
