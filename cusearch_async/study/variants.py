"""The combinations of settings that a part of a study compares, each with the runs of all its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cusearch_async.study.plan import Part, Plan, PlannedRun, grouped, has, plain, value_of
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
    """The combinations of a part by the settings that they share with their baseline: the baseline, then the others in
    the order of the grid."""
    baseline = plan.baseline(part)
    own = list(baseline) or plan.differing(part.name) or list(plan.varied[:1])
    found = {}
    for context, runs in plan.contexts(part.name, own).items():
        sets = [
            _variant(said(dict(settings)), baseline, of_all_seeds, tables)
            for settings, of_all_seeds in grouped(runs, own).items()
        ]
        found[said(dict(context))] = sorted(sets, key=lambda one: (not one.is_baseline, _place(one, part, own)))
    return found


def _place(variant: Variant, part: Part, own: Sequence[str]) -> list[int]:
    """Of its values in the grid of the part, which may share runs with a part before it."""
    values = {key: plain(value_of(variant.planned[0].config, key)) for key in own if key in part.grid}
    return [list(part.grid[key]).index(value) for key, value in values.items()]


def _variant(name: str, baseline: dict[str, Any], runs: Sequence[PlannedRun], tables: Tables) -> Variant:
    planned = sorted(runs, key=lambda run: run.seed)
    statuses = [tables.statuses.get(run.id) for run in planned]
    done = [run for run, status in zip(planned, statuses, strict=True) if status == "done"]
    is_baseline = bool(baseline) and has(planned[0].config, baseline)
    return Variant(name, is_baseline, planned, done, statuses.count("failed"))


def said(settings: Mapping[str, Any]) -> str:
    """Methods by their names, other settings with the last part of their key."""
    return ", ".join(_said(key, value) for key, value in settings.items())


def _said(key: str, value: Any) -> str:
    name = key.rsplit(".", maxsplit=1)[-1]
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return str(value) if key == "method.name" else f"{name} {value}"


def matrix(runs: Sequence[PlannedRun], measure: str, tables: Tables) -> Matrix:
    """[seeds, questions] of runs that are done."""
    return np.array([contributions(tables.answers_of(run), measure) for run in runs])


def compare(runs: Sequence[PlannedRun], others: Sequence[PlannedRun], measure: str, tables: Tables) -> Estimate:
    """Runs that are done less others, over the seeds that both have."""
    seeds = sorted({run.seed for run in runs} & {run.seed for run in others})
    first, second = (
        matrix([run for seed in seeds for run in side if run.seed == seed], measure, tables) for side in (runs, others)
    )
    return estimate(first - second)
