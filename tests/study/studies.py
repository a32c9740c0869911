"""A small study, and tables as its runs would leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cusearch_async.study.plan import Plan, read_plan
from cusearch_async.study.tables import Tables

FILE = """
[study]
name = "small"
configs = ["atlas"]
baseline = { "method.name" = "grpo_full" }

[settings]
"run.steps" = 4
"eval.every" = 2
"eval.in_order" = true
"eval.questions_per_category" = 8

[[part]]
name = "methods"
seeds = 3
[part.grid]
"method.name" = ["grpo_full", "sdga_phase"]
"retriever.stochastic" = [true, false]

[[part]]
name = "staleness"
seeds = 2
baseline = { "pool.max_staleness" = 2 }
[part.grid]
"method.name" = ["sdga_phase"]
"pool.max_staleness" = [0, 2]
"""
QUESTIONS = 40


def plan_of(folder: Path, *changes: tuple[str, str]) -> Plan:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return read_plan(path)


def one_of(plan: Plan, method: str, stochastic: bool, seed: int) -> str:
    """A run of the part "methods"."""
    (found,) = (
        run.id
        for run in plan.of("methods")
        if (run.config.method.name, run.config.retriever.stochastic, run.seed) == (method, stochastic, seed)
    )
    return found


def tables_of(plan: Plan, effect: float = 0.2, failed: tuple[str, ...] = (), noise: float = 0.02) -> Tables:
    """Every method starts at an EM of 0.2; grpo_full ends at about 0.4, others at that and `effect`."""
    rows: list[dict[str, Any]] = []
    answers, steps = [], []
    for run in plan.runs.values():
        row = {"run": run.id, "seed": run.seed, "parts": " ".join(run.parts), "wall_s": 100.0}
        row |= {key: _value(run.config, key) for key in plan.varied}
        if run.id in failed:
            rows.append(row | {"status": "failed", "reason": "the engine died"})
            continue
        rng = np.random.default_rng([run.seed, 7])
        end = 0.4 + effect * (run.config.method.name != "grpo_full") + noise * rng.standard_normal()
        difficulty = np.random.default_rng(1).random(QUESTIONS)
        for version, share in ((0, 0.2), (2, (0.2 + end) / 2), (4, end)):
            em = (difficulty < share).astype(np.int8)
            of_version = {"run": run.id, "version": version, "question": np.arange(QUESTIONS), "em": em}
            answers.append(pd.DataFrame(of_version | {"depth": 2, "needed": 1}))
        costs = dict.fromkeys(("trajectories", "trained", "trained_tokens", "sampled_tokens", "steps_s"), 100.0)
        measures = {
            "em_last": em.mean(),
            "em_sampled": 0.3,
            "depth_last": 2.0,
            "over_search": 1.0,
            "depth_growth": 0.0,
            "em_first": 0.2,
        }
        for step in range(4):
            by_depth = {"by_depth/mismatch_kl": "[0.001, NaN]", "by_depth/ess": "[0.99, NaN]", "staleness/mean": 1.0}
            of_pool = {"depth/mean": 1.5, "depth/mean_trained": 2.0, "reward/all": 0.4, "train/tokens": 500.0}
            of_pool |= {"groups/singleton_share": 0.1, "groups/zero_variance_share": 0.3}
            steps.append({"run": run.id, "step": step, "depth/selected": "[20, 40]"} | by_depth | of_pool)
        rows.append(row | {"status": "done", "reason": ""} | measures | costs)
    return Tables(
        pd.DataFrame(rows), pd.DataFrame(steps), pd.concat(answers, ignore_index=True) if answers else pd.DataFrame()
    )


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
