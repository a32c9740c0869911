"""LoRA against full fine-tuning: the demo with both, one seed after the other, scored on held-out cities.

    python -m tests.bench.bench_lora [--seeds 5] [--section.key value]...

Settings go to both kinds of run, except that LoRA has its own rank, alpha and learning rate. Figures go to
runs/bench/lora.json after every run; runs that are in it already, with the same settings, are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from cusearch_async.lifecycle.entry import split_overrides
from cusearch_async.overrides import settings_in
from tests.conftest import own_services

FOLDER = Path("runs/bench")
FIGURES = FOLDER / "lora.json"
KINDS = {"full": [], "lora": ["--learner.lora.rank", "16", "--learner.lora.alpha", "32", "--learner.lr", "3e-4"]}
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Seeds -> the 97.5 % quantile of Student's t with one degree of freedom less."""


def run_demo(kind: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Its held-out EM, and the seconds until its last step."""
    folder = FOLDER / f"lora-{kind}-{seed}"
    own = dict(settings_in(KINDS[kind]))
    shared = [word for name, value in settings_in(overrides) if name not in own for word in (name, str(value))]
    settings = ["--run.seed", str(seed), "--run.folder", str(folder), *own_services(), *shared, *KINDS[kind]]
    subprocess.run([sys.executable, "-m", "cusearch_async.cli.main", "demo", *settings], check=True)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {"em": summary["em_after"], "seconds": summary["wall_s"]}


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean over seeds."""
    half = STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def conclude(figures: dict[str, Any]) -> str:
    """Compares the seeds that both kinds have run with."""
    seeds = sorted(figures["full"].keys() & figures["lora"].keys())
    if len(seeds) < 2:
        return f"{len(seeds)} seeds have run with both; an interval needs two"
    full, lora = ([figures[kind][seed]["em"] for seed in seeds] for kind in KINDS)
    times = statistics.median(figures["lora"][seed]["seconds"] / figures["full"][seed]["seconds"] for seed in seeds)
    low, high = interval(full)
    mean = statistics.mean(lora)
    where = "within" if low <= mean <= high else "above" if mean > high else "below"
    return (
        f"held-out EM over {len(seeds)} seeds: full {statistics.mean(full):.3f} [{low:.3f}, {high:.3f}], "
        f"LoRA {mean:.3f}, which is {where} the interval; it took {times:.2f} times as long"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    own, overrides = split_overrides(sys.argv[1:])
    seeds = parser.parse_args(own).seeds
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    if figures.get("settings") != [overrides, KINDS]:
        figures = {"settings": [overrides, KINDS]} | {kind: {} for kind in KINDS}
    for seed in map(str, range(seeds)):
        for kind in KINDS:
            if seed not in figures[kind]:
                figures[kind][seed] = run_demo(kind, int(seed), overrides)
            FIGURES.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(conclude(figures))


if __name__ == "__main__":
    main()
