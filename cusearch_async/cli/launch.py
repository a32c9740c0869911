"""`cusearch launch CONFIG`: all processes of a run on this machine."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from cusearch_async.cli.fleet import Fleet
from cusearch_async.config import load_config

log = logging.getLogger(__name__)


def add(commands: Any) -> None:
    parser = commands.add_parser("launch", help="start all processes of a run and watch them")
    parser.add_argument("config", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    from cusearch_async.models import check_model  # noqa: PLC0415  (transformers only where it is needed)

    check_model(config.model.location, config.episode.max_tokens)
    with Fleet(config) as fleet:
        fleet.start_services()
        fleet.start_run()
        log.info("started %s; logs in %s", ", ".join(fleet.processes), config.folder / "logs")
        fleet.wait(fleet.is_run_over)
        log.info("the run is complete; see %s", config.folder)
