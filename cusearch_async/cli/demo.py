"""`cusearch demo`: trains a search agent on the atlas world, with all real components and shows what it learned."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts import live
from cusearch_async.cli.parts.arguments import add_accept_changes, add_config
from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.cli.parts.opening import read_ledger, refuse_if_alive
from cusearch_async.config import Config, load_config
from cusearch_async.errors import BufferUnavailable, ConfigError, ProcessDied
from cusearch_async.evaluation.scoring import Scores
from cusearch_async.lifecycle.children import free_port
from cusearch_async.run import folder as run_folder
from cusearch_async.training.checkpoint import Checkpoint
from cusearch_async.transport.server import is_listening

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser, default="atlas", looks=False)
    add_accept_changes(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    config = load_config(arguments.config, ["--run.folder", "runs/demo", *overrides])
    if config.run.steps < 1:
        raise ConfigError(f"a demo needs at least 1 step, got run.steps = {config.run.steps}")
    console = Console()
    started = time.monotonic()
    config = with_own_redis(config)
    from cusearch_async.processes.engines import check_policy  # noqa: PLC0415  (transformers only where it is needed)

    check_policy(config, config.model.location)
    aside = run_folder.move_aside(config.folder)
    if aside is not None:
        console.print(f"the earlier demo is kept in {aside}", soft_wrap=True)
    with Fleet(config) as fleet:
        fleet.start_services()
        live.print_inspection_commands(config, console)
        screen = live.Screen(fleet, console)
        before = evaluate(fleet, screen, config, config.model.location, "before", "scoring the starter policy")
        fleet.start_run(arguments.accept_changes)
        live.watch(fleet, config, console)
        ledger, counted = asyncio.run(read_ledger(config))
        fleet.stop(*(name for name in fleet.children if name.startswith(("rollout", "learner", "evaluator"))))
        newest = live.whole_checkpoint(config)
        if newest is None:
            raise ProcessDied(f"the learner has ended without a checkpoint in {config.folder / 'checkpoints'}")
        after = evaluate(fleet, screen, config, str(newest.path / "model"), "after", "scoring the trained policy")
    summary = live.conclude(config, ledger, counted, time.monotonic() - started, console)
    finish(config, newest, before, after, summary, console)


def with_own_redis(config: Config) -> Config:
    """The config with a Redis that only this demo uses. It gets another port if something listens at redis.url already.

    Raises: RunInUse when a run of this name is alive at redis.url: it may use the demo's folder."""
    if not is_listening(config.redis.url):
        return config
    with contextlib.suppress(BufferUnavailable):  # not a Redis that we can use
        asyncio.run(refuse_if_alive(config))
    url = f"redis://127.0.0.1:{free_port()}/0"
    log.info("something listens at redis.url %s already; the demo starts its own Redis at %s", config.redis.url, url)
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})


def evaluate(fleet: Fleet, screen: live.Screen, config: Config, model: str, name: str, what: str) -> Scores:
    output, process = config.folder / f"eval_{name}.json", f"eval_{name}"
    fleet.start_command(process, "eval", options=["--checkpoint", model, "--output", str(output)])
    screen.wait(lambda: f"{what} on held-out questions", lambda: fleet.has_ended(process), lambda: [])
    fleet.stop(process)
    scores: Scores = json.loads(output.read_text(encoding="utf-8"))["scores"]
    return scores


def finish(
    config: Config, newest: Checkpoint, before: Scores, after: Scores, summary: dict[str, Any], console: Console
) -> None:
    """Write summary.json; print the scores before and after, and where the results are."""
    sides = {"before": before, "after": after}
    figures = {f"{key}_{side}": scores["all"][key] for key in ("em", "depth") for side, scores in sides.items()}
    by_category = {name: {side: scores[name] for side, scores in sides.items()} for name in before}
    summary = {**figures, "by_category": by_category, **summary}
    path = config.folder / run_folder.SUMMARY
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    console.print(comparison(before, after))
    console.print(
        "greedy answers to held-out questions; reward and EM of the steps above are of answers to training questions, "
        f"sampled at temperature {config.episode.temperature:g}, and so usually lower",
    )
    live.print_results(config, newest, console)
    console.print(f"{'summary':<8} {path}", soft_wrap=True)


def comparison(before: Scores, after: Scores) -> Table:
    shown = Table(title="held-out cities, greedy: before → after")
    shown.add_column("questions with")
    for name in ("n", "reward", "EM", "search depth"):
        shown.add_column(name, justify="right")
    for category, b in before.items():
        a = after[category]
        changes = (f"{b[key]:.2f} → {a[key]:.2f}" for key in ("reward", "em", "depth"))
        shown.add_row(category, str(int(b["count"])), *changes, style="bold" if category == "all" else None)
    return shown
