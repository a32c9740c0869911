"""The evaluator process: scores published versions on held-out questions during the run.

It has its own engine and takes no tickets. Training does not wait for it. When versions come faster than it can score
them, it skips some."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cusearch_async.config import Config
from cusearch_async.data.questions import load_eval_questions, load_run_questions
from cusearch_async.errors import LearnerUnreachable, WeightsUnavailable
from cusearch_async.evaluation.scores import Done, record, set_others_aside
from cusearch_async.evaluation.scoring import due_version, score_all, summarize
from cusearch_async.files import write_failed
from cusearch_async.lifecycle.gpu_share import gpu_lock
from cusearch_async.lifecycle.signals import stop_on_signals, unless_stopped
from cusearch_async.processes.engines import ask_retriever, check_policy, open_runner, take_gpus
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.weight_loader import Finish, PatientLoader, wait_until_announced
from cusearch_async.run.folder import read_marker
from cusearch_async.run.identity import identity_of
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.transport.interface import RunState, WorkerBuffer
from cusearch_async.types import Question, Trajectory
from cusearch_async.weights.interface import WeightSource
from cusearch_async.weights.transports import transport_of

if TYPE_CHECKING:
    from cusearch_async.rollout.engine import Engine

log = logging.getLogger(__name__)

POLL_S = 0.5
LOOK_AGAIN_S = 10.0


async def run(config: Config) -> bool:
    """Score every `eval.every` steps, and the last version. Ends with the run, or on a signal; whether all is
    scored."""
    stop = stop_on_signals()
    questions = load_eval_questions(config)
    tokenizer = check_policy(config, config.model.location)
    identity = identity_of(config, load_run_questions(config).all, tokenizer)
    async with open_buffer(config, config.run.wait_s, stop, identity=identity) as buffer:
        await buffer.check_identity()
    try:
        config.folder.mkdir(parents=True, exist_ok=True)  # on a machine of its own nobody else makes it
    except OSError as error:
        raise write_failed(config.folder, error) from error
    async with (
        SearchClient.open(config.retriever, config.episode, config.questions_per_step) as search,
        transport_of(config).source(needs_last=True) as source,
    ):
        agreed = await ask_retriever(search, config, identity, stop)
        if agreed is None:
            return False
        async with open_buffer(config, config.redis.outage_s, stop, identity=agreed) as buffer:
            await buffer.check_identity()
            lock = await take_gpus(gpu_lock(config, "engine"), stop)
            if stop.is_set():
                return False
            policy = config.model.location
            with open_runner(config, policy, tokenizer, search, lock, is_evaluator=True) as (engine, runner):
                log.info("ready")
                return await Evaluator(buffer, engine, source, runner, questions, config).run(stop)


class Evaluator:
    """Scores versions until the run is finished and its last version is scored."""

    def __init__(
        self,
        buffer: WorkerBuffer,
        engine: Engine,
        source: WeightSource,
        runner: EpisodeRunner,
        questions: Sequence[Question],
        config: Config,
    ) -> None:
        self._buffer = buffer
        self._engine = engine
        self._source = source
        self._runner = runner
        self._questions = questions
        self._config = config
        self._loader = PatientLoader(engine, source, config.redis.outage_s)
        self._next_look = 0.0
        self._gone_since: float | None = None
        """When the learner of a finished run was first seen to be gone."""
        self._done = Done(config.folder)

    async def run(self, stop: asyncio.Event) -> bool:
        """Whether the last version is scored: it ends early once `stop` is set."""
        config, done, finish = self._config, self._done, Finish(self._config.run.steps)
        missed: int | None = None
        await wait_until_announced(self._buffer, stop.is_set)
        if not stop.is_set() and read_marker(config.folder) is None:
            set_others_aside(config.folder, (await self._buffer.identity()).run_id)
        while not stop.is_set():
            state = await self._buffer.state()
            done.follow(state)
            is_finished = finish.has_come(state)
            if is_finished and done.version >= state.step:
                if done.version == missed:
                    log.warning("run %s is finished, and version %d could not be scored", config.run.name, missed)
                    return False
                log.info("run %s is finished and its last version is scored; the evaluator ends", config.run.name)
                return True
            loading = asyncio.ensure_future(self.load_due(state, is_finished))
            if not await unless_stopped(loading, stop):
                break
            version = loading.result()
            if version is None:
                await asyncio.sleep(POLL_S)
                continue
            started = time.monotonic()
            scoring = asyncio.ensure_future(self._score(version))
            if not await unless_stopped(scoring, stop):
                break
            done.version, scored = version, scoring.result()
            if scored is None:
                missed = version
                continue
            scores = summarize(scored, self._questions, config.environment[config.evaluated_in].scoring)
            record(config.folder, version, self._engine.loaded, time.monotonic() - started, scores, scored)
            log.info("version %d: EM %.3f, depth %.2f", version, scores["all"]["em"], scores["all"]["depth"])
        return False

    async def _score(self, version: int) -> list[Trajectory] | None:
        """A colocated learner gets the GPUs between two rounds: it waits for them no longer than run.stall_s."""
        at_once, found = self._config.eval.at_once, list[Trajectory]()
        size = at_once if self._config.run.colocate else len(self._questions)
        for first in range(0, len(self._questions), size):
            async with self._engine.active():
                some = self._questions[first : first + size]
                scored = await score_all(self._runner, some, version, at_once, first)
            if scored is None:
                return None
            found += scored
            await asyncio.sleep(0)  # the engine gives the GPUs back only when the event loop runs
        return found

    async def load_due(self, state: RunState, is_finished: bool) -> int | None:
        """Load the version that is due for scoring; None when there is none, or it cannot be read now. `is_finished`:
        the run is. Raises: ContractMismatch when a learner has changed the run contract; WeightsUnavailable when
        the last version cannot be loaded; WriteFailed."""
        last = state.step if is_finished else self._config.run.steps
        version = due_version(state, self._done.version, self._config.eval, last)
        if version is None or time.monotonic() < self._next_look:
            return None
        await self._buffer.check_identity()
        try:
            weights = state.weights if version == state.published else await self._source.newest_of(version)
        except WeightsUnavailable as error:  # where versions are listed over a network
            is_gone = is_finished and isinstance(error, LearnerUnreachable)
            self._gone_since = (self._gone_since or time.monotonic()) if is_gone else None
            if self._gone_since and time.monotonic() - self._gone_since > self._config.redis.outage_s:
                self._leave_out(version, error)
                return None
            log.warning("%s; version %d is looked for again in %g s", error, version, LOOK_AGAIN_S)
            self._next_look = time.monotonic() + LOOK_AGAIN_S
            return None
        self._gone_since = None
        if weights is None:
            self._leave_out(version, "its weights are no longer there")
            return None
        is_last = version == last
        waits_for_it = is_last or self._config.eval.in_order  # else a newer one may replace it before it is loaded
        try:
            # an adapter is not all of a model: the rest is of this machine's model.path
            check = bool(self._config.learner.lora.rank) and not self._engine.loaded
            is_loaded = await self._loader.load(weights, check=check, idle=waits_for_it, is_finished=is_finished)
            return self._engine.version if is_loaded else None
        except WeightsUnavailable as error:
            if is_last:
                raise
            self._leave_out(version, error)
            return None

    def _leave_out(self, version: int, why: object) -> None:
        log.warning("version %d is not scored: %s", version, why)
        self._done.version = version
