"""The tables of a study, from which the report is made.

<study folder>/runs.parquet, runs.csv   a row per run: settings, seed, status, measures, costs
<study folder>/steps.parquet            a row per run and learner step: metrics
<study folder>/answers.parquet          a row per run, scored version and held-out question"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.data.questions import load_eval_questions
from cusearch_async.errors import ConfigError, packages_of
from cusearch_async.files import write_file
from cusearch_async.metrics.files import read_metrics, read_scores
from cusearch_async.run.folder import METRICS, SCORES
from cusearch_async.run.history import epochs_and_steps, read_starts
from cusearch_async.study.plan import Plan, PlannedRun, found_in, plain

with packages_of("study"):
    import pandas as pd
    import pyarrow  # noqa: F401  (pandas reads and writes parquet with it)

STEP_METRICS = (
    *("reward/all", "reward/trained", "reward/em", "depth/mean", "depth/mean_trained"),
    *("groups/singleton_share", "groups/zero_variance_share", "staleness/mean", "staleness/max"),
    *("selection/phase", "selection/singleton_mass", "train/tokens", "train/grad_norm", "train/entropy"),
    *("train/kl_reference", "off_policy/mismatch_kl", "off_policy/ess", "time/step_s", "episode/sampled_tokens"),
)
"""Metrics that are kept of every step, where it has them."""
BY_DEPTH = ("depth/generated", "depth/selected", "by_depth/mismatch_kl", "by_depth/ess")
"""The same, one number per depth."""
MEASURES = ("em_first", "em_last", "em_area", "em_sampled", "depth_last", "depth_growth", "over_search")
"""Of a run that is done, columns of the runs."""
COSTS = ("trajectories", "trained", "trained_tokens", "sampled_tokens", "steps_s")


@dataclass(frozen=True)
class Tables:
    runs: pd.DataFrame
    steps: pd.DataFrame
    answers: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Tables:
        """Empty where there are none yet. Raises: ConfigError for files that cannot be read."""
        tables = []
        for name in ("runs", "steps", "answers"):
            path = folder / f"{name}.parquet"
            try:
                tables.append(pd.read_parquet(path) if path.exists() else pd.DataFrame())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        return cls(*tables)

    def with_run(self, other: Tables) -> Tables:
        """With one more run, in place of an earlier row of it."""
        (added,) = other.runs["run"]
        merged = []
        for name in ("runs", "steps", "answers"):
            old, new = getattr(self, name), getattr(other, name)
            kept = old[old["run"] != added] if len(old) else old
            parts = [part for part in (kept, new) if len(part)]
            merged.append(pd.concat(parts, ignore_index=True) if parts else new)
        return Tables(*merged)

    def write(self, folder: Path) -> None:
        """The runs last: a run that is in them is complete in the others."""
        for name in ("answers", "steps", "runs"):
            write_file(folder / f"{name}.parquet", getattr(self, name).to_parquet(index=False, compression="zstd"))
        self.write_csv(folder)

    def write_csv(self, folder: Path) -> None:
        write_file(folder / "runs.csv", self.runs.to_csv(index=False).encode())

    @cached_property
    def statuses(self) -> dict[str, str]:
        """Run -> `done` or `failed`."""
        return dict(zip(self.runs["run"], self.runs["status"], strict=True)) if len(self.runs) else {}

    @property
    def failures(self) -> dict[str, str]:
        """Failed run -> its reason."""
        rows = zip(self.runs["run"], self.runs["reason"], strict=True) if len(self.runs) else ()
        return {run: reason for run, reason in rows if self.statuses[run] == "failed"}

    def of(self, runs: Sequence[PlannedRun]) -> pd.DataFrame:
        """The rows of these runs, with all columns also where no run is done yet."""
        columns = dict.fromkeys((*self.runs.columns, "run", "status", "reason", "wall_s", *MEASURES, *COSTS))
        table = self.runs.reindex(columns=list(columns))
        return table[table["run"].isin([run.id for run in runs])]

    def answers_of(self, run: PlannedRun) -> pd.DataFrame:
        """Of a run that is done."""
        return self._answers[run.id]

    def steps_of(self, run: PlannedRun) -> pd.DataFrame:
        """Of a run that is done."""
        return self._steps[run.id]

    @cached_property
    def _answers(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.answers.groupby("run")))

    @cached_property
    def _steps(self) -> dict[str, pd.DataFrame]:
        return dict(iter(self.steps.groupby("run")))


def failed(run: PlannedRun, plan: Plan, reason: str, wall_s: float) -> Tables:
    """The row of a run that failed."""
    row = _settings(run, plan) | {"status": "failed", "reason": reason, "wall_s": wall_s}
    return Tables(pd.DataFrame([row]), pd.DataFrame(), pd.DataFrame())


def done(run: PlannedRun, plan: Plan, folder: Path, wall_s: float) -> Tables:
    """Of a run that has ended well, from its folder. Raises: ConfigError when it is not complete."""
    rows = read_metrics(folder / METRICS)
    scores = read_scores(folder / SCORES, epochs_and_steps(folder))
    steps, scored = run.config.run.steps, [row["step"] for row in scores]
    if len(rows) != steps or scored != _versions(run):
        raise ConfigError(f"it has {len(rows)} of {steps} steps, and scores of versions {scored}")
    answers = _answers(run, scores)
    step_rows = [{"run": run.id, "step": row["step"], **_metrics(row)} for row in rows]
    measures = _measures(rows, scores, answers) | _costs(rows)
    commits = " ".join(dict.fromkeys(start.commit or "unknown" for start in read_starts(folder)))
    row = _settings(run, plan) | {"status": "done", "reason": "", "wall_s": wall_s, "commits": commits} | measures
    return Tables(pd.DataFrame([row]), pd.DataFrame(step_rows), answers)


def lacks_a_score(run: PlannedRun, folder: Path) -> bool:
    """Whether it has its last score and not all before, or not all steps: `launch` has nothing left to do there."""
    scored = [row["step"] for row in read_scores(folder / SCORES, epochs_and_steps(folder))]
    lacks = scored != _versions(run) or len(read_metrics(folder / METRICS)) < run.config.run.steps
    return scored[-1:] == [run.config.run.steps] and lacks


def _versions(run: PlannedRun) -> list[int]:
    """That are scored."""
    return list(range(0, run.config.run.steps + 1, run.config.eval.every))


def _settings(run: PlannedRun, plan: Plan) -> dict[str, Any]:
    cells = {key: _cell(found_in(run.config, key)) for key in plan.varied}
    return {"run": run.id, "seed": run.seed, "parts": " ".join(run.parts), **cells}


def _cell(value: Any) -> Any:
    """As a column of a table holds it."""
    found = None if value is None else plain(value)
    return ", ".join(map(str, found)) if isinstance(found, list) else found


def _metrics(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: np.float32(row[name]) for name in STEP_METRICS if name in row}
    return kept | {name: json.dumps(row[name]) for name in BY_DEPTH if name in row}


def _answers(run: PlannedRun, scores: list[dict[str, Any]]) -> pd.DataFrame:
    questions = load_eval_questions(run.config)
    needed = [-1 if question.evidence is None else len(question.evidence) for question in questions]
    parts = []
    for row in scores:
        each = row["each"]
        if len(each["em"]) != len(questions):
            raise ConfigError(f"version {row['step']} was scored on {len(each['em'])} of {len(questions)} questions")
        if each["question_id"] != [question.id for question in questions]:
            raise ConfigError(f"version {row['step']} was scored on other questions than eval.suite has now")
        of_version = {
            "run": run.id,
            "version": np.int32(row["step"]),
            "question": np.arange(len(questions), dtype=np.int32),
            "em": np.array(each["em"], dtype=np.int32),
            "depth": np.array(each["depth"], dtype=np.int32),
            "needed": np.array(needed, dtype=np.int32),
        }
        parts.append(pd.DataFrame(of_version))
    return pd.concat(parts, ignore_index=True)


def area_weights(versions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights [V], which sum to 1, of the trapezoidal mean of a curve over ascending `versions` [V]."""
    if len(versions) == 1:
        return np.ones(1)
    gaps = np.diff(versions)
    weights: NDArray[np.float64] = np.convolve(gaps, [0.5, 0.5]) / gaps.sum()
    return weights


def _measures(rows: list[dict[str, Any]], scores: list[dict[str, Any]], answers: pd.DataFrame) -> dict[str, float]:
    curve = np.array([row["all"]["em"] for row in scores])
    last = answers[answers["version"] == answers["version"].max()]
    known = last[last["needed"] >= 0]
    end = rows[-max(1, len(rows) // 5) :]
    return {
        "em_first": curve[0],
        "em_last": curve[-1],
        "em_area": float(area_weights(np.array([row["step"] for row in scores])) @ curve),
        "em_sampled": float(np.mean([row["reward/em"] for row in end])),
        "depth_last": float(last["depth"].mean()),
        "depth_growth": float(scores[-1]["all"]["depth"] - scores[0]["all"]["depth"]),
        "over_search": float((known["depth"] - known["needed"]).clip(lower=0).mean()) if len(known) else float("nan"),
    }


def _costs(rows: list[dict[str, Any]]) -> dict[str, float]:
    generated = [sum(row["depth/generated"]) for row in rows]
    return {
        "trajectories": float(sum(generated)),
        "trained": float(sum(sum(row["depth/selected"]) for row in rows)),
        "trained_tokens": float(sum(row.get("train/tokens", 0.0) for row in rows)),
        "sampled_tokens": float(sum(n * row["episode/sampled_tokens"] for n, row in zip(generated, rows, strict=True))),
        "steps_s": float(sum(row["time/step_s"] for row in rows)),
    }
