"""A rollout worker against vLLM alone: tokens sampled per CPU second, same model, turns, seeds and log-probabilities.

    python -m tests.bench.bench_rollout

The worker is the real one, with retriever and Redis as processes, at 192 episodes in flight; measured from the end of
the first 192 episodes until 384 more have ended, while it goes on. vLLM alone is its `LLMEngine` with the turns that
the worker has sampled then, those before and those after, 192 at once, with the same settings; measured from the end of
as many turns until as many more have ended, while it goes on: with the engine in a process of its own, as vLLM starts
it by default and the worker has it, and with both in one process.
PREVIOUS is the worker of an earlier commit. All share one core, and take turns; CPU seconds are those of a side's own
process and its engine's, not of retriever and Redis. Medians of ROUNDS rounds, the first of which does not count, and
of the ratios within a round; into runs/bench/learner.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import load_config
from cusearch_async.overrides import settings_in
from tests.bench import figures
from tests.bench.bench_learner import OUTPUT, PREVIOUS, ROOT, Side, ask, previous_tree, started
from tests.conftest import free_port

ROUNDS = 5
POOL = 192
ATLAS = str(ROOT / "configs" / "atlas.toml")
SIDES = {
    "worker": Side(sys.executable, "rollout_case.py", "worker", ROOT),
    "raw": Side(sys.executable, "rollout_case.py", "raw", ROOT),
    "raw, one process": Side(sys.executable, "rollout_case.py", "raw-one-process", ROOT),
}

EPISODES = 5
"""Pools' in a round: before, measured (two), after, and in flight at its end."""

Spent = dict[str, float]
NONE: Mapping[str, Sequence[str]] = {}


def measure(
    sides: Mapping[str, Side],
    count: int,
    pool: int = POOL,
    configs: Sequence[str] = (ATLAS,),
    settings: Sequence[str] = (),
    settings_of: Mapping[str, Sequence[str]] = NONE,
) -> dict[str, list[Spent]]:
    """What each side has spent in each of `count` rounds, with `pool` episodes in flight. `settings_of` are those that
    a side has besides."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        given = {
            "run.folder": folder / "run",
            "redis.url": f"redis://127.0.0.1:{free_port()}/0",
            "retriever.url": f"http://127.0.0.1:{free_port()}",
            "rollout.max_episodes": pool,
            "pool.max_staleness": -(-pool * EPISODES // _size(configs, settings)),  # tickets for all of a round
        }
        others = [word for key, value in settings_in(settings) if key[2:] not in given for word in (key, str(value))]
        overrides = [*(word for key, value in given.items() for word in (f"--{key}", str(value))), *others]
        config = load_config([Path(name) for name in configs], overrides)
        stack.enter_context(Fleet(config)).start_services()
        running = {}
        for number, (name, side) in enumerate(sides.items()):
            case, own_turns = folder / f"case-{number}.json", folder / f"turns-{number}.json"
            turns = str(folder / "turns.json" if side.tree == ROOT else own_turns)  # another commit's
            own = [*overrides, *settings_of.get(name, ())]
            case.write_text(json.dumps({"configs": configs, "overrides": own, "turns": turns, "pool": pool}))
            running[name] = stack.enter_context(started(side, case))
        rounds = [{name: json.loads(ask(process)) for name, process in running.items()} for _ in range(count)]
    return {name: [of_round[name] for of_round in rounds] for name in running}


def _size(configs: Sequence[str], settings: Sequence[str]) -> int:
    return load_config([Path(name) for name in configs], settings).pool.size


def rates(spent: list[Spent]) -> list[float]:
    """Tokens per CPU second of each round that counts."""
    return [s["tokens"] / (s["own_s"] + s["engine_s"]) for s in spent[1:]]


def over(found: Mapping[str, list[Spent]], other: str) -> float:
    """The worker's rate over another side's in the same round, median."""
    pairs = zip(rates(found["worker"]), rates(found[other]), strict=True)
    return statistics.median(worker / of_other for worker, of_other in pairs)


def table(found: Mapping[str, list[Spent]]) -> Table:
    printed = Table(title="tokens sampled per CPU second: median (least to most)")
    for heading in ("", "tokens / CPU s", "own CPU s / 1000", "engine's CPU s / 1000", "tokens / wall s"):
        printed.add_column(heading, justify="right" if heading else "left")
    for name, spent in found.items():
        of_rounds, counted = rates(spent), spent[1:]
        per_thousand = [
            f"{statistics.median(1000 * s[part] / s['tokens'] for s in counted):.3f}" for part in ("own_s", "engine_s")
        ]
        wall = f"{statistics.median(s['tokens'] / s['wall_s'] for s in counted):.0f}"
        range_ = f"{statistics.median(of_rounds):.0f} ({min(of_rounds):.0f}-{max(of_rounds):.0f})"
        printed.add_row(name, range_, *per_thousand, wall)
    return printed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as tree:
        previous = Side(sys.executable, "rollout_case.py", "worker", previous_tree(Path(tree)))
        found = measure(SIDES | {f"worker of {PREVIOUS}": previous}, arguments.rounds)
    ratios = {
        "rollout_over_raw_vllm": over(found, "raw"),
        "rollout_over_raw_vllm_in_one_process": over(found, "raw, one process"),
        "rollout_over_previous": over(found, f"worker of {PREVIOUS}"),
    }
    spent: dict[str, Any] = {"rollout_spent": found}
    figures.add(arguments.out, ratios | spent)
    Console().print(table(found))
    for name, value in ratios.items():
        Console().print(f"{name} {value:.2f}")
    Console().print(f"figures in {arguments.out}")


if __name__ == "__main__":
    main()
