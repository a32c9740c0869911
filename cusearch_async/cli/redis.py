"""`cusearch redis CONFIG`: runs a Redis server for a run, on loopback, in the foreground."""

from __future__ import annotations

import argparse
import logging
import os
import secrets

from cusearch_async.cli.parts.arguments import add_config
from cusearch_async.cli.parts.opening import had_another_redis
from cusearch_async.config import load_config
from cusearch_async.errors import BufferUnavailable, ConfigError, RunInUse
from cusearch_async.run import folder as run_folder
from cusearch_async.transport.roles import ROLES, acl_file
from cusearch_async.transport.server import holding_data, is_listening, own_server, redis_cli_line, url_of_own

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--acl", action="store_true", help="print ACL users for your own Redis >= 7, and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    if arguments.acl:
        print(acl_file(config.run.name, {role: secrets.token_urlsafe(24) for role in ROLES}), end="")
        return
    if config.redis.transport != "redis":
        raise ConfigError(f"redis.transport is {config.redis.transport!r}: this run has no Redis")
    if is_listening(config.redis.url):
        if url_of_own(config.redis, config.folder) == config.redis.url:
            raise RunInUse(f"redis.url {config.redis.url}: this run's own Redis listens there already; use that")
        raise ConfigError(f"redis.url {config.redis.url}: something listens there already; choose another port")
    if had_another_redis(config):
        log.warning(
            "this run's Redis was at %s too, and its data is not in %s: this one is empty, and the run continues from "
            "its newest checkpoint; if the other one can be started again, end this one first",
            *(config.redis.url, config.folder / "redis"),
        )
    run_folder.mark(config.folder, config.run.name)
    with holding_data(config.redis, config.folder) as lock:
        command = own_server(config.redis, config.folder)
        log.info("inspect it with: %s", redis_cli_line(config.redis, config.folder))
        os.set_inheritable(lock, True)
        try:
            os.execv(command[0], command)  # noqa: S606  (this process becomes the server)
        except OSError as error:
            why = f"{command[0]} cannot be started: {error.strerror}"
            raise BufferUnavailable(f"{why}; install redis-server") from error
