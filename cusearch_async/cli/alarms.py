"""`cusearch alarms RUN_FOLDER`: the alarms of a run, newest last. The exit status is 1 while one fires."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cusearch_async.alarms.rules import RULES
from cusearch_async.dashboard.facts import alarms
from cusearch_async.dashboard.kept import KeptRun
from cusearch_async.errors import ConfigError
from cusearch_async.surrogates import visible
from cusearch_async.training.alarms import text_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="such as runs/demo")
    parser.add_argument("--rules", action="store_true", help="list all rules, with what to do")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    console = Console()
    if arguments.rules:
        for rule in RULES:
            console.print(Text.assemble((rule.name, "bold"), f": {rule.condition}. {rule.cause} {rule.remedy}"))
        return
    if arguments.folder is None:
        raise ConfigError("give the folder of a run, like runs/demo, or --rules")
    kept = KeptRun.read(arguments.folder)
    found = alarms(kept)
    if found is None:
        raise ConfigError(f"{arguments.folder} has no whole config.toml, which the rules need")
    for alarm in reversed(found):
        steps = f"step {alarm.first}" if alarm.first == alarm.last else f"steps {alarm.first} to {alarm.last}"
        style = "red" if alarm.is_firing else "dim"
        console.print(Text(visible(f"{steps}: {text_of(alarm, kept.folder)}"), style=style), soft_wrap=True)
    firing = sum(alarm.is_firing for alarm in found)
    console.print(f"{len(kept.rows)} steps, {len(RULES)} rules: {firing or 'none'} firing")
    sys.exit(1 if firing else 0)
