"""`cusearch eval CONFIG`: score a policy on held-out questions, greedily, through the agent loop."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cusearch_async import host
from cusearch_async.config import Config, load_config

if TYPE_CHECKING:
    from cusearch_async.rollout.episode import Search


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="score a policy on held-out questions")
    parser.add_argument("config", type=Path)
    parser.add_argument("--checkpoint", help="model folder or Hub id to score; default: model.path of the config")
    parser.add_argument("--output", type=Path, help="write the scores as JSON to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    host.settle([])
    scores = asyncio.run(score(config, arguments.checkpoint or config.model.location))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    Console().print(table(scores))


Scores = dict[str, dict[str, float]]
"""By category of question: figures by name."""


async def score(config: Config, model: str) -> Scores:
    """Greedy scores; needs the config's retriever."""
    from cusearch_async.rollout.retrieval import SearchClient  # noqa: PLC0415  (loaded only where it is used)

    async with SearchClient.session(config.retriever) as session:
        search = SearchClient(session, config.retriever, config.episode.topk)
        await search.wait_until_answering(config.run.wait_s)
        (scores,) = await score_with(search, config, model, config.eval.questions_per_category, [0.0])
    return scores


async def score_with(
    search: Search, config: Config, model: str, per_category: int, temperatures: list[float]
) -> list[Scores]:
    """Scores on the held-out questions, once at each temperature, with one engine."""
    # vLLM and torch are loaded only by the commands that use them.
    from cusearch_async.data import load_eval_questions  # noqa: PLC0415
    from cusearch_async.models import check_model  # noqa: PLC0415
    from cusearch_async.rollout.engine import Engine  # noqa: PLC0415
    from cusearch_async.rollout.episode import Player  # noqa: PLC0415
    from cusearch_async.training.evaluation import as_json, evaluate, summarize  # noqa: PLC0415

    questions = load_eval_questions(config.data.source, per_category)
    tokenizer = check_model(model, config.episode.max_tokens)
    engine = Engine.start(model, tokenizer, config)
    try:
        player = Player(engine, search, tokenizer, config.episode, config.run.seed)
        played = [await evaluate(player, questions, t, config.rollout.max_episodes) for t in temperatures]
    finally:
        engine.close()
    return [as_json(summarize(episodes, questions)) for episodes in played]


def table(scores: Scores) -> Table:
    shown = Table(title="held-out questions, greedy")
    shown.add_column("category")
    for name in ("n", "EM", "F1", "depth", "answered", "format"):
        shown.add_column(name, justify="right")
    for category, s in scores.items():
        numbers = (s["em"], s["f1"], s["depth"], s["answered"], s["format_valid"])
        shown.add_row(category, str(int(s["count"])), *(f"{number:.2f}" for number in numbers))
    return shown
