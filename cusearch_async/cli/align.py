"""`cusearch align RUN_FOLDER`: how well what each method would train on points along the reward gradient.

At the model that the run began with, and at each of its checkpoints, it generates pools of training questions as the
run does (its retriever has to answer), computes the gradient of every trajectory, and compares. See
`cusearch_async.replay.alignment`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cusearch_async.algorithm.methods import PlansRollouts, method_class
from cusearch_async.cli.parts.arguments import add_trust, at_least
from cusearch_async.cli.parts.passes import answering_search, run_passes_with
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import Config, MethodConfig, load_config
from cusearch_async.data.questions import load_run_questions
from cusearch_async.environments import Search
from cusearch_async.errors import ConfigError, packages_of
from cusearch_async.evaluation.probing import Pass
from cusearch_async.files import refuse_unwritable, write_file, writing_output
from cusearch_async.lifecycle.placement import configure_process
from cusearch_async.lifecycle.signals import ending
from cusearch_async.replay.alignment import SINGLETONS, Cosines, Figures, MeasuredPool, figures_of
from cusearch_async.replay.selection import with_method
from cusearch_async.run.folder import STARTS, refuse_no_run
from cusearch_async.training.checkpoint import Checkpoints
from cusearch_async.training.selector import candidates_of
from cusearch_async.types import Pool, Question, Trajectory

log = logging.getLogger(__name__)

MIXED = "/mixed"
"""Ends the name of a method with method.mixed_groups_only; random_siblings with it tells depth from that filter."""
METHODS = (
    *("grpo_full", "dapo", "random", "random_siblings", "stratified_grpo", "topk_reward"),
    *("sdga_phase", "sdga_auto", "sdga_anti", f"sdga_phase{MIXED}", f"sdga_auto{MIXED}", f"sdga_anti{MIXED}"),
    f"random_siblings{MIXED}",
)
EQUAL_SHARE = 4
"""Updates of equally many usable trajectories have the budget's this part of them."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="such as runs/demo")
    parser.add_argument("--pools", type=at_least(3), default=12, help="pools at each policy (12)")
    text = f"the methods, separated by commas; default: {','.join(METHODS)}"
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help=text)
    parser.add_argument(
        "--output", type=Path, help="write the cosines of all pools to this .json file, after each policy"
    )
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    folder: Path = arguments.folder
    refuse_no_run(folder)
    starts = sorted((folder / STARTS).glob("*.toml"))
    if not starts:
        raise ConfigError(f"{folder} has no start: no learner has begun")
    config = load_config(starts[-1], overrides)
    if config.learner.lora.rank:
        raise ConfigError("align needs a run that trains the model itself; learner.lora.rank is not 0")
    if arguments.output:
        refuse_unwritable(arguments.output, "--output", ".json")
    budget = min(config.method.budget, config.pool.size // 2)
    methods = {name: _method(config, name, budget) for name in arguments.methods}
    configure_process([])
    refuse_without_linear_layers(config)
    with packages_of("study"):  # missing ones are told before the work, not after it
        from cusearch_async.study import statistics  # noqa: F401, PLC0415
    kept = Checkpoints(folder, config.learner.keep_checkpoints).by_step()
    models = {0: config.model.location} | {step: str(one.path / "model") for step, one in kept.items()}
    found: dict[str, Figures] = {}
    equal = max(2, budget // EQUAL_SHARE)
    for number, (step, model) in enumerate(models.items()):
        pools = measured(config, model, step, arguments.pools)
        for name, one in methods.items():
            figures = figures_of(one, pools, config.run.seed, equal)
            found[name] = found[name] + figures if name in found else figures
        if arguments.output:
            _write(arguments.output, list(models)[: number + 1], arguments.pools, budget, equal, found)
    Console().print(table(found, list(models), arguments.pools, equal))


def _write(
    output: Path, policies: Sequence[int], pools: int, budget: int, equal: int, found: Mapping[str, Figures]
) -> None:
    whole = {"policies": policies, "pools": pools, "budget": budget, "equal": equal}
    figures = {name: asdict(one) | _counts(one) for name, one in found.items()}
    with writing_output(output, "--output"):
        known = json.loads(json.dumps(whole | {"methods": figures}), parse_constant=lambda _: None)  # JSON has no NaN
        text = json.dumps(known, indent=1)
        if os.access(output.resolve().parent, os.W_OK) and (output.is_file() or not output.exists()):
            write_file(output.resolve(), text.encode())  # what is there is hours of work
        else:
            output.write_text(text, encoding="utf-8")  # a device, or a file alone that is this user's


def _counts(figures: Figures) -> dict[str, float]:
    """Trajectories a pool."""
    return {name: float(np.mean(getattr(figures, name))) for name in ("selected", "usable", "alone")}


def refuse_without_linear_layers(config: Config) -> None:
    """Raises: ConfigError for a model like GPT-2, which has none but its head."""
    shape = shape_of(config.model)
    if shape is not None and not shape.linear:
        kind, path = shape.config.model_type, config.model.path
        raise ConfigError(f"align compares gradients of linear layers (nn.Linear), and {path!r}, a {kind}, has none")


def _method(config: Config, name: str, budget: int) -> MethodConfig:
    overrides = ["--method.budget", str(budget), "--loss.minibatch", str(budget)]
    name, is_mixed = name.removesuffix(MIXED), name.endswith(MIXED)
    if is_mixed or "mixed_groups_only" in method_class(name).Settings.model_fields:
        overrides += ["--method.mixed_groups_only", str(is_mixed).lower()]  # whatever the run's own method has
    found = with_method(config, name, overrides).method
    if isinstance(found.make(), PlansRollouts):
        raise ConfigError(
            f"--methods: {name} takes all that it generates, and differs in how much that is: run it instead"
        )
    return found


def measured(config: Config, model: str, step: int, count: int) -> list[MeasuredPool]:
    """Pools of the policy in the folder `model`, with their gradients."""
    pools = asyncio.run(ending(generated(config, model, step, count)))
    from cusearch_async.learner.projection import ProjectedGradients  # noqa: PLC0415  (torch)

    gradients, found = ProjectedGradients(model, config), []
    for number, pool in enumerate(pools):
        found.append(MeasuredPool(candidates_of(pool, config.episode.s_max), gradients.of(pool.trajectories)))
        log.info("policy of step %d: gradients of pool %d of %d", step, number + 1, count)
    return found


@dataclass(frozen=True, slots=True)
class _AtStep:
    """A search engine as it was at a step of the run: a simulated one's noise grows."""

    client: Search
    ticket: int
    """The step's first."""

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        return await self.client.search(query, seed, question, self.ticket)


async def generated(config: Config, model: str, step: int, count: int) -> list[Pool]:
    """`count` pools of the first training questions, in the order of the run, by the policy of `step`."""
    drawn, size = load_run_questions(config), config.pool.questions
    questions = [drawn.of(ticket) for ticket in range(count * size)]
    passes = [Pass(questions, config.episode.temperature)] * config.pool.rollouts
    async with answering_search(config) as search:
        at_step = _AtStep(search, step * config.questions_per_step)
        results = await run_passes_with(at_step, config, model, passes)
    groups = list(zip(*(one.episodes for one in results), strict=True))
    return [_pool(number, groups[number * size : (number + 1) * size]) for number in range(count)]


def _pool(number: int, groups: Sequence[Sequence[Trajectory]]) -> Pool:
    return Pool(number, tuple(itertools.chain.from_iterable(groups)))


def table(found: Mapping[str, Figures], steps: Sequence[int], pools: int, equal: int) -> Table:
    """Mean cosines with 95 % intervals, in 80 columns."""
    title = f"{pools} pools at each of the policies of steps {', '.join(map(str, steps))}"
    shown = Table(title=title, box=box.SIMPLE, padding=0, show_edge=False)
    shown.add_column("method", no_wrap=True)
    for name in ("trained", "usable", "alone", *SINGLETONS, "search tokens", f"at {equal} usable"):
        shown.add_column(name, justify="right")
    for name, figures in found.items():
        counts = (f"{value:.1f}" for value in _counts(figures).values())
        cosines = [*figures.by_singleton.values(), figures.on_search, figures.at_equal]
        shown.add_row(name, *counts, *(_with_interval(one, pools) for one in cosines))
    return shown


def _with_interval(cosines: Cosines, pools: int) -> str:
    from cusearch_async.study.statistics import Spread  # noqa: PLC0415  (of an extra)

    if len(cosines.values) < 2:
        return "–"
    half = Spread(cosines.error, pools - 1).half
    return f"{np.mean(cosines.values):.3f}\n±{'–' if math.isnan(half) else f'{half:.3f}'}"
