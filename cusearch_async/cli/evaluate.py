"""`cusearch eval CONFIG`: score a policy on held-out questions, greedily, through the agent loop."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async import host
from cusearch_async.config import Config, load_config


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


async def score(config: Config, model: str) -> dict[str, dict[str, float]]:
    """Greedy scores by category; needs the config's retriever."""
    # vLLM and torch are loaded only by the commands that use them.
    from cusearch_async.data import load_eval_questions  # noqa: PLC0415
    from cusearch_async.models import check_context, load_tokenizer  # noqa: PLC0415
    from cusearch_async.rollout.engine import Engine  # noqa: PLC0415
    from cusearch_async.rollout.episode import Player  # noqa: PLC0415
    from cusearch_async.rollout.retrieval import SearchClient  # noqa: PLC0415
    from cusearch_async.training.evaluation import as_json, evaluate, summarize  # noqa: PLC0415

    questions = load_eval_questions(config.data.source, config.eval.questions_per_category)
    check_context(model, config.episode.max_tokens)
    tokenizer = load_tokenizer(model)
    async with SearchClient.session(config.retriever) as session:
        search = SearchClient(session, config.retriever, config.episode.topk)
        await search.wait_until_answering(config.run.wait_s)
        engine = Engine.start(model, tokenizer, config)
        try:
            player = Player(engine, search, tokenizer, config.episode, config.run.seed)
            played = await evaluate(player, questions, temperature=0.0, at_once=config.rollout.max_episodes)
        finally:
            engine.close()
    return as_json(summarize(played, questions))


def table(scores: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="held-out questions, greedy")
    shown.add_column("category")
    for name in ("n", "EM", "F1", "depth", "answered", "format"):
        shown.add_column(name, justify="right")
    for category, s in scores.items():
        numbers = (s["em"], s["f1"], s["depth"], s["answered"], s["format_valid"])
        shown.add_row(category, str(int(s["count"])), *(f"{number:.2f}" for number in numbers))
    return shown
