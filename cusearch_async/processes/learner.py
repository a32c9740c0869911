"""One rank of the learner. Rank 0 continues from the newest checkpoint and trains; the other ranks follow it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cusearch_async.config import Config, of_toml
from cusearch_async.data.questions import load_run_questions
from cusearch_async.learner.learner import DeepSpeedLearner
from cusearch_async.learner.ranks import Ranks
from cusearch_async.lifecycle.children import die_with_parent
from cusearch_async.lifecycle.gpu_share import gpu_lock
from cusearch_async.lifecycle.signals import stop_signals
from cusearch_async.models import check_model
from cusearch_async.processes.engines import ask_retriever
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.run import folder as run_folder
from cusearch_async.run.identity import Identity, identity_of
from cusearch_async.training.checkpoint_objects import CheckpointObjects
from cusearch_async.training.takeover import Leader
from cusearch_async.transport.buffer import open_buffer


def run(config: Config, accept_changes: bool = False) -> bool:
    """Run one rank of the learner until the end of the run, or a signal; whether the run is finished. With
    `accept_changes`, settings that change the run's meaning may differ from the last start."""
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    ranks = Ranks(config.learner.collective_timeout_s)
    with ranks.meeting():
        if ranks.is_leader:
            return _lead(config, ranks, tokenizer, accept_changes)
        return follow(ranks)


def _lead(config: Config, ranks: Ranks, tokenizer: Any, accept_changes: bool) -> bool:
    lock = gpu_lock(config, "learner")
    if lock is not None:
        asyncio.run(lock.take())
    questions = load_run_questions(config)
    objects = CheckpointObjects.of(config)
    if objects is not None:
        asyncio.run(objects.restore())
    for folder in config.folders:
        run_folder.mark(folder, config.run.name)
    own = identity_of(config, questions.all, tokenizer)
    with run_folder.hold_as_learner(config.folder):
        identity = asyncio.run(_with_retriever(own, config, accept_changes))
        leader = Leader(open_buffer, ranks, questions, identity, config, accept_changes, lock)
        return leader.lead(DeepSpeedLearner)


async def _with_retriever(own: Identity, config: Config, accept_changes: bool) -> Identity:
    """`own` with the corpus of the run's retriever. A learner of another run is refused before it waits for that."""
    async with open_buffer(config, config.run.wait_s, identity=own) as buffer:
        await buffer.check_identity(accept_changes)
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as search:
        return await ask_retriever(search, config, own, asyncio.Event()) or own


def follow(ranks: Ranks, changed: Callable[[Config], Config] = lambda config: config) -> bool:
    """Run a rank other than 0, with the settings of rank 0, `changed` as there, until rank 0 stops it; whether the run
    is finished. A signal, which may be for this node alone, is handed on to rank 0, which saves before it stops."""
    die_with_parent(signal.SIGKILL)
    for number in stop_signals():
        signal.signal(number, lambda *_: ranks.ask_to_stop())
    # Those that were read on this node may be older, or have other overrides: then ranks would train differently.
    config = changed(of_toml(ranks.listen().decode()))
    learner = DeepSpeedLearner(config, ranks)
    newest = ranks.listen().decode()
    if newest:
        learner.load(Path(newest))
    is_finished = learner.follow()
    ranks.close()
    return is_finished
