"""`cusearch eval CONFIG`: scores a policy on held-out questions through the agent loop, greedy by default.

With --output NAME.json it writes the scores to that file, a table to NAME.md, and readable episodes to NAME.html.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli import trace
from cusearch_async.cli.playing import play_with
from cusearch_async.cli.terminal import plain
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.files import refuse_unwritable
from cusearch_async.lifecycle.cuda import refuse_idle_cuda
from cusearch_async.lifecycle.placement import configure_process

if TYPE_CHECKING:
    from cusearch_async.evaluation.scoring import Scores
    from cusearch_async.types import Question, Trajectory

COLUMNS = {
    "em": "EM",
    "sub_em": "sub-EM",
    "f1": "F1",
    "depth": "depth",
    "answered": "answered",
    "format_valid": "format",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    parser.add_argument("--checkpoint", help="model folder or Hub id to score; default: model.path of the config")
    parser.add_argument("--suite", help="benchmarks or question files, separated by commas; default: eval.suite")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0, the default, is greedy"
    )
    parser.add_argument(
        "--output", type=Path, help="write the scores to this .json file, and a .md and a .html next to it"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if arguments.suite:
        overrides = [*overrides, "--eval.suite", json.dumps(arguments.suite.split(","))]
    config = load_config(arguments.config, overrides)
    if arguments.output:
        prepare(arguments.output)
    configure_process([])
    refuse_idle_cuda()
    model = arguments.checkpoint or config.model.location
    from cusearch_async.models import check_model  # noqa: PLC0415  (transformers only where it is needed)

    check_model(model, config.episode.max_tokens, "--checkpoint" if arguments.checkpoint else "model.path")
    questions, episodes = asyncio.run(play(config, model, arguments.temperature))
    from cusearch_async.evaluation.scoring import summarize  # noqa: PLC0415  (loaded by the play above)

    scores = summarize(episodes, questions)
    how = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    Console().print(table(scores, f"held-out questions, {how}"))
    if arguments.output:
        write(arguments.output, scores, episodes, model, f"{model}, {how}")


async def play(config: Config, model: str, temperature: float) -> tuple[list[Question], list[Trajectory]]:
    """One episode per held-out question; needs the config's retriever."""
    # vLLM and torch are loaded only by the commands that use them.
    from cusearch_async.data.questions import load_eval_questions  # noqa: PLC0415
    from cusearch_async.retrieval.client import SearchClient  # noqa: PLC0415

    questions = load_eval_questions(config)
    async with SearchClient.open(config) as search:
        if config.uses_retriever:
            await search.wait_until_answering(config.run.wait_s)
        (episodes,) = await play_with(search, config, model, questions, [temperature])
    return questions, episodes


def prepare(output: Path) -> None:
    """Check before the episodes are played that the output can be written. Raises: ConfigError."""
    if output.suffix != ".json":
        raise ConfigError(f"--output must be a .json file, got {output}; a .md and a .html are written next to it")
    refuse_unwritable(output, "--output")


def write(output: Path, scores: Scores, episodes: Sequence[Trajectory], model: str, title: str) -> None:
    """The scores as JSON, as a table in Markdown, and episodes as a page."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    output.with_suffix(".md").write_text(markdown(scores, title), encoding="utf-8")
    page = trace.page(episodes, load_tokenizer(model), [["category", "n", *COLUMNS.values()], *_cells(scores)], title)
    output.with_suffix(".html").write_text(page, encoding="utf-8")


def table(scores: Scores, title: str) -> Table:
    """A table of means, with the 95 % interval of EM in brackets (--output has the intervals of all of them)."""
    shown = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("category", overflow="fold")
    for name in ("n", *COLUMNS.values()):
        shown.add_column(name, justify="right", no_wrap=True)
    for category, s in scores.items():
        low, high = s["em_interval"]
        others = (f"{s[name]:.2f}" for name in COLUMNS if name != "em")
        em = f"{s['em']:.2f} [{low:.2f}, {high:.2f}]"
        style = "bold" if category == "all" else None
        shown.add_row(plain(Path(category).name), str(s["count"]), em, *others, style=style)
    return shown


def markdown(scores: Scores, title: str) -> str:
    header = ["category", "n", *COLUMNS.values()]
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *_cells(scores)]
    lines = ("| " + " | ".join(row) + " |" for row in rows)
    return f"# {title}\n\n" + "\n".join(lines) + "\n\nMeans, with their 95 % bootstrap intervals in brackets.\n"


def _cells(scores: Scores) -> list[list[str]]:
    """A row of texts per category."""
    return [[category, str(s["count"]), *(_figure(s, name) for name in COLUMNS)] for category, s in scores.items()]


def _figure(score: dict[str, Any], name: str) -> str:
    low, high = score[f"{name}_interval"]
    return f"{score[name]:.3f} [{low:.3f}, {high:.3f}]"
