"""A run of `make bench-lm` against TRL's GRPOTrainer: the same warm-started model, questions, retriever, episodes,
reward and cores, and as many seconds of training; the exact match of what each had reached by then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from pathlib import Path
from typing import Any

from cusearch_async.cli.parts.fleet import Fleet
from cusearch_async.config import Config, load_config
from cusearch_async.lifecycle.children import die_with_parent
from cusearch_async.metrics.drawing import pyplot
from cusearch_async.metrics.files import read_metrics
from cusearch_async.run import folder as run_folder
from cusearch_async.training.checkpoint import checkpoints_of
from tests.bench.bench_learner import ROOT, TRL

POINTS = 4
"""Models that TRL's side saves, evenly over the seconds."""
CASE, SAVED = "case.json", "saved.jsonl"
"""What `trl_lm.py` reads, and what it writes."""


def compare(run: Path, folder: Path, configs: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """`run` was made with `settings`, and has kept its checkpoints. Writes into `folder`, where TRL's models and the
    scores that an interrupted comparison with the same run has left are used."""

    def config_in(place: Path) -> Config:
        return load_config([Path(name) for name in configs], ["--run.folder", str(place), *settings])

    seconds = list(accumulate(row["time/step_s"] for row in read_metrics(run / "metrics.jsonl")))
    points = [
        {"step": step, "seconds": seconds[step - 1], "model": str(found.path / "model")}
        for step, found in checkpoints_of(config_in(run)).by_step().items()
    ]
    config = config_in(folder)
    if not has_trl(folder, seconds[-1]):
        run_folder.refuse_if_held(folder)
        shutil.rmtree(folder, ignore_errors=True)
    start = {"step": 0, "seconds": 0.0, "model": config.model.location}
    cores = {*config.rollout.cores, *config.learner.cores}
    with Fleet(config) as fleet:
        fleet.start_services()
        trained = train_with_trl(configs, settings, folder, seconds[-1], cores)
        curves = {"cusearch": [start, *points], "trl": [start, *trained]}
        found = {model: score(fleet, config, model) for model in {p["model"] for of in curves.values() for p in of}}
    curves = {side: [point | {"em": found[point["model"]]} for point in of_side] for side, of_side in curves.items()}
    hourly = {side: 3600 * config.pool.size * of[-1]["step"] / of[-1]["seconds"] for side, of in curves.items()}
    draw(curves, folder / "em.png")
    return {
        "trajectories_per_hour": hourly,
        "over_trl_end_to_end": hourly["cusearch"] / hourly["trl"],
        "em_over_seconds": curves,
    }


def has_trl(folder: Path, seconds: float) -> bool:
    """Whether TRL's side has all of its models there, of a run of exactly so many seconds."""
    saved = folder / "trl" / SAVED
    lines = saved.read_text(encoding="utf-8").splitlines() if saved.is_file() else []
    if not lines or json.loads(lines[-1])["seconds"] < seconds:
        return False
    return bool(json.loads((folder / "trl" / CASE).read_text(encoding="utf-8"))["seconds"] == seconds)


def train_with_trl(
    configs: Sequence[str], settings: Sequence[str], folder: Path, seconds: float, cores: AbstractSet[int]
) -> list[dict[str, Any]]:
    """The models it saves in so many seconds of training, each with its step and its seconds."""
    output = folder / "trl"
    if not has_trl(folder, seconds):
        run_trl(configs, settings, output, seconds, cores)
    return [json.loads(line) for line in (output / SAVED).read_text(encoding="utf-8").splitlines()]


def run_trl(
    configs: Sequence[str], settings: Sequence[str], output: Path, seconds: float, cores: AbstractSet[int] = frozenset()
) -> None:
    """On these cores alone, if any are named."""
    output.mkdir(parents=True)
    pairs = zip(settings[::2], settings[1::2], strict=True)
    case = {
        "configs": configs,
        "settings": {name.removeprefix("--"): value for name, value in pairs},
        "output": str(output),
        "seconds": seconds,
        "every_s": seconds / POINTS,
    }
    (output / CASE).write_text(json.dumps(case), encoding="utf-8")
    command = [TRL.python, str(ROOT / "tests" / "bench" / "trl_lm.py"), str(output / CASE)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}

    def alone() -> None:
        die_with_parent()  # its seconds are of cores that it has alone
        if cores:
            os.sched_setaffinity(0, cores)

    with (output / "log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True, preexec_fn=alone)


def score(fleet: Fleet, config: Config, model: str) -> float:
    """Exact match of the config's held-out questions, greedy."""
    name = f"eval_{Path(model).parent.name}-{Path(model).name}"
    output, begun = config.folder / f"{name}.json", config.folder / f"begun-{name}.json"
    if not output.exists():
        fleet.start_command(name, "eval", options=["--checkpoint", model, "--output", str(begun)])
        fleet.wait(lambda: fleet.has_ended(name))
        fleet.stop(name)
        begun.replace(output)
    return float(json.loads(output.read_text(encoding="utf-8"))["scores"]["all"]["em"])


def draw(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 4))
    for side, points in curves.items():
        axes.plot(
            [point["seconds"] / 60 for point in points], [point["em"] for point in points], marker="o", label=side
        )
    axes.set(xlabel="minutes of training on the same two cores", ylabel="exact match, 300 held-out questions")
    axes.legend()
    figure.savefig(path, dpi=120)
