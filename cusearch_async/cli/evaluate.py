"""`cusearch eval CONFIG`: scores a policy on held-out questions through the agent loop, greedy by default.

--samples, --probe and --against say where its answers come from, and whether another policy is better. With --output
NAME.json it writes all to that file, tables to NAME.md, and readable episodes to NAME.html.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    from cusearch_async.evaluation.judge import Verdicts
    from cusearch_async.evaluation.probing import Mode, Paired, Samples
    from cusearch_async.evaluation.scoring import Scores
    from cusearch_async.types import Trajectory

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
    parser.add_argument("--samples", type=int, default=0, help="also so many samples per question: pass@k, agreement")
    parser.add_argument("--probe", action="store_true", help="also without the evidence, and without any search engine")
    parser.add_argument("--against", help="another model to score on the same questions, and to compare with")
    parser.add_argument(
        "--output", type=Path, help="write the scores to this .json file, and a .md and a .html next to it"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    if arguments.suite:
        overrides = [*overrides, "--eval.suite", json.dumps(arguments.suite.split(","))]
    config = load_config(arguments.config, overrides)
    if arguments.samples < 0:
        raise ConfigError(f"--samples must be >= 0, got {arguments.samples}")
    if arguments.output:
        prepare(arguments.output)
    configure_process([])
    refuse_idle_cuda()
    model = arguments.checkpoint or config.model.location
    from cusearch_async.models import check_model  # noqa: PLC0415  (transformers only where it is needed)

    check_model(model, config.episode.max_tokens, "--checkpoint" if arguments.checkpoint else "model.path")
    if arguments.against:
        check_model(arguments.against, config.episode.max_tokens, "--against")
    report = asyncio.run(evaluated(config, model, arguments))
    console = Console()
    console.print(table(report.scores, report.title))
    for line in report.lines():
        console.print(plain(line), soft_wrap=True)
    if arguments.output:
        write(arguments.output, report, model)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found out of a policy."""

    title: str
    scores: Scores
    episodes: Sequence[Trajectory]
    conditions: dict[str, str]
    """What the scores hold for: search engine, k, S_max, prompt, temperature."""
    recall: float | None
    """Mean share of the evidence that was found; None where no question names its evidence."""
    samples: Samples | None
    probes: dict[str, Scores]
    """Scores of the other modes."""
    found: list[str]
    """What the probes say, in words."""
    against: Paired | None
    against_name: str
    verdicts: Verdicts | None
    """Of the judge."""

    def lines(self) -> list[str]:
        said = [", ".join(f"{name} {value}" for name, value in self.conditions.items())]
        if self.recall is not None:
            said.append(f"retrieval recall {self.recall:.3f} of the evidence")
        for mode, scores in self.probes.items():
            said.append(f"{mode}: EM {_figure(scores['all'], 'em')}, depth {scores['all']['depth']:.2f}")
        if self.samples is not None:
            k = self.samples
            said.append(
                f"{k.k} samples: pass@1 {k.pass_at_1:.3f}, pass@{k.k} {k.pass_at_k:.3f}, agreement {k.agreement:.3f}, "
                f"abstained {k.abstain_share:.3f}"
            )
        if self.verdicts is not None:
            name = self.verdicts.model or "the judge"
            said.append(
                f"judged by {name}: {self.verdicts.right:.3f} right; exact match says the same of "
                f"{self.verdicts.agrees_with_em:.3f}"
            )
        if self.against is not None:
            one = self.against
            said.append(
                f"less {self.against_name}: EM {one.difference:+.3f} [{one.interval[0]:+.3f}, {one.interval[1]:+.3f}], "
                f"p = {one.p:.2g} (exact McNemar; {one.only_first} questions only here, {one.only_second} only there)"
            )
        return said + self.found

    def as_json(self) -> dict[str, Any]:
        parts = {"samples": self.samples, "against": self.against, "judge": self.verdicts}
        kept = {name: asdict(part) for name, part in parts.items() if part is not None}
        whole = {"scores": self.scores, "conditions": self.conditions, "recall": self.recall, "probes": self.probes}
        return whole | kept | {"findings": self.found}


async def evaluated(config: Config, model: str, arguments: argparse.Namespace) -> Report:
    """Play and summarise; needs the config's retriever. Raises: ConfigError."""
    # vLLM and torch are loaded only by the commands that use them.
    from cusearch_async.data.questions import load_eval_questions  # noqa: PLC0415
    from cusearch_async.evaluation import probing  # noqa: PLC0415
    from cusearch_async.evaluation.judge import judge  # noqa: PLC0415
    from cusearch_async.evaluation.scoring import summarize  # noqa: PLC0415
    from cusearch_async.retrieval.client import SearchClient  # noqa: PLC0415

    questions = load_eval_questions(config)
    probes: tuple[Mode, ...] = ("closed", "blocked") if arguments.probe else ()
    if arguments.probe and all(question.evidence is None for question in questions):
        raise ConfigError("--probe needs questions that name their evidence, and none of these does")
    sampled = max(arguments.samples, 4 if arguments.probe else 0)
    modes: tuple[Mode, ...] = ("full", *probes)
    passes = [probing.Pass(questions, arguments.temperature, mode) for mode in modes]
    passes += [probing.Pass(questions, config.episode.temperature)] * sampled
    async with SearchClient.open(config) as search:
        if config.uses_retriever:
            await search.wait_until_answering(config.run.wait_s)
        full, *others = await play_with(search, config, model, passes)
        other = (await play_with(search, config, arguments.against, passes[:1])) if arguments.against else []
    verdicts = await judge(config.eval.judge, full.episodes) if config.eval.judge.url else None
    right = [[t.em for t in one.episodes] for one in (full, *others)]
    samples = probing.summarize_samples([one.episodes for one in others[len(probes) :]]) if sampled else None
    known = [share for share in full.recall if share is not None]
    how = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}"
    return Report(
        title=f"{Path(model).name}: held-out questions, {how}",
        scores=summarize(full.episodes, questions),
        episodes=full.episodes,
        conditions=conditions(config, how),
        recall=sum(known) / len(known) if known else None,
        samples=samples,
        probes={mode: summarize(one.episodes, questions) for mode, one in zip(probes, others, strict=False)},
        found=probing.findings(questions, right[0], right[1], right[2], samples) if probes and samples else [],
        against=probing.compare_paired(right[0], [t.em for t in other[0].episodes]) if other else None,
        against_name=arguments.against or "",
        verdicts=verdicts,
    )


def conditions(config: Config, how: str) -> dict[str, str]:
    """What decides about scores besides the policy."""
    retriever, environment = config.retriever, config.environment[config.evaluated_in]
    engine = (
        f"{retriever.backend} on {retriever.corpus}" if retriever.backend in ("bm25", "dense") else retriever.backend
    )
    noise = f" with noise {retriever.noise:g}" if retriever.noise else ""
    return {
        "engine": engine + noise,
        "k": str(retriever.topk),
        "S_max": str(config.episode.s_max),
        "prompt": environment.template.splitlines()[0][:60],
        "sampling": how,
    }


def prepare(output: Path) -> None:
    """Check before the episodes are played that the output can be written. Raises: ConfigError."""
    if output.suffix != ".json":
        raise ConfigError(f"--output must be a .json file, got {output}; a .md and a .html are written next to it")
    refuse_unwritable(output, "--output")


def write(output: Path, report: Report, model: str) -> None:
    """All as JSON, tables and findings in Markdown, and episodes as a page."""
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report.as_json(), indent=1), encoding="utf-8")
    said = "".join(f"\n- {line}" for line in report.lines())
    output.with_suffix(".md").write_text(markdown(report.scores, report.title) + said + "\n", encoding="utf-8")
    rows = [["category", "n", *COLUMNS.values()], *_cells(report.scores)]
    page = trace.page(report.episodes, load_tokenizer(model), rows, report.title)
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
