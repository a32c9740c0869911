"""`cusearch warmstart CONFIG --demonstrations FILE`: supervised fine-tuning before reinforcement learning."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cusearch_async.cli.parts.arguments import add_config, at_least, finite, parsed
from cusearch_async.cli.preflight.memory import refuse_too_little
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.entry import STOPPED
from cusearch_async.lifecycle.launcher import load_launched
from cusearch_async.processes.start import rank_of_learner
from cusearch_async.run.folder import refuse_no_run
from cusearch_async.warmstart.demonstrations import Sources
from cusearch_async.warmstart.tuning import Course


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, looks=False)
    share = parsed(float, lambda number: 0 < number < 1, "a number between 0 and 1")
    positive = parsed(float, lambda number: 0 < number < float("inf"), "a positive number")
    text = "files of written demonstrations, or of exported trajectories (.jsonl)"
    parser.add_argument("--demonstrations", nargs="+", default=[], metavar="FILE", help=text)
    text = "folders of runs, whose recorded trajectories are demonstrations, too"
    parser.add_argument("--from", nargs="+", default=[], type=Path, dest="runs", metavar="RUN_FOLDER", help=text)
    text = "least reward of a recorded trajectory (1)"
    parser.add_argument("--min-reward", type=finite, default=1.0, help=text)
    parser.add_argument("--output", type=Path, help="folder to write (runs/NAME-warmstart), with the model in it")
    parser.add_argument("--batch", type=at_least(1), default=8, help="demonstrations per optimizer step (8)")
    parser.add_argument("--epochs", type=at_least(1), default=1, help="passes over the demonstrations (1)")
    parser.add_argument("--lr", type=positive, default=1e-4, help="peak learning rate of AdamW (1e-4)")
    parser.add_argument("--held-out", type=share, default=0.1, help="share that is not trained on (0.1)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    sources = Sources(tuple(arguments.demonstrations), tuple(arguments.runs), arguments.min_reward)
    if not (sources.files or sources.runs):
        raise ConfigError("there is nothing to learn from; give --demonstrations FILE or --from RUN_FOLDER")
    for run in sources.runs:
        refuse_no_run(run)
    config = load_launched(arguments.config, overrides)
    folder = arguments.output or Path("runs") / f"{config.run.name}-warmstart"
    course = Course(arguments.batch, arguments.epochs, arguments.lr, arguments.held_out)
    with rank_of_learner(config, is_alone=True):
        from cusearch_async.processes import warmstart  # noqa: PLC0415  (torch reads the settings above when loaded)

        refuse_too_little(config)
        is_finished = warmstart.run(config, course, sources, folder)
    if not is_finished:
        sys.exit(STOPPED)  # what comes next needs the model
