"""`cusearch data check FILE...` reports problems in question files, by row; `data convert` writes parquet."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.terminal import plain
from cusearch_async.cli.trust import add_trust
from cusearch_async.config import Config, load_config
from cusearch_async.environments import NoSearch
from cusearch_async.errors import ConfigError
from cusearch_async.files import refuse_unwritable
from cusearch_async.types import Question

SHOWN = 20
"""Most problems of a file that are printed."""


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="report problems, by row; exit with status 1 if there are any")
    check.add_argument("sources", nargs="+", metavar="FILE", help=".parquet, .jsonl, or hf:OWNER/NAME/FILE")
    check.add_argument(
        "--config",
        type=Path,
        nargs="+",
        help="also check that the questions fit into this run's prompts, with its model and template",
    )
    add_trust(check)
    check.set_defaults(run=check_files)
    convert = actions.add_parser("convert", help="write questions as parquet in Search-R1's schema")
    convert.add_argument("sources", nargs="+", metavar="FILE", help="the same files as for check, or `atlas`")
    convert.add_argument("--output", type=Path, required=True, help="the .parquet file to write")
    convert.set_defaults(run=convert_files)


def check_files(arguments: argparse.Namespace, overrides: list[str]) -> None:
    console = Console()
    limits = limits_of(arguments.config, overrides) if arguments.config else None
    outcomes = [report(source, limits, console) for source in arguments.sources]
    if limits is None:
        console.print(
            "lengths were not checked: they depend on the model and the template of a run; add --config CONFIG"
        )
    if not all(outcomes):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Limits:
    """The config that limits the length of prompts, and the tokenizer that measures them."""

    tokenizer: Any
    config: Config


def limits_of(files: Sequence[Path], overrides: list[str]) -> Limits:
    """Raises: ConfigError."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers is slow)

    config = load_config(files, overrides)
    return Limits(load_tokenizer(config.model.location), config)


def report(source: str, limits: Limits | None, console: Console) -> bool:
    """Print the contents and the problems of a file. True when it has questions and no problems."""
    from cusearch_async.data.rows import can_be_answered, locate, parse_row, read_rows  # noqa: PLC0415  (pyarrow is slow)

    path = locate(source, "data check")
    problems: list[str] = []
    ids: Counter[str] = Counter()
    categories: Counter[str] = Counter()
    unanswerable: list[str] = []
    places: dict[str, str] = {}
    questions: list[Question] = []
    answers = 0
    for number, row in enumerate(read_rows(path, "data check")):
        try:
            question = parse_row(row, path.stem, number)
        except ConfigError as error:
            problems.append(str(error).removeprefix(f"{path}, "))
            continue
        place = row.where.removeprefix(f"{path}, ")
        ids[question.id] += 1
        questions.append(question)
        places.setdefault(question.id, place)
        categories[question.category] += 1
        answers += len(question.answers)
        if not can_be_answered(question):
            unanswerable.append(f"{place}: {question.answers[0]!r:.40}")
        if ids[question.id] > 1:
            problems.append(f"{place}: the id {question.id!r} was used before")
    if limits is not None:
        problems += too_long(questions, places, limits)
    console.print(str(path), style="bold", markup=False, highlight=False, soft_wrap=True)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("source")
    shown.add_column("questions", justify="right")
    for category, count in categories.items():
        shown.add_row(plain(category), str(count))
    console.print(shown)
    good = ids.total()
    mean = answers / good if good else 0
    console.print(f"{_count(good, 'good row')}, {mean:.1f} answers each; {_count(len(problems), 'problem')}")
    for problem in problems[:SHOWN]:
        console.print(plain(f"  {problem}", "red"))
    if len(problems) > SHOWN:
        console.print(f"  … and {len(problems) - SHOWN} more")
    if unanswerable:
        few = "; ".join(unanswerable[:3]) + "; …" * (len(unanswerable) > 3)
        console.print(
            f"  {len(unanswerable)} cannot be answered right, because scoring removes articles and punctuation ({few})",
            style="yellow",
            markup=False,
            highlight=False,
        )
    if not good:
        console.print("  no question can be used", style="red")
    return bool(good) and not problems


def too_long(questions: list[Question], places: Mapping[str, str], limits: Limits) -> list[str]:
    """One line for each question that a run would refuse, with its place in the file."""
    from cusearch_async.rollout.prompting import overlong  # noqa: PLC0415

    config = limits.config
    environments = config.environments(NoSearch())
    most = config.episode.max_prompt_tokens
    asked = [replace(question, environment=config.evaluated_in) for question in questions]
    return [
        f"{places[question.id]}: its prompt has {length} tokens, over episode.max_prompt_tokens ({most})"
        for question, length in overlong(asked, environments, limits.tokenizer, config.episode)
    ]


def convert_files(arguments: argparse.Namespace, _: list[str]) -> None:
    from cusearch_async.data.questions import load_questions  # noqa: PLC0415
    from cusearch_async.data.rows import write_parquet  # noqa: PLC0415

    refuse_unwritable(arguments.output, "--output")
    questions = load_questions(arguments.sources)
    write_parquet(questions, arguments.output)
    Console().print(f"{len(questions)} questions in {arguments.output}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
