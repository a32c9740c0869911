"""Entry point of the `cusearch` command.

The module of a sub-command is imported only when it is used: `cusearch --help` prints the table below and loads no
library."""

from __future__ import annotations

import sys

try:
    import argparse
    import importlib
    from collections.abc import Collection

    from cusearch_async.lifecycle.entry import (
        Parser,
        exit_with_one_line,
        log_to_stderr,
        own_modules_last,
        quick_to_interrupt,
    )
    from cusearch_async.lifecycle.spawned import die_with_worker
except KeyboardInterrupt:  # in the first tenth of a second
    sys.exit(130)

die_with_worker()

COMMANDS = {
    "demo": "train a small search agent on the embedded atlas world",
    "init": "write a config for your own model, questions and passages on this machine",
    "launch": "start all processes of a run and watch them",
    "worker": "start one process of a run: a rollout worker, learner, retriever, evaluator or relay of weights",
    "warmstart": "fine-tune a model on demonstrations, before a run starts from it",
    "check": "check a config: lengths, memory, staleness, files, services; without one this machine",
    "simulate": "how fast a run would go with other numbers of workers, orders and bounds",
    "config": "list every setting with its value and meaning, as Markdown",
    "buckets": "watch the depth buckets of a live run; its ledger and its workers",
    "buffer": "list, show, export, requeue or quarantine trajectories; pause and resume their generation",
    "runs": "list the runs in a folder, compare, draw, export, fork and track them",
    "dashboard": "serve a page of each run, alive or finished, or write it to a file",
    "alarms": "what looks wrong in a run, and what to do about it",
    "ask": "ask the agent that a run has trained, turn by turn",
    "trace": "show the groups of a recorded step side by side, with their advantages",
    "replay": "recompute a recorded step, or see what another method would have taken",
    "align": "compare what each method would train on with the reward gradient, at the policies of a run",
    "eval": "score a policy on held-out questions",
    "index": "build the index of retriever.corpus in the folder retriever.index",
    "data": "check question files, or write them in Search-R1's schema",
    "study": "make a grid of runs over several seeds, and report their differences with intervals",
    "atlas": "the built-in toy task: rebuild or test its data and starter model",
    "redis": "start a Redis server for a run (every write is synced to disk)",
    "reset": "delete a run: its keys in Redis, its checkpoints, weights and metrics",
}
"""Name -> line of help. The module of the same name in this folder adds the arguments to the parser and sets `run`."""

WITHOUT_SETTINGS = ("study", "trace", "runs", "alarms", "init")
"""Commands that read no config: a setting on their command line is an error."""


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cusearch_async.version import full_version  # noqa: PLC0415  (only for this)

        print(f"cusearch {full_version()}")
        parser.exit()


def make_parser(typed: Collection[str] = tuple(COMMANDS)) -> Parser:
    """Only commands in `typed` (the words of the command line) get their arguments; the others are only listed."""
    parser = Parser(
        prog="cusearch",
        description="Asynchronous reinforcement learning for search agents (CuSearch).",
        epilog="Settings of a config can be overridden on the command line: --learner.lr 1e-6",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version, in a checkout with its commit")
    parser.set_defaults(run=lambda *_: parser.print_help())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in typed:
            importlib.import_module(f"cusearch_async.cli.{name}").add(command)
    return parser


def main() -> None:
    if sys.platform != "linux":
        sys.exit("cusearch: this is for Linux alone; elsewhere use a container, a virtual machine or WSL 2")
    with exit_with_one_line("cusearch"):
        with quick_to_interrupt():
            own_modules_last()
            parser = make_parser(sys.argv[1:])
            arguments, overrides = parser.parse()
            if overrides and arguments.command in WITHOUT_SETTINGS:
                parser.error(f"{overrides[0]} is a setting of a config, and `{arguments.command}` reads none")
            log_to_stderr("cusearch")
        if "trust" in arguments:
            from cusearch_async.cli.parts.arguments import refuse_untrusted  # noqa: PLC0415  (only where it is needed)

            refuse_untrusted(arguments)
        arguments.run(arguments, overrides)


if __name__ == "__main__":
    main()
