"""Playing episodes with a policy, for `eval` and `atlas check`. vLLM and torch are loaded only when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cusearch_async.config import Config

if TYPE_CHECKING:
    from cusearch_async.rollout.episode import Search
    from cusearch_async.types import Question, Trajectory


async def play_with(
    search: Search, config: Config, model: str, questions: Sequence[Question], temperatures: list[float]
) -> list[list[Trajectory]]:
    """One episode per question at each temperature, with one engine."""
    from cusearch_async.models import check_model  # noqa: PLC0415
    from cusearch_async.rollout.engine import Engine  # noqa: PLC0415
    from cusearch_async.rollout.episode import Player  # noqa: PLC0415
    from cusearch_async.training.evaluation import evaluate  # noqa: PLC0415

    tokenizer = check_model(model, config.episode.max_tokens)
    engine = Engine.start(model, tokenizer, config)
    try:
        player = Player(engine, search, tokenizer, config.episode, config.run.seed)
        return [await evaluate(player, questions, t, config.rollout.max_episodes) for t in temperatures]
    finally:
        engine.close()
