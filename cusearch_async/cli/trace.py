"""`cusearch trace RUN_FOLDER --step N`: a page of the groups of a recorded step, side by side, with advantages."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np

from cusearch_async.cli.parts.arguments import add_run_folder
from cusearch_async.dashboard.episodes import groups_of
from cusearch_async.dashboard.page import page
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.run.folder import TRACES

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("--output", type=Path, help="the .html file to write; default: in traces/ of the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError when the step is not recorded, or the page cannot be written."""
    step = RecordedStep.read(arguments.folder, arguments.step)
    output = arguments.output or arguments.folder / TRACES / f"{arguments.step:06d}.html"
    refuse_unwritable(output, "--output", ".html")
    title = f"{step.config.run.name}, step {arguments.step}: {step.config.method.name}"
    shown = {"screens": ["episodes"], "recorded": [arguments.step], "table": _table(step), "groups": groups_of(step)}
    text = page(title, shown)
    with writing_output(output, "--output"):
        output.write_text(text, encoding="utf-8")
    log.info("wrote %s", output)


def _table(step: RecordedStep) -> list[list[str]]:
    """A row per depth: trajectories of the pool, selected ones, their rewards and advantages."""
    rows = [["depth", "pool", "selected", "mean reward, pool", "mean reward, selected", "mean |advantage|"]]
    pool, chosen = step.pool.trajectories, step.recorded
    depths, rewards = np.array([t.depth for t in pool]), np.array([t.reward for t in pool])
    of_chosen = depths[chosen.indices]
    for depth in [*sorted(set(depths.tolist())), None]:
        in_pool = np.ones(len(pool), bool) if depth is None else depths == depth
        in_chosen = np.ones(len(of_chosen), bool) if depth is None else of_chosen == depth
        figures = (rewards[in_pool], rewards[chosen.indices][in_chosen], np.abs(chosen.advantages[in_chosen]))
        means = [f"{values.mean():.3f}" if len(values) else "–" for values in figures]
        rows.append(["all" if depth is None else str(depth), str(in_pool.sum()), str(in_chosen.sum()), *means])
    return rows
