"""`cusearch plot RUN_FOLDER...`: draws the plot of a run from its metrics.jsonl."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from cusearch_async.cli.figure import draw
from cusearch_async.errors import ConfigError
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run.folder import METRICS

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="such as runs/demo")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Raises: ConfigError for a folder without metrics, or one that cannot be written."""
    for folder in arguments.folders:
        rows = read_metrics(folder / METRICS)
        if not rows:
            raise ConfigError(f"{folder / 'metrics.jsonl'} holds no step yet; give the folder of a run, like runs/demo")
        picture = folder / "plot.png"
        try:
            draw(rows, str(folder), picture)
        except OSError as error:
            raise ConfigError(f"{picture} cannot be written: {error.strerror}") from error
        log.info("drew %s", picture)
