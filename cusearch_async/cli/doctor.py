"""`cusearch doctor [CONFIG...]`: looks at this machine, and names the command that fixes what is wrong with it.

`cusearch check` asks whether a config can work anywhere; this asks whether it can work here. Without a config it looks
at the machine alone. Status 1 if anything is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from cusearch_async.cli.preflight import installed, machine, places
from cusearch_async.cli.preflight.finding import Finding, table
from cusearch_async.cli.trust import add_trust
from cusearch_async.config import CONFIG_HELP, Config, load_config
from cusearch_async.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, nargs="*", help=f"{CONFIG_HELP}; without it, the machine alone")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    if overrides and not arguments.config:
        raise ConfigError(
            f"{overrides[0]} is a setting of a config; name one: `cusearch doctor CONFIG {overrides[0]} …`"
        )
    config = load_config(arguments.config, overrides) if arguments.config else None
    findings = list(examine(config))
    Console().print(table(findings))
    if any(finding.status == "error" for finding in findings):
        sys.exit(1)


def examine(config: Config | None) -> Iterator[Finding]:
    """All findings, in the order of the table."""
    yield installed.python()
    yield from installed.packages()
    yield from machine.devices(config)
    yield machine.cores(config)
    yield machine.shared_memory(config)
    yield machine.open_files(config)
    yield machine.redis_server(config)
    if config is not None:
        yield from places.addresses(config)
    yield places.disk(config)
    if config is not None and config.weights.folder is not None:
        yield places.weights_disk(config)
    yield places.hub(config)
