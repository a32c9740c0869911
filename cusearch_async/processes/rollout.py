"""The rollout worker process: one engine, many concurrent episodes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection

from cusearch_async.config import Config
from cusearch_async.data.questions import load_run_questions
from cusearch_async.environments import NoSearch
from cusearch_async.errors import BufferUnavailable
from cusearch_async.lifecycle.gpu_share import gpu_lock
from cusearch_async.lifecycle.progress import log_waiting
from cusearch_async.lifecycle.signals import ending_at_once, later, stop_on_signals
from cusearch_async.models import check_model, vocab_size
from cusearch_async.processes.engines import ask_retriever, open_runner, take_gpus
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.loop import RolloutLoop
from cusearch_async.rollout.prompting import check_lengths
from cusearch_async.rollout.start_report import Starting
from cusearch_async.rollout.weight_loader import Finish
from cusearch_async.run.identity import identity_of
from cusearch_async.transport.buffer import open_buffer
from cusearch_async.weights.transports import transport_of

log = logging.getLogger(__name__)

FINISHED = "run %s is finished; this worker ends (a learner that continues the run needs workers again)"


async def run(config: Config, name: str, cores: Collection[int]) -> bool:
    """Run the rollout worker `name` until the run is finished, or a signal arrives. Whether it is finished. Its engine,
    another process, keeps to its cores; this one then takes any of `cores`, so that episodes do not wait for
    decoding."""
    stop = stop_on_signals()
    try:
        is_finished = await _run_until(stop, config, name, cores)
    except BufferUnavailable as error:
        if not stop.is_set():
            raise
        log.info("stopped while Redis was away, so its tickets are given out again when their leases end (%s)", error)
        return False
    if is_finished:
        log.info(FINISHED, config.run.name)
    else:
        log.info("stopped; its tickets are released")
    return is_finished


async def _run_until(stop: asyncio.Event, config: Config, name: str, cores: Collection[int]) -> bool:
    """Whether the run is finished; else `stop` is set."""
    with log_waiting(log, "waiting for the questions to be read"), ending_at_once("the questions were being read"):
        questions = load_run_questions(config)
        tokenizer = check_model(config.model.location, config.episode.max_tokens)
        environments = config.environments(NoSearch())
        check_lengths(questions.all, environments, tokenizer, config.episode, config.model.template_arguments)
        identity = identity_of(config, questions.all, tokenizer)
    finish = Finish(config.run.steps)
    async with open_buffer(config, config.run.wait_s, stop, identity=identity) as buffer:
        await buffer.check_identity()
        state = await buffer.state()
    if finish.has_come(state):
        return True
    if state.is_finished:
        log.info("run %s was finished at step %d: waiting for a learner that continues it", config.run.name, state.step)
    async with (
        SearchClient.open(config.retriever, config.episode, config.questions_per_step) as search,
        transport_of(config).source() as source,
    ):
        agreed = await ask_retriever(search, config, identity, stop)
        if agreed is None:
            return False
        async with (
            later(stop, config.rollout.drain_s) as gives_up,  # Redis may be away while it drains
            open_buffer(config, config.redis.outage_s, gives_up, vocab_size(config.model.location), agreed) as buffer,
        ):
            await buffer.check_identity()
            with Starting(config, name, agreed).reporting() as starting:
                starting.does("waiting for its GPUs")
                lock = await take_gpus(gpu_lock(config, "engine"), stop)
                if stop.is_set():
                    return False
                starting.does("loading vLLM")
                opened = open_runner(config, config.model.location, tokenizer, search, lock, give_back=starting.end)
                with opened as (engine, runner):
                    os.sched_setaffinity(0, cores)
                    log.info("ready")
                    starting.does("waiting for the first weights")
                    loop = RolloutLoop(name, config, buffer, engine, source, runner, search, questions, finish)
                    await loop.run(stop, starting.is_ready)
    return loop.has_finished
