"""`make demo-lm` with several seeds, of the teacher, the warm start and the run: exact match before and after.

    python -m tests.bench.bench_lm [--seeds 3] [--no-speed] [--section.key value]...

Then the update against the same passes in plain torch, the worker against vLLM alone, and the first seed's run against
TRL's GRPOTrainer.

Figures go to runs/bench/lm.json after every seed; seeds that are in it already, of the same settings, are
not repeated, nor is what an interrupted comparison with TRL has left."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cusearch_async.lifecycle.children import die_with_parent
from cusearch_async.lifecycle.entry import split_overrides
from cusearch_async.metrics.files import read_metrics
from cusearch_async.replay.selection import RecordedStep
from cusearch_async.training.recorder import recorded
from tests.bench import bench_learner, bench_rollout, figures, lm_over_trl
from tests.bench.bench_learner import BARE, LEARNER, ROOT
from tests.bench.record_pools import write_pool
from tests.conftest import own_services

FOLDER = Path("runs/bench")
FIGURES = FOLDER / "lm.json"
CONFIGS = [str(ROOT / "runs" / "lm" / "laptop.toml"), "atlas-prose"]
"""Those of `make demo-lm`, which writes the first."""
ROUNDS = 3


def demo(seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run it once, from the demonstrations to the last score; what an interrupted one has left would shorten it."""
    folder, began = FOLDER / f"lm-{seed}", time.monotonic()
    variables = {
        "LM": str(folder),
        "SEED": str(seed),
        "ARGS": shlex.join([*own_services(), *overrides]),
        "RUN_ARGS": "--learner.keep_checkpoints 9",
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["make", "demo-lm", *(f"{name}={value}" for name, value in variables.items())]
    subprocess.run(command, check=True, preexec_fn=die_with_parent)  # its minutes are of two cores that it has alone
    minutes = (time.monotonic() - began) / 60
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return {
        "em_zero_shot": summary["em_baseline"],
        "em_warm": summary["em_before"],
        "em_rl": summary["em_after"],
        "depth": [summary[f"depth_{side}"] for side in ("baseline", "before", "after")],
        "paired_difference": summary["paired_difference"],
        "by_category": summary["by_category"],
        "seconds_per_step": statistics.median(row["time/step_s"] for row in rows),
        "minutes_total": minutes,
    }


def conclude(by_seed: dict[str, Any]) -> dict[str, Any]:
    """The figures of all seeds, as lists in their order."""
    names = ("em_zero_shot", "em_warm", "em_rl", "paired_difference", "seconds_per_step", "minutes_total")
    return {name: [found[name] for _, found in sorted(by_seed.items())] for name in names}


def speed(run: Path, overrides: list[str]) -> dict[str, Any]:
    """The update against the same passes in plain torch, on the pool of the run's last record; the worker, with as many
    episodes in flight as the staleness bound admits, against vLLM alone. CPU seconds, medians of the ratios of a
    round."""
    step = RecordedStep.read(run, max(recorded(run)))
    settings = [*overrides, "--model.path", step.config.model.location]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pool(folder / "pool.npz", step.selected(), step.recorded.advantages)
        pairs = zip(settings[::2], settings[1::2], strict=True)
        case = {
            "configs": CONFIGS,
            "settings": {name.removeprefix("--"): value for name, value in pairs},
            "pool": str(folder / "pool.npz"),
            "trajectories": len(step.record.selected),
        }
        updates = bench_learner.measure(case, {"learner": LEARNER, "bare": BARE}, folder, ROUNDS)
    sides = {name: bench_rollout.SIDES[name] for name in ("worker", "raw")}
    pool = step.config.pool
    in_flight = pool.size * (pool.max_staleness + 1)
    rollouts = bench_rollout.measure(sides, ROUNDS + 1, in_flight, CONFIGS, settings)
    return {
        "update_over_bare": bench_learner.over(updates, "bare"),
        "update_cpu_s": updates,
        "rollout_over_raw_vllm": bench_rollout.over(rollouts, "raw"),
        "rollout_spent": rollouts,
    }


def over_trl(made: Path, overrides: list[str]) -> dict[str, Any]:
    """The run in `made` against TRL's GRPOTrainer, from the same warm-started model."""
    settings = ["--model.path", str(made / "warm" / "model"), "--run.seed", "0", *own_services(), *overrides]
    return lm_over_trl.compare(made / "run", made / "over-trl", CONFIGS, settings)


def main() -> None:
    own, overrides = split_overrides(sys.argv[1:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="demos alone")
    arguments = parser.parse_args(own)
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    overrides = [part for word in overrides for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if known.get("overrides") != overrides:  # nothing of other settings may stand beside these
        known = {}
        FIGURES.unlink(missing_ok=True)
    by_seed = known.get("by_seed", {})
    for seed in map(str, range(arguments.seeds)):
        if seed not in by_seed:
            by_seed[seed] = demo(int(seed), overrides)
            figures.add(FIGURES, {"overrides": overrides, "by_seed": by_seed, **conclude(by_seed)})
    if arguments.speed:
        figures.add(FIGURES, speed(FOLDER / "lm-0" / "run", overrides))
        figures.add(FIGURES, over_trl(FOLDER / "lm-0", overrides))
    for seed, found in by_seed.items():
        low, high = found["paired_difference"]["interval"]
        print(
            f"seed {seed}: EM {found['em_zero_shot']:.2f} → {found['em_warm']:.2f} → {found['em_rl']:.2f}, "
            f"difference {found['paired_difference']['difference']:+.3f} [{low:+.3f}, {high:+.3f}], "
            f"{found['minutes_total']:.0f} min"
        )


if __name__ == "__main__":
    main()
