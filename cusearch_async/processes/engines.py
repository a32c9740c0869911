"""Opens the engine and the runner of episodes, for rollout workers, the evaluator and `cusearch eval`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cusearch_async.agents.episode import AgentRunner
from cusearch_async.config import Config
from cusearch_async.environments import NoSearch, Search
from cusearch_async.lifecycle.gpu_share import GpuLock
from cusearch_async.lifecycle.signals import ending_at_once, unless_stopped
from cusearch_async.models import check_model, read_config, refuse_more_layers
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.rollout.prompting import check_template
from cusearch_async.run.identity import Identity

LONGEST_FOLDER = 50
"""Bytes: with its two names below it a socket has at most 107."""

if TYPE_CHECKING:
    from cusearch_async.rollout.engine import Engine


def check_policy(config: Config, model: str, key: str = "model.path") -> Any:
    """Check that `model` can run episodes, before anything large is loaded; returns its tokenizer.

    Raises: ConfigError, which names the setting `key`."""
    tokenizer = check_model(model, config.episode.max_tokens, key)
    check_template(config.environments(NoSearch()), tokenizer, config.model.template_arguments)
    layers = getattr(read_config(model, key), "num_hidden_layers", None)
    refuse_more_layers(config.learner.trained_layers, layers, model)
    return tokenizer


async def ask_retriever(
    search: SearchClient, config: Config, identity: Identity, stop: asyncio.Event
) -> Identity | None:
    """The process's identity with the corpus of its retriever, as soon as that answers, if the run has one. None when
    `stop` is set first.

    Raises: RetrievalUnavailable after run.wait_s, SearchRefused."""
    if not config.searching:
        return identity
    waiting = asyncio.ensure_future(search.wait_until_answering(config.run.wait_s))
    if not await unless_stopped(waiting, stop):
        return None
    waiting.result()
    return identity.with_retriever(search.serves)


async def take_gpus(lock: GpuLock | None, stop: asyncio.Event) -> GpuLock | None:
    """Wait, in a colocated run, until an engine may have the GPUs, or until `stop` is set. Raises: Stalled."""
    if lock is not None:
        taking = asyncio.ensure_future(lock.take())
        if await unless_stopped(taking, stop):
            taking.result()
    return lock


@contextmanager
def open_runner(
    config: Config,
    model: str,
    tokenizer: Any,
    search: Search,
    lock: GpuLock | None = None,
    is_evaluator: bool = False,
    give_back: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Engine, AgentRunner]]:
    """An engine that has loaded `model`, and a runner that uses it in the config's environments. `lock` is taken, if
    the run is colocated. A process that is stopped while vLLM loads calls `give_back`. Raises: EngineDied."""
    with _folder_of_sockets() as sockets:

        def end() -> None:
            sockets.cleanup()
            give_back()

        def make_runner(policy: Any) -> AgentRunner:
            environments, arguments = config.environments(search), config.model.template_arguments
            seed = config.run.seed
            return AgentRunner(policy, environments, tokenizer, config.episode, seed, arguments, is_evaluator)

        with ending_at_once("vLLM was being loaded", end):
            from cusearch_async.rollout.engine import Engine  # noqa: PLC0415  (vLLM takes seconds to import)

            make_runner(None)  # what it refuses is told before an engine is loaded
            engine = Engine.start(model, tokenizer, config, lock)
        try:
            yield engine, make_runner(engine)
        finally:
            engine.close()


@contextmanager
def _folder_of_sockets() -> Iterator[tempfile.TemporaryDirectory[str]]:
    """vLLM makes sockets in the folder of temporary files, whose names may be too long there, and leaves them."""
    given = os.environ.get("VLLM_RPC_BASE_PATH")
    folder = given or tempfile.gettempdir()
    fits = len(os.fsencode(folder)) <= LONGEST_FOLDER
    short = folder if fits else "/tmp"  # noqa: S108  (a new folder in it, for this user)
    sockets = tempfile.TemporaryDirectory(prefix="vllm-", dir=short, ignore_cleanup_errors=True)
    with sockets as own:
        os.environ["VLLM_RPC_BASE_PATH"] = own
        try:
            yield sockets
        finally:
            del os.environ["VLLM_RPC_BASE_PATH"]
            if given:
                os.environ["VLLM_RPC_BASE_PATH"] = given
