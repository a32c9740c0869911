"""Plays episodes with a policy, for `eval` and `atlas check`. vLLM and torch are loaded only when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cusearch_async.config import Config

if TYPE_CHECKING:
    from cusearch_async.environments import Search
    from cusearch_async.evaluation.probing import Pass, PassResult


async def run_passes_with(search: Search, config: Config, model: str, passes: Sequence[Pass]) -> list[PassResult]:
    """What was played in each pass, with one engine."""
    from cusearch_async.evaluation.probing import ProbedSearch, run_passes  # noqa: PLC0415
    from cusearch_async.processes.engines import check_policy, open_runner  # noqa: PLC0415

    tokenizer = check_policy(config, model)
    probed = ProbedSearch(search)
    with open_runner(config, model, tokenizer, probed) as (_, runner):
        return await run_passes(runner, probed, passes, config.rollout.max_episodes)
