"""`cusearch eval CONFIG`: scores a policy on held-out questions through the agent loop, greedy by default.

--samples, --probe and --against show where its answers come from, and whether another policy is better. With --output
NAME.json it writes all to that file, and readable episodes to NAME.html."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.arguments import add_config, at_least, parsed
from cusearch_async.cli.parts.passes import answering_search, run_passes_with
from cusearch_async.cli.parts.terminal import plain
from cusearch_async.config import Config, JudgeConfig, load_config
from cusearch_async.dashboard.episodes import episodes_of
from cusearch_async.dashboard.page import page
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.errors import ConfigError, JudgeFailed
from cusearch_async.evaluation.conditions import as_line, conditions, full_name, search_engine, suite_of
from cusearch_async.evaluation.probing import Mode, Pass, PassResult
from cusearch_async.evaluation.scoring import Scores, summarize
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.lifecycle.cuda import refuse_idle_cuda
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.signals import ending
from cusearch_async.overrides import settings_in
from cusearch_async.types import Question, Trajectory

if TYPE_CHECKING:  # they need packages of an extra
    from cusearch_async.evaluation.findings import Paired, Samples
    from cusearch_async.evaluation.judge import Verdicts

RunPasses = Callable[[str, Sequence[Pass]], Awaitable[list[PassResult]]]
"""Runs passes with the model of a path."""
COLUMNS = {
    "em": "EM",
    "sub_em": "sub-EM",
    "f1": "F1",
    "depth": "depth",
    "answered": "answered",
    "format_valid": "format",
}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, looks=False)
    parser.add_argument("--checkpoint", help="model folder or Hub id to score; default: model.path of the config")
    parser.add_argument("--suite", help="benchmarks or question files, separated by commas; default: eval.suite")
    temperature = parsed(float, lambda value: value == 0 or 0.01 <= value <= 2, "0, or a number from 0.01 to 2")
    text = "sampling temperature; 0, the default, is greedy"
    parser.add_argument("--temperature", type=temperature, default=0.0, help=text)
    text = "also sample so many answers per question (pass@k, agreement)"
    parser.add_argument("--samples", type=at_least(0), default=0, help=text)
    parser.add_argument("--probe", action="store_true", help="also score with gold passages blocked, and closed-book")
    parser.add_argument("--against", help="another model to score on the same questions, and to compare with")
    parser.add_argument("--output", type=Path, help="write the scores to this .json file, and a .html next to it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError; JudgeFailed, after all else is written when the judge fails after the episodes."""
    if arguments.suite:
        if "--eval.suite" in dict(settings_in(overrides)):
            raise ConfigError("--suite and --eval.suite are the same setting; give one of them")
        overrides = [*overrides, "--eval.suite", json.dumps([name.strip() for name in arguments.suite.split(",")])]
    config = load_config(arguments.config, overrides)
    output: Path | None = arguments.output
    if output:
        refuse_unwritable(output, "--output", ".json")
    configure_process([])
    refuse_idle_cuda()
    model = arguments.checkpoint or config.model.location
    from cusearch_async.processes.engines import check_policy  # noqa: PLC0415  (transformers only where it is needed)

    check_policy(config, model, "--checkpoint" if arguments.checkpoint else "model.path")
    if arguments.against:
        check_policy(config, arguments.against, "--against")
    report = asyncio.run(ending(scored(config, model, arguments)))
    console = Console()
    console.print(table(report.scores, report.title))
    for line in report.lines():
        console.print(plain(line), soft_wrap=True)
    if output:
        write(output, report, model)
    if report.judge_failed:
        raise JudgeFailed(report.judge_failed)


@dataclass(frozen=True, slots=True)
class Report:
    """The findings about a policy."""

    title: str
    scores: Scores
    episodes: Sequence[Trajectory]
    conditions: dict[str, str | int | float]
    """See evaluation/conditions.py."""
    recall: float | None
    """Mean share of the evidence that was found; None where no question names its evidence, or nothing is asked."""
    samples: Samples | None
    probes: dict[str, Scores]
    """Scores of the other modes."""
    found: list[str]
    """The result of the probes, in words."""
    against: Paired | None
    against_name: str
    verdicts: Verdicts | None
    judge_failed: str
    """Why there are no verdicts of the judge; empty if it was not asked, or did not fail."""

    def lines(self) -> list[str]:
        lines = [as_line(self.conditions)]
        if self.recall is not None:
            lines.append(f"retrieval recall {self.recall:.3f} of the evidence")
        for mode, scores in self.probes.items():
            lines.append(f"{mode}: EM {_figure(scores['all'], 'em')}, depth {scores['all']['depth']:.2f}")
        if self.samples is not None:
            lines.append(_of_samples(self.samples))
        if self.verdicts is not None:
            name, unreadable = self.verdicts.model or "the judge", self.verdicts.unreadable
            lines.append(
                f"judged by {name}: {self.verdicts.right:.3f} right; exact match agrees on "
                f"{self.verdicts.agrees_with_em:.3f}"
                + (f"; no verdict on {unreadable:.3f}, where it answers neither yes nor no" if unreadable else "")
            )
        if self.judge_failed:
            lines.append(f"no verdicts: {self.judge_failed}")
        if self.against is not None:
            lines.append(self.against.less(self.against_name))
        return lines + self.found

    def as_json(self) -> dict[str, Any]:
        parts = {"samples": self.samples, "against": self.against, "judge": self.verdicts}
        kept = {name: asdict(part) for name, part in parts.items() if part is not None}
        if self.judge_failed:
            kept["judge"] = {"failed": self.judge_failed}
        whole = {"scores": self.scores, "conditions": self.conditions, "recall": self.recall, "probes": self.probes}
        return whole | kept | {"findings": self.found, "questions": [_as_row(one) for one in self.episodes]}


def _as_row(episode: Trajectory) -> dict[str, Any]:
    names = ("question_id", "em", "f1", "reward", "depth", "prediction")
    return {name: getattr(episode, name) for name in names}


def _of_samples(samples: Samples) -> str:
    k = samples.k
    several = "" if k == 1 else f", pass@{k} {samples.pass_at_k:.3f}"
    agreement = "" if samples.agreement is None else f", agreement {samples.agreement:.3f}"
    noun = "sample" if k == 1 else "samples"
    return f"{k} {noun}: pass@1 {samples.pass_at_1:.3f}{several}{agreement}, abstained {samples.abstain_share:.3f}"


async def scored(config: Config, model: str, arguments: argparse.Namespace) -> Report:
    """Run with the config's retriever, and summarise. Raises: ConfigError; JudgeFailed before any episode."""
    questions = load_eval_questions(config)
    if arguments.probe and not any(question.evidence for question in questions):
        raise ConfigError("--probe needs questions that name their evidence, and none of these does")
    if arguments.probe and config.evaluated_in not in config.searching:
        raise ConfigError(
            f"--probe compares scores with and without the retriever, and environment.{config.evaluated_in} asks none"
        )
    if config.eval.judge.url:
        from cusearch_async.evaluation.judge import try_judge  # noqa: PLC0415  (of an extra)

        await try_judge(config.eval.judge)
    async with answering_search(config) as search:
        engine = search_engine(config, search.serves)
        return await evaluated(config, model, arguments, questions, engine, partial(run_passes_with, search, config))


async def evaluated(
    config: Config,
    model: str,
    arguments: argparse.Namespace,
    questions: Sequence[Question],
    engine: str,
    run_passes: RunPasses,
) -> Report:
    from cusearch_async.evaluation import findings  # noqa: PLC0415  (of an extra)

    modes: tuple[Mode, ...] = ("full", "closed", "blocked") if arguments.probe else ("full",)
    passes = [Pass(questions, arguments.temperature, mode) for mode in modes]
    sampled = max(arguments.samples, 4 if arguments.probe else 0)
    results = await run_passes(model, [*passes, *[Pass(questions, config.episode.temperature)] * sampled])
    of_mode = dict(zip(modes, results[: len(modes)], strict=True))
    samples, full = results[len(modes) :], of_mode["full"]
    other = await run_passes(arguments.against, passes[:1]) if arguments.against else []
    verdicts, judge_failed = await _judged(config.eval.judge, full.episodes)
    known = [share for share in full.recall if share is not None] if config.evaluated_in in config.searching else []
    how = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    named: dict[str, str | int | float] = {**conditions(config, model, questions, how, engine)}
    metric = config.environment[config.evaluated_in].scoring
    if sampled:
        named["samples_temperature"] = config.episode.temperature
    if arguments.against:
        named["against"] = full_name(arguments.against)
    found = []
    if arguments.probe:
        found = findings.findings(questions, full, of_mode["closed"], of_mode["blocked"], samples, metric)
    return Report(
        title=f"{full_name(model)}: {len(questions)} questions of {suite_of(config)}, {how}",
        scores=summarize(full.episodes, questions, metric),
        episodes=full.episodes,
        conditions=named,
        recall=sum(known) / len(known) if known else None,
        samples=findings.summarize_samples([one.episodes for one in samples], metric) if samples else None,
        probes={mode: summarize(of_mode[mode].episodes, questions, metric) for mode in modes[1:]},
        found=found,
        against=findings.compare_paired(full.em, other[0].em) if other else None,
        against_name=full_name(arguments.against or ""),
        verdicts=verdicts,
        judge_failed=judge_failed,
    )


async def _judged(settings: JudgeConfig, episodes: Sequence[Trajectory]) -> tuple[Verdicts | None, str]:
    """The judge's verdicts, or why there are none: the episodes are not lost with them."""
    if not settings.url:
        return None, ""
    from cusearch_async.evaluation import judge  # noqa: PLC0415  (of an extra)

    failed = ""
    try:
        return await judge.judge(settings, episodes), ""
    except* JudgeFailed as group:
        failed = str(group.exceptions[0])
    return None, failed


def write(output: Path, report: Report, model: str) -> None:
    """All as JSON, and episodes as a page."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415  (transformers only where it is needed)

    cells = [[name, str(s["count"]), *(_figure(s, column) for column in COLUMNS)] for name, s in report.scores.items()]
    rows = [["category", "n", *COLUMNS.values()], *cells]
    episodes = episodes_of(report.episodes, load_tokenizer(model))
    text = page(report.title, {"screens": ["episodes"], "table": rows, "groups": episodes})
    with writing_output(output, "--output"):
        output.write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")
        output.with_suffix(".html").write_text(text, encoding="utf-8")


def table(scores: Scores, title: str) -> Table:
    """A table of means, with the 95 % interval of EM in brackets (--output has the intervals of all of them)."""
    shown = Table(title=plain(title), box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("category", overflow="fold")
    for name in ("n", *COLUMNS.values()):
        shown.add_column(name, justify="right", no_wrap=True)
    for category, s in scores.items():
        low, high = s["em_interval"]
        others = (f"{s[name]:.2f}" for name in COLUMNS if name != "em")
        em = f"{s['em']:.2f} [{low:.2f}, {high:.2f}]"
        style = "bold" if category == "all" else None
        shown.add_row(plain(category), str(s["count"]), em, *others, style=style)
    return shown


def _figure(score: dict[str, Any], name: str) -> str:
    low, high = score[f"{name}_interval"]
    return f"{score[name]:.3f} [{low:.3f}, {high:.3f}]"
