"""Entry point of the `cusearch` command."""

from __future__ import annotations

import argparse
import sys

from cusearch_async import host
from cusearch_async.cli import (
    atlas,
    buckets,
    buffer,
    check,
    data,
    demo,
    evaluate,
    index,
    launch,
    ledger,
    pause,
    plot,
    redis,
    reset,
    workers,
)
from cusearch_async.config import split_overrides
from cusearch_async.errors import CusearchError


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="cusearch",
        description="Asynchronous reinforcement learning for search agents (CuSearch).",
        epilog="Settings of a config can be overridden on the command line: --learner.lr 1e-6",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        demo,
        launch,
        check,
        evaluate,
        index,
        data,
        buckets,
        buffer,
        ledger,
        workers,
        plot,
        pause,
        atlas,
        redis,
        reset,
    ):
        module.add(commands)
    own, overrides = split_overrides(sys.argv[1:])
    arguments = parser.parse_args(own)
    host.log_to_stderr("cusearch")
    try:
        arguments.run(arguments, overrides)
    except KeyboardInterrupt:
        sys.exit(130)
    except (CusearchError, ExceptionGroup) as error:
        named = host.first_named(error)
        if named is None:
            raise
        sys.exit(f"cusearch: {named}")


if __name__ == "__main__":
    main()
