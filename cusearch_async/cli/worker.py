"""`cusearch worker NAME CONFIG`: one process of a run. In a checkout `python -m workers.NAME CONFIG` is the same."""

from __future__ import annotations

import argparse
import functools

from cusearch_async.cli.parts.arguments import add_accept_changes, add_config
from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.entry import exit_with_one_line, log_to_stderr
from cusearch_async.lifecycle.launcher import load_launched
from cusearch_async.processes.start import PROCESSES


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=PROCESSES, metavar="NAME", help=f"one of {', '.join(PROCESSES)}")
    add_config(parser, looks=False)
    text = "use these GPUs, not those of the config or free ones"
    parser.add_argument("--gpu", type=lambda given: tuple(given.split(",")), default=(), metavar="0,1", help=text)
    add_accept_changes(parser)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher; as LOCAL_RANK
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    name = arguments.name
    log_to_stderr(name)
    process = PROCESSES[name]
    if name not in ("retriever", "relay"):
        process = functools.partial(process, gpu=arguments.gpu)
    if name == "learner":
        process = functools.partial(process, accept_changes=arguments.accept_changes)
    with exit_with_one_line(name):
        if arguments.gpu and name in ("retriever", "relay"):
            raise ConfigError(f"the {name} takes no --gpu; learner, rollout workers and evaluator do")
        if arguments.accept_changes and name != "learner":
            raise ConfigError(f"only the learner takes --accept-changes; the {name} follows it")
        load = load_launched if name == "learner" else load_config
        process(load(arguments.config, overrides))
