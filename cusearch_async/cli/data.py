"""`cusearch data check FILE...` reports problems in question files, by row; `data convert` writes another file, `data
model` the model of a GGUF file as a model folder."""

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

from cusearch_async.cli.parts.arguments import add_trust, refuse_settings_of_nothing
from cusearch_async.cli.parts.terminal import plain
from cusearch_async.config import Config, load_config
from cusearch_async.data.checking import Checked, asked_in, known_of, overlap, read_all, warnings_of
from cusearch_async.data.files import refuse_ending, write_questions
from cusearch_async.data.questions import load_questions, needs_answers, origins_of
from cusearch_async.environments import Environment, NoSearch, Quoted
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.rollout import prompting
from cusearch_async.types import Question

SHOWN = 20
"""Most problems of a file that are printed."""
SAMPLES, MOST_SHOWN = 3, 2_000
"""Questions of a file that are printed with their prompts, and characters of each text."""
FILES = ".parquet, .jsonl, .json, .csv or .tsv, or hf:OWNER/NAME/FILE"


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="report problems, by row; exit with status 1 if there are any")
    check.add_argument("sources", nargs="+", metavar="FILE", help=FILES)
    fit = "also check that the questions fit into this run's prompts, with its model and template"
    check.add_argument("--config", type=Path, nargs="+", help=fit)
    overlapping = "also report questions that these held-out files contain, too"
    check.add_argument("--against", nargs="+", metavar="FILE", help=overlapping)
    add_trust(check)
    check.set_defaults(run=check_files)
    convert = actions.add_parser("convert", help="write questions in Search-R1's schema")
    convert.add_argument("sources", nargs="+", metavar="FILE", help="the same files as for check, or `atlas`")
    convert.add_argument("--output", type=Path, required=True, help="the .parquet or .jsonl file to write")
    convert.set_defaults(run=convert_files)
    model = actions.add_parser("model", help="write the model of a GGUF file as a model folder, in float32")
    model.add_argument("file", type=Path, metavar="FILE.gguf", help="llama.cpp's format, quantised or not")
    model.add_argument("folder", type=Path, help="the folder to write; model.path then names it")
    model.set_defaults(run=convert_model)


def check_files(arguments: argparse.Namespace, overrides: list[str]) -> None:
    console = Console()
    refuse_settings_of_nothing(arguments, overrides)
    frame = frame_of(arguments.config, overrides)
    against = arguments.against or ()
    compared = [
        read_all(*named, "--against", needs_answers=False) for named in zip(against, origins_of(against), strict=True)
    ]
    for one in compared:
        if one.problems:
            text = f"--against {one.path}: {_count(len(one.problems), 'problem')}, first {one.problems[0]}"
            console.print(plain(text, "red"))
    held_out = asked_in(compared)
    outcomes = [not any(one.problems for one in compared)]
    earlier: dict[str, str] = {}
    ids: set[str] = set()
    for named in zip(arguments.sources, origins_of(arguments.sources), strict=True):
        own_frame = frame.of(named[0])
        found = read_all(*named, "data check", needs_answers(own_frame.config, own_frame.label))
        outcomes.append(report(found, own_frame, held_out, earlier, console))
        earlier |= asked_in([found])
        own = {question.id for question in found.questions}
        if same := sorted(ids & own):
            remedy = "for one run give each question its own id, or each file its own data_source"
            text = f"  {_count(len(same), 'id')} of earlier files, first {same[0]!r:.80}; {remedy}"
            console.print(plain(text, "yellow"))
        ids |= own
    if frame.tokenizer is None:
        remedy = "they depend on the model and the template of a run; add --config CONFIG"
        console.print(f"lengths were not checked: {remedy}")
    if not all(outcomes):
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Frame:
    """The settings of a run that decide its prompts."""

    config: Config
    environments: Mapping[str, Environment]
    tokenizer: Any
    """The policy's; None without a config."""
    label: str
    """The environment that asks."""

    def of(self, source: str) -> Frame:
        """Of the environment that has the file `source`; of eval.environment where none has."""
        labels = (label for label in self.config.environment if source in self.config.sources_of(label))
        return replace(self, label=next(labels, self.config.evaluated_in))

    def prompt(self, question: Question) -> Quoted:
        return self.environments[self.label].checked_prompt(replace(question, environment=self.label))


def frame_of(files: Sequence[Path] | None, overrides: list[str]) -> Frame:
    """Of a run's config; without one, of the defaults. Raises: ConfigError."""
    config = load_config(files or [], overrides if files else ["--run.name", "check"])
    frame = Frame(config, config.environments(NoSearch()), None, config.evaluated_in)
    if not files:
        return frame
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers is slow)

    return replace(frame, tokenizer=load_tokenizer(config.model.location))


def report(
    found: Checked, frame: Frame, held_out: Mapping[str, str], earlier: Mapping[str, str], console: Console
) -> bool:
    """Print the contents and the problems of a file, and what `earlier` files have too. True when it has questions and
    no problems."""
    questions, problems = found.questions, [*found.problems, *overlap(found, held_out)]
    console.print(str(found.path), style="bold", markup=False, highlight=False, soft_wrap=True)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("source")
    shown.add_column("questions", justify="right")
    for category, count in Counter(question.category for question in questions).items():
        shown.add_row(plain(category), str(count))
    console.print(shown)
    show_samples(questions, frame, console)
    if frame.tokenizer is not None and questions:
        lengths, refused = lengths_of(questions, frame)
        problems += [f"{found.places[number]}: {problem}" for number, problem in refused]
        if lengths:
            mean = sum(lengths) / len(lengths)
            of_label = f" of environment.{frame.label}" if len(frame.environments) > 1 else ""
            console.print(f"prompts{of_label} have {mean:.0f} tokens in the mean, the longest {max(lengths)}")
    mean = sum(len(question.answers) for question in questions) / max(1, len(questions))
    console.print(f"{_count(len(questions), 'good row')}, {mean:.1f} answers each; {_count(len(problems), 'problem')}")
    for problem in problems[:SHOWN]:
        console.print(plain(f"  {problem}", "red"))
    if len(problems) > SHOWN:
        console.print(f"  … and {len(problems) - SHOWN} more")
    again = overlap(found, earlier)
    repeated = [f"{_count(len(again), 'question')} of earlier files, first {again[0]}"] if again else []
    for warning in warnings_of(found) + repeated:
        console.print(plain(f"  {warning}", "yellow"))
    console.print(plain(f"  {known_of(questions)}"))
    if found.has_prompts:
        replaced = f"environment.{frame.label}'s prompt replaces its instructions and system message"
        console.print(plain(f"  of the column prompt only the question is read: {replaced}"))
    if found.unread:
        console.print(plain(f"  columns that are not read: {', '.join(found.unread)}"))
    if not questions:
        console.print("  no question can be used", style="red")
    return bool(questions) and not problems


def show_samples(questions: Sequence[Question], frame: Frame, console: Console) -> None:
    """Some questions from all over the file, with their prompts and gold answers."""
    last = len(questions) - 1
    for place in sorted({round(last * part / (SAMPLES - 1)) for part in range(SAMPLES)} if questions else ()):
        question = questions[place]
        console.print(plain(question.id, "bold"))
        prompt = frame.prompt(question)
        console.print(plain(_cut(f"{prompt.before}{prompt.text}{prompt.after}".strip()), "dim"))
        console.print(plain(_cut(f"gold answers: {' | '.join(question.answers) or 'none'}")))


def lengths_of(questions: Sequence[Question], frame: Frame) -> tuple[list[int], list[tuple[int, str]]]:
    """Tokens of every prompt, and (place of the question, problem) for each that a run would refuse."""
    most = frame.config.episode.max_prompt_tokens
    lengths, refused = [], []
    for number, question in enumerate(questions):
        try:
            prompt = frame.prompt(question)
            length = len(prompting.build_prompt(frame.tokenizer, prompt, frame.config.model.template_arguments))
        except EpisodeFailed as error:
            refused.append((number, str(error)))
            continue
        lengths.append(length)
        if length > most:
            refused.append((number, f"its prompt has {length} tokens, over episode.max_prompt_tokens ({most})"))
    return lengths, refused


def convert_files(arguments: argparse.Namespace, _: list[str]) -> None:
    refuse_ending(arguments.output, "--output")
    refuse_unwritable(arguments.output, "--output")
    there = [source for source in map(Path, arguments.sources) if source.exists()]
    if arguments.output.exists() and any(map(arguments.output.samefile, there)):
        raise ConfigError(f"--output {arguments.output} is a file that is read; choose another")
    questions = load_questions(arguments.sources, "data convert", needs_answers=False)
    with writing_output(arguments.output, "--output"):
        write_questions(questions, arguments.output)
    Console().print(f"{len(questions)} questions in {arguments.output}")


def convert_model(arguments: argparse.Namespace, _: list[str]) -> None:
    from cusearch_async.gguf import convert  # noqa: PLC0415  (transformers is slow)

    parameters = convert(arguments.file, arguments.folder)
    Console().print(f"{parameters / 1e6:.1f} M parameters in {arguments.folder}", soft_wrap=True)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} … ({len(text):,} characters)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
