"""The combinations of settings that a part of a study compares, each with the runs of all its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cusearch_async.study.plan import Part, Plan, PlannedRun, grouped, has
from cusearch_async.study.statistics import Estimate, Matrix, contributions, estimate
from cusearch_async.study.tables import Tables


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    """Its settings among those that tell the baseline from the others."""
    is_baseline: bool
    planned: list[PlannedRun]
    done: list[PlannedRun]
    """By seed."""
    failed: int

    @property
    def seeds(self) -> str:
        """How many of its runs a row is of."""
        return f"{len(self.done)} of {len(self.planned)}" + (f" ({self.failed} failed)" if self.failed else "")


def variants_of(part: Part, plan: Plan, tables: Tables) -> dict[str, list[Variant]]:
    """The combinations of a part by the settings that they share with their baseline, in the order of the plan."""
    baseline = plan.baseline(part)
    own = list(baseline) or plan.differing(part.name) or list(plan.varied[:1])
    return {
        said(dict(context)): [
            _variant(said(dict(settings)), baseline, of_all_seeds, tables)
            for settings, of_all_seeds in grouped(runs, own).items()
        ]
        for context, runs in plan.contexts(part.name, own).items()
    }


def _variant(name: str, baseline: dict[str, Any], runs: Sequence[PlannedRun], tables: Tables) -> Variant:
    planned = sorted(runs, key=lambda run: run.seed)
    statuses = [tables.statuses.get(run.id) for run in planned]
    done = [run for run, status in zip(planned, statuses, strict=True) if status == "done"]
    is_baseline = bool(baseline) and has(planned[0].config, baseline)
    return Variant(name, is_baseline, planned, done, statuses.count("failed"))


def said(settings: Mapping[str, Any]) -> str:
    """Methods by their names, other settings with the last part of their key."""
    texts = [str(v) if k == "method.name" else f"{k.split('.')[-1]} {v}" for k, v in settings.items()]
    return ", ".join(texts)


def matrix(runs: Sequence[PlannedRun], measure: str, tables: Tables) -> Matrix:
    """[seeds, questions] of runs that are done."""
    return np.array([contributions(tables.answers_of(run), measure) for run in runs])


def compare(variant: Variant, baseline: Variant, measure: str, tables: Tables) -> Estimate:
    """`variant` less `baseline`, over the seeds that both have."""
    shared = {run.seed for run in variant.done} & {run.seed for run in baseline.done}
    first, second = (
        matrix([run for run in one.done if run.seed in shared], measure, tables) for one in (variant, baseline)
    )
    return estimate(first - second)
