"""`cusearch launch CONFIG`: starts all processes of a run on this machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from rich.console import Console

from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.arguments import add_accept_changes, add_config
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.cli.parts.opening import read_ledger, refuse_if_alive, refuse_other_run, refuse_redis_that_is_down
from cusearch_async.cli.preflight.trial import refuse_failed_trial
from cusearch_async.config import Config, load_config
from cusearch_async.data.questions import first_question, load_eval_questions
from cusearch_async.errors import BufferLost
from cusearch_async.metrics.files import read_scores
from cusearch_async.metrics.trackers import tracker_class
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import changes_since_last_start, epochs_and_steps
from cusearch_async.training.checkpoint import checkpoints_of
from cusearch_async.training.checkpoint_objects import CheckpointObjects
from cusearch_async.transport.server import may_be_asked

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, looks=False)
    add_accept_changes(parser)
    text = "replace the learner of a run that is alive, and add workers to it"
    parser.add_argument("--take-over", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, overrides)
    console = Console()
    started = time.monotonic()
    run_folder.refuse_others(config.folder, config.run.name)
    objects = CheckpointObjects.of(config)
    begins_here = not (config.folder / run_folder.STARTS).exists()
    if objects is not None and begins_here:  # it may have begun elsewhere
        asyncio.run(objects.restore())
    done = checkpoints_of(config).latest()
    if done is not None and is_complete(done.state.step, config) and not done.damaged():
        console.print(
            f"run {config.run.name} is complete: {done.state.step} steps are done and run.steps is "
            f"{config.run.steps}. Nothing is left to do; to continue, add --steps N"
        )
        live.print_results(config, done, console)
        return
    changes_since_last_start(config, arguments.accept_changes)  # before anything starts; the learner logs them
    run_folder.refuse_if_held(config.folder)
    if may_be_asked(config.redis):
        asyncio.run(refuse_other_run(config))
        if not arguments.take_over:
            asyncio.run(refuse_if_alive(config, "stop it first, or add --take-over to replace its learner"))
    elif not begins_here:
        refuse_redis_that_is_down(config)
    from cusearch_async.processes.engines import check_policy  # noqa: PLC0415  (transformers only where it is needed)

    tokenizer = check_policy(config, config.model.location)
    refuse_failed_trial(config, tokenizer)
    for tracker in config.run.trackers:
        tracker_class(tracker)
    for label in config.environment:
        first_question(config, label)
    if config.eval.every:
        load_eval_questions(config)
    with Fleet(config) as fleet:
        fleet.start_services()
        fleet.start_run(arguments.accept_changes)
        log.info("started %s; logs in %s", ", ".join(fleet.children), config.folder / "logs")
        live.show_ways_to_look(fleet, config, console)
        live.watch(fleet, config, console)
        ledger, counted = asyncio.run(read_ledger(config))
    summary = live.conclude(config, ledger, counted, time.monotonic() - started, console)
    live.print_results(config, live.whole_checkpoint(config), console)
    if not summary["ledger"]["closes"]:
        remedy = "see above, and `cusearch buckets --ledger`"
        raise BufferLost(f"the ledger of run {config.run.name} does not close; {remedy}")


def is_complete(done: int, config: Config) -> bool:
    """Whether all steps are done and, with an evaluator, the last version is scored."""
    if done < config.run.steps or not config.eval.every:
        return done >= config.run.steps
    scored = read_scores(config.folder / run_folder.SCORES, epochs_and_steps(config.folder))
    return bool(scored) and scored[-1]["step"] >= done
