"""`cusearch simulate CONFIG`: how fast a run would go with other numbers of workers, orders and bounds, without running
it. See `cusearch_async.simulation.events`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.arguments import add_config, parsed
from cusearch_async.config import Config, PoolConfig, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.files import refuse_unwritable, writing_output
from cusearch_async.simulation.durations import Durations, Troubles, recorded_durations, typical
from cusearch_async.simulation.events import Outcome, Simulation

AS_CONFIGURED = "as configured"
STEPS = 30
"""Of each simulated run, however long the run is."""
BUSY = 0.1
"""A learner that idles less binds the run."""
FULL = 0.5
"""Workers that are full for more of the time may bind it: those that hedge are full of what others have."""
FASTER = 0.85
"""They do where twice as many take less than this share of the time for a step."""


def _pair(what: str, is_right: Callable[[float, float], bool]) -> Callable[[str], tuple[float, float]]:
    def split(text: str) -> tuple[float, float]:
        one, other = map(float, text.split(","))
        return one, other

    return parsed(split, lambda pair: is_right(*pair) and all(map(math.isfinite, pair)), what)


def add(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    seconds = parsed(float, lambda value: 0 <= value < math.inf, "seconds of at least 0")
    text = "numbers of rollout workers, separated by commas; default: rollout.workers, half and twice as many"
    counts = parsed(lambda text: [int(n) for n in text.split(",")], lambda found: min(found) > 0, "numbers like 8,64")
    parser.add_argument("--workers", type=counts, help=text)
    parser.add_argument("--from", dest="source", type=Path, metavar="RUN_FOLDER", help="take the times of this run")
    episode = _pair("two numbers of seconds like 6,15", lambda median, p99: 0 < median <= p99)
    parser.add_argument("--episode-s", type=episode, metavar="MEDIAN,P99", help="seconds of an episode")
    parser.add_argument("--update-s", type=seconds, help="seconds of the learner's work in a step")
    parser.add_argument("--publish-s", type=seconds, help="seconds from the commit to the announced weights (1)")
    parser.add_argument("--load-s", type=seconds, help="seconds that an engine stands still to load weights (0.5)")
    hang = _pair("a probability and seconds like 1e-4,60", lambda chance, held: 0 <= chance <= 1 and held >= 0)
    parser.add_argument("--hang", type=hang, metavar="CHANCE,S", help="searches that hang, and how long")
    slow = _pair("a share and a factor like 0.02,5", lambda share, factor: 0 <= share <= 1 and factor >= 1)
    parser.add_argument("--slow", type=slow, metavar="SHARE,FACTOR", help="workers that are so many times slower")
    parser.add_argument("--mtbf-s", type=seconds, default=0.0, help="mean seconds until a worker dies; 0: never")
    parser.add_argument("--output", type=Path, help="write the figures to this .json file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raises: ConfigError."""
    config = load_config(arguments.config, overrides)
    if config.run.colocate:
        raise ConfigError("run.colocate: only a learner and workers that work at the same time are simulated")
    if arguments.output:
        refuse_unwritable(arguments.output, "--output", ".json")
    durations, troubles = _durations(arguments, config), _troubles(arguments)
    p99_s, console = float(np.quantile(durations.episode_s, 0.99)), Console()
    console.print(
        f"seconds: an episode {np.median(durations.episode_s):.1f}, 99 % below {p99_s:.1f}; an update "
        f"{durations.update_s.mean():.1f}, publishing {durations.publish_s:.1f}, loading {durations.load_s:.1f}; "
        f"hedged after {config.pool.hedge_after_s or p99_s:.1f}",
        soft_wrap=True,
    )
    runs = dict(changes(config, p99_s))

    @cache  # twice as many workers may be a row, too
    def simulated(name: str, workers: int) -> Outcome:
        return Simulation(runs[name], workers, durations, troubles, STEPS, config.run.seed).result()

    shown, found = _table(), []
    own = config.rollout.workers
    for workers in arguments.workers or sorted({max(1, own // 2), own, 2 * own}):
        for name, changed in runs.items():
            outcome = simulated(name, workers)
            binds = what_binds(changed.pool, outcome, partial(simulated, name, 2 * workers))
            found.append({"workers": workers, "pool": name, **asdict(outcome), "binds": binds})
            shown.add_row(*_row(workers, name, outcome))
        shown.add_row()
    if arguments.output:
        with writing_output(arguments.output, "--output"):
            arguments.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console.print(shown)
    for row in found:
        if row["pool"] == AS_CONFIGURED:
            console.print(f"as configured, {row['workers']} workers: {row['binds']}", soft_wrap=True)


def changes(config: Config, p99_s: float) -> Iterator[tuple[str, Config]]:
    """The run as it is configured, and with what lets it wait less."""

    def changed(pool: PoolConfig, **settings: object) -> Config:
        redis = config.redis.model_copy(update={"max_trajectories": None})  # as many as the pool needs
        return config.model_copy(update={"pool": pool.model_copy(update=settings), "redis": redis})

    pool = config.pool
    yield AS_CONFIGURED, config
    yield f"max_staleness {pool.max_staleness + 1}", changed(pool, max_staleness=pool.max_staleness + 1)
    hedged = pool.hedge_after_s or p99_s
    if pool.order == "ticket":
        yield "deferred", changed(pool, order="deferred", hedge_after_s=0.0)
    if pool.order != "oldest_complete" and not (pool.order == "deferred" and pool.hedge_after_s):
        yield "deferred, hedged", changed(pool, order="deferred", hedge_after_s=hedged)


def _durations(arguments: argparse.Namespace, config: Config) -> Durations:
    given = {name: getattr(arguments, name) for name in ("update_s", "publish_s", "load_s")}
    if arguments.source:
        known = asdict(recorded_durations(arguments.source, config))
    elif arguments.episode_s and arguments.update_s is not None:
        known = {"update_s": np.zeros(1), "searches": config.episode.s_max / 2, "publish_s": 1.0, "load_s": 0.5}
    else:
        raise ConfigError(
            "simulate needs times: --from RUN_FOLDER of a run with records, or --episode-s and --update-s"
        )
    if arguments.episode_s:
        known["episode_s"] = typical(*arguments.episode_s)
    in_episodes_s = known["load_s"] if arguments.source and not arguments.episode_s else 0.0
    given["update_s"] = None if given["update_s"] is None else np.array([given["update_s"]])
    known |= {name: value for name, value in given.items() if value is not None}
    return Durations(**known | {"stands_s": max(0.0, known["load_s"] - in_episodes_s)})


def _troubles(arguments: argparse.Namespace) -> Troubles:
    given = {name: getattr(arguments, name) for name in ("hang", "slow", "mtbf_s")}
    return Troubles(**{name: value for name, value in given.items() if value})


def what_binds(pool: PoolConfig, found: Outcome, with_twice_the_workers: Callable[[], Outcome]) -> str:
    if found.learner_idle < BUSY:
        return "the learner is always busy"
    if found.workers_full > FULL and with_twice_the_workers().step_s < FASTER * found.step_s:
        return f"workers are full {found.workers_full:.0%} of the time: more of them make it faster"
    slowest = " and the slowest episode" if pool.order == "ticket" else ""
    return f"both sides wait, for max_staleness = {pool.max_staleness}{slowest}"


def _table() -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("workers", justify="right")
    shown.add_column("pool", no_wrap=True)
    for name in ("step s", "learner idle", "workers idle", "staleness (most)", "waste", "an hour"):
        shown.add_column(name, justify="right", no_wrap=len(name) < 8)
    return shown


def _row(workers: int, name: str, found: Outcome) -> Iterator[str]:
    yield str(workers)
    yield name
    yield f"{found.step_s:.1f}"
    yield f"{found.learner_idle:.0%}"
    yield f"{found.workers_idle:.0%}"
    yield f"{found.staleness_mean:.1f} ({found.staleness_max})"
    yield f"{found.wasted:.1%}"
    yield f"{found.trajectories_per_hour:,.0f}"
