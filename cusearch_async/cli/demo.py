"""`cusearch demo`: trains a search agent on the atlas world, with all real components and shows what it learned."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.arguments import add_accept_changes, add_config
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.cli.parts.opening import read_ledger, refuse_if_alive
from cusearch_async.config import Config, load_config
from cusearch_async.data.questions import load_eval_questions
from cusearch_async.errors import BufferUnavailable, ConfigError, ProcessDied
from cusearch_async.evaluation.scoring import Scores
from cusearch_async.lifecycle.children import free_port
from cusearch_async.run import folder as run_folder
from cusearch_async.training.checkpoint import Checkpoint
from cusearch_async.transport.server import is_listening

log = logging.getLogger(__name__)

SCORED = {"baseline": "the baseline", "before": "the starter policy", "after": "the trained policy"}


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, default="atlas", looks=False)
    text = "also score this model, such as the one before its warm start (folder or Hub id)"
    parser.add_argument("--baseline", metavar="MODEL", help=text)
    add_accept_changes(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, ["--run.folder", "runs/demo", *overrides])
    if config.run.steps < 1:
        raise ConfigError(f"a demo needs at least 1 step, got run.steps = {config.run.steps}")
    load_eval_questions(config)  # what cannot be scored is told before the training, not after it
    if config.eval.judge.url:
        from cusearch_async.evaluation.judge import try_judge  # noqa: PLC0415  (of an extra)

        asyncio.run(try_judge(config.eval.judge))
    console = Console()
    started = time.monotonic()
    config = with_own_redis(config)
    from cusearch_async.processes.engines import check_policy  # noqa: PLC0415  (transformers only where it is needed)

    check_policy(config, config.model.location)
    if arguments.baseline:
        check_policy(config, arguments.baseline, "--baseline")
    aside = run_folder.move_aside(config.folder)
    if aside is not None:
        console.print(f"the earlier demo is kept in {aside}", soft_wrap=True)
    with Fleet(config) as fleet:
        fleet.start_services()
        live.show_ways_to_look(fleet, config, console)
        fleet.start_run(arguments.accept_changes)
        live.watch(fleet, config, console)
        ledger, counted = asyncio.run(read_ledger(config))
        wall_s = time.monotonic() - started
        fleet.stop(*(name for name in fleet.children if name.startswith(("rollout", "learner", "evaluator"))))
        newest = live.whole_checkpoint(config)
        if newest is None:
            raise ProcessDied(f"the learner has ended without a checkpoint in {config.folder / 'checkpoints'}")
        models = {"baseline": arguments.baseline} if arguments.baseline else {}
        models |= {"before": config.model.location, "after": str(newest.path / "model")}
        screen = live.Screen(fleet, console)
        scored = {side: evaluate(fleet, screen, config, model, side) for side, model in models.items()}
    summary = live.conclude(config, ledger, counted, wall_s, console)
    finish(config, newest, scored, summary, console)


def with_own_redis(config: Config) -> Config:
    """The config with a Redis that only this demo uses. It gets another port if something listens at redis.url already.

    Raises: RunInUse when a run of this name is alive at redis.url: it may use the demo's folder."""
    if config.redis.transport != "redis" or not is_listening(config.redis.url):
        return config
    with contextlib.suppress(BufferUnavailable):  # not a Redis that we can use
        asyncio.run(refuse_if_alive(config))
    url = f"redis://127.0.0.1:{free_port()}/0"
    log.info("something listens at redis.url %s already; the demo starts its own Redis at %s", config.redis.url, url)
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})


def evaluate(fleet: Fleet, screen: live.Screen, config: Config, model: str, side: str) -> dict[str, Any]:
    """What `cusearch eval` writes of the model of one side of the run."""
    output, process = config.folder / f"eval_{side}.json", f"eval_{side}"
    options = ["--checkpoint", model, "--output", str(output)]
    fleet.start_command(process, "eval", options=options, env=fleet.gpus_of_worker())
    try:
        screen.wait(
            lambda: f"scoring {SCORED[side]} on held-out questions", lambda: fleet.has_ended(process), lambda: []
        )
    except ProcessDied as error:
        if not output.exists():
            raise
        log.warning("%s; the scores are there", error)  # a judge has failed after them
    fleet.stop(process)
    written: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return written


def finish(
    config: Config, newest: Checkpoint, scored: dict[str, dict[str, Any]], summary: dict[str, Any], console: Console
) -> None:
    """Write summary.json; print the scores before and after, and where the results are. `scored` is what `evaluate`
    found of the `baseline`, if there is one, `before` and `after`."""
    from cusearch_async.evaluation.findings import compare_paired  # noqa: PLC0415  (of an extra)

    sides: dict[str, Scores] = {side: found["scores"] for side, found in scored.items()}
    figures = {f"{key}_{side}": scores["all"][key] for key in ("em", "depth") for side, scores in sides.items()}
    by_category = {name: {side: scores[name] for side, scores in sides.items()} for name in sides["before"]}
    after, before = ([row["em"] for row in scored[side]["questions"]] for side in ("after", "before"))
    paired = compare_paired(after, before)
    summary = {**figures, "by_category": by_category, "paired_difference": asdict(paired), **summary}
    path = config.folder / run_folder.SUMMARY
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    console.print(comparison(sides))
    console.print(f"after {paired.less('before')}", soft_wrap=True)
    console.print(
        "greedy answers to held-out questions; reward and EM of the steps above are of answers to training questions, "
        f"sampled at temperature {config.episode.temperature:g}, and so usually lower"
    )
    live.print_results(config, newest, console)
    console.print(f"{'summary':<8} {path}", soft_wrap=True)


def comparison(sides: Mapping[str, Scores]) -> Table:
    """The scores of all `sides` in their order, by category."""
    shown = Table(title=f"held-out questions, greedy: {' → '.join(sides)}")
    shown.add_column("questions with")
    for name in ("n", "reward", "EM", "search depth"):
        shown.add_column(name, justify="right")
    for category, last in sides["after"].items():
        changes = (
            " → ".join(f"{scores[category][key]:.2f}" for scores in sides.values()) for key in ("reward", "em", "depth")
        )
        shown.add_row(category, str(int(last["count"])), *changes, style="bold" if category == "all" else None)
    return shown
