"""`cusearch dashboard RUN...`: serves a page for each run, alive or finished, until ctrl-C. With --output FILE.html it
writes the page of one run, to be kept or sent."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from pathlib import Path
from urllib.parse import quote

from cusearch_async.cli.parts.arguments import add_trust, parsed
from cusearch_async.config import LOOPBACK, given_page_token, load_config, saved_in
from cusearch_async.dashboard.kept import names_of
from cusearch_async.dashboard.page import write_page
from cusearch_async.dashboard.server import Shown, address_of, application
from cusearch_async.errors import ConfigError, first_line
from cusearch_async.files import refuse_unwritable
from cusearch_async.http_server import serve
from cusearch_async.run.folder import refuse_no_run

log = logging.getLogger(__name__)

EVERYWHERE = "0.0.0.0"  # noqa: S104  (who asks for it gets it, with a token)

address = parsed(str, lambda host: ":" not in host, "an IPv4 address or a host's name")
port = parsed(int, lambda number: 0 < number < 2**16, "a port, 1 to 65535")


def add(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs, like runs/demo, or their configs"
    parser.add_argument("config", type=Path, nargs="+", metavar="RUN", help=text)
    parser.add_argument("--port", type=port, default=8787, help="its port (8787)")
    text = "where to listen; anywhere but on this machine, a page is shown only to who has its token (127.0.0.1)"
    parser.add_argument("--host", metavar="ADDRESS", type=address, default=LOOPBACK[0], help=text)
    parser.add_argument("--output", type=Path, help="write the page of one run to this .html file, and end")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    runs = [shown(path, overrides, arguments.trust) for path in arguments.config]
    if arguments.output:
        if len(runs) > 1:
            raise ConfigError(f"--output writes the page of one run, got {len(runs)}")
        refuse_unwritable(arguments.output, "--output", ".html")
        write_page(runs[0].folder, arguments.output)
        log.info("wrote %s", arguments.output)
        return
    names = names_of([run.folder for run in runs])
    token = "" if arguments.host in LOOPBACK else token_of_all(runs, arguments.host)
    reached = socket.gethostname() if arguments.host == EVERYWHERE else arguments.host
    for name in names:
        asked = f"?token={quote(token, safe='')}" if token else ""
        log.info("the page of %s: http://%s:%d%s%s", name, reached, arguments.port, address_of(name), asked)
    url = f"http://{arguments.host}:{arguments.port}"
    key = f"--host {arguments.host} and --port" if token else "--port"
    asyncio.run(serve(application(dict(zip(names, runs, strict=True))), url, key, token))


def token_of_all(runs: list[Shown], host: str) -> str:
    """Who has it sees all of them. Raises: ConfigError where they have none, or several."""
    if given := given_page_token():
        return given
    tokens = {run.token() for run in runs}
    token = next(iter(tokens))
    if len(tokens) > 1 or token is None:
        what = "several runs" if len(runs) > 1 else "this folder"
        raise ConfigError(f"--host {host} shows {what} only to who has a token: set CUSEARCH_PAGE_TOKEN")
    return token


def shown(path: Path, overrides: list[str], trusts: bool = False) -> Shown:
    """A run by its folder or its config. Its Redis is looked into where its config can be read.

    Raises: ConfigError."""
    if not path.is_dir():
        config = load_config([path], overrides)
        return Shown(config.folder, config, trusts)
    refuse_no_run(path)
    settings = next(iter(saved_in(path)), None)
    try:
        return Shown(path, load_config([settings], overrides) if settings else None, trusts)
    except ConfigError as error:  # of another version, perhaps
        log.warning("%s: its Redis is not looked into: %s", path, first_line(error))
        return Shown(path, None, trusts)
