"""Entry point of the `cusearch` command."""

from __future__ import annotations

import cusearch_async
from cusearch_async.cli import (
    atlas,
    buckets,
    buffer,
    check,
    config,
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
from cusearch_async.lifecycle.entry import Parser, last_words, log_to_stderr

COMMANDS = (
    demo,
    launch,
    check,
    config,
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
)


def make_parser() -> Parser:
    parser = Parser(
        prog="cusearch",
        description="Asynchronous reinforcement learning for search agents (CuSearch).",
        epilog="Settings of a config can be overridden on the command line: --learner.lr 1e-6",
    )
    parser.add_argument("--version", action="version", version=f"cusearch {cusearch_async.__version__}")
    parser.set_defaults(run=lambda *_: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser


def main() -> None:
    arguments, overrides = make_parser().parse()
    log_to_stderr("cusearch")
    with last_words("cusearch"):
        arguments.run(arguments, overrides)


if __name__ == "__main__":
    main()
