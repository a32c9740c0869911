"""`cusearch dashboard RUN...`: serves a page for each run, alive or finished, until ctrl-C. With --output FILE.html it
writes the page of one run, to be kept or sent."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from pathlib import Path

from cusearch_async.cli.parts.arguments import add_trust, parsed
from cusearch_async.config import LOOPBACK, load_config
from cusearch_async.dashboard.kept import SETTINGS
from cusearch_async.dashboard.page import write_page
from cusearch_async.dashboard.server import Shown, address_of, application
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.files import refuse_unwritable
from cusearch_async.http_server import serve

log = logging.getLogger(__name__)

EVERYWHERE = "0.0.0.0"  # noqa: S104  (who asks for it gets it, with a token)

port = parsed(int, lambda number: 0 < number < 2**16, "a port, 1 to 65535")


def add(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs, like runs/demo, or their configs"
    parser.add_argument("config", type=Path, nargs="+", metavar="RUN", help=text)
    parser.add_argument("--port", type=port, default=8787, help="its port (8787)")
    text = "where to listen; anywhere but on this machine, a page is shown only to who has its token (127.0.0.1)"
    parser.add_argument("--host", default=LOOPBACK[0], help=text)
    parser.add_argument("--output", type=Path, help="write the page of one run to this .html file, and end")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    runs = [shown(path, overrides) for path in arguments.config]
    if arguments.output:
        if len(runs) > 1:
            raise ConfigError(f"--output writes the page of one run, got {len(runs)}")
        if arguments.output.suffix != ".html":
            raise ConfigError(f"--output must be a .html file, got {arguments.output}")
        refuse_unwritable(arguments.output, "--output")
        write_page(runs[0].folder, arguments.output)
        log.info("wrote %s", arguments.output)
        return
    names = names_of([run.folder for run in runs])
    url = f"http://{arguments.host}:{arguments.port}"
    tokens = [] if arguments.host in LOOPBACK else [run.token for run in runs if run.token]
    if arguments.host not in LOOPBACK and not tokens:
        raise ConfigError(f"--host {arguments.host} needs a token: set CUSEARCH_PAGE_TOKEN, or own the run's folder")
    reached = socket.gethostname() if arguments.host == EVERYWHERE else arguments.host
    for name, run in zip(names, runs, strict=True):
        asked = f"?token={run.token}" if tokens else ""
        log.info("the page of %s: http://%s:%d%s%s", name, reached, arguments.port, address_of(name), asked)
    asyncio.run(serve(application(dict(zip(names, runs, strict=True))), url, "--port", tokens))


def shown(path: Path, overrides: list[str]) -> Shown:
    """A run by its folder or its config. Its Redis is looked into where its config can be read.

    Raises: ConfigError."""
    if not path.is_dir():
        config = load_config([path], overrides)
        return Shown(config.folder, config)
    settings = next((path / name for name in SETTINGS if (path / name).exists()), None)
    here = ["--run.folder", str(path)]  # its password is in it; the config may say where the folder was when it began
    try:
        return Shown(path, load_config([settings], [*here, *overrides]) if settings else None)
    except ConfigError as error:  # of another version, perhaps
        log.warning("%s: its Redis is not looked into: %s", path, first_line(error))
        return Shown(path, None)


def names_of(folders: list[Path]) -> list[str]:
    """For their addresses: the names of the folders, numbered where they are equal."""
    names: list[str] = []
    for folder in folders:
        name = folder.resolve().name
        numbered = (name, *(f"{name}-{number}" for number in range(2, len(folders) + 2)))
        names.append(next(one for one in numbered if one not in names))
    return names
