"""Runs episodes with a policy, for `eval`, `ask`, `align` and `atlas check`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cusearch_async.config import Config, LoraConfig
from cusearch_async.environments import Search
from cusearch_async.evaluation.probing import Pass, PassResult, ProbedSearch, run_passes
from cusearch_async.retrieval.client import SearchClient


@asynccontextmanager
async def answering_search(config: Config) -> AsyncIterator[SearchClient]:
    """The client of the run's retriever, if it has one, which answers already. Raises: as `SearchClient.search`."""
    async with SearchClient.open(config.retriever, config.episode, config.questions_per_step) as search:
        if config.searching:
            await search.wait_until_answering(config.run.wait_s)
        yield search


async def run_passes_with(search: Search, config: Config, model: str, passes: Sequence[Pass]) -> list[PassResult]:
    """The results of the passes, with one engine."""
    from cusearch_async.processes.engines import check_policy, open_runner  # noqa: PLC0415  (vLLM and torch)

    tokenizer = check_policy(config, model)
    probed = ProbedSearch(search)
    learner = config.learner.model_copy(update={"lora": LoraConfig()})  # what is loaded has its adapter merged
    whole = config.model_copy(update={"learner": learner})
    with open_runner(whole, model, tokenizer, probed) as (_, runner):
        try:
            return await run_passes(runner, probed, passes, config.rollout.max_episodes)
        finally:
            await runner.close()  # another policy's runner listens at the same address for programs elsewhere
