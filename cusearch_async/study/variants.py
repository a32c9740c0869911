"""The combinations of settings that a part of a study compares, each with the runs of all its seeds; and runs compared
where they have trained on as many usable trajectories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cusearch_async.study.plan import Part, Plan, PlannedRun, grouped, has, is_value
from cusearch_async.study.statistics import Estimate, Matrix, by_version, contributions, estimate
from cusearch_async.study.tables import Tables

LONGEST = 40
"""Characters of a value in names."""


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
    run = variant.planned[0]
    grids = {key: part.grid[key] for key in own if key in part.grid}
    return [
        next((n for n, value in enumerate(grid) if is_value(run, key, value)), len(grid)) for key, grid in grids.items()
    ]


def _variant(name: str, baseline: dict[str, Any], runs: Sequence[PlannedRun], tables: Tables) -> Variant:
    planned = sorted(runs, key=lambda run: run.seed)
    statuses = [tables.statuses.get(run.id) for run in planned]
    done = [run for run, status in zip(planned, statuses, strict=True) if status == "done"]
    is_baseline = bool(baseline) and has(planned[0], baseline)
    return Variant(name, is_baseline, planned, done, statuses.count("failed"))


def said(settings: Mapping[str, Any]) -> str:
    """Methods by their names, other settings with the last part of their key."""
    return ", ".join(_said(key, value) for key, value in settings.items())


def _said(key: str, value: Any) -> str:
    name = key.rsplit(".", maxsplit=1)[-1]
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return _short(value) if key == "method.name" else f"{name} {_short(value)}"


def _short(value: Any) -> str:
    """A prompt template is a setting, too."""
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({xxhash.xxh3_64_hexdigest(str(value).encode())[:6]})"


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


def usable_of(run: PlannedRun, tables: Tables) -> NDArray[np.int64]:
    """Usable trajectories of each learner step [steps] of a run that is done: those of which two or more of their group
    are selected and rewards differ, so that they have a group-relative advantage."""
    steps = tables.steps_of(run).sort_values("step")
    selected = np.array([sum(json.loads(row)) for row in steps["depth/selected"]])
    shares = 1 - steps["groups/singleton_share"].to_numpy(float) - steps["groups/zero_variance_share"].to_numpy(float)
    usable: NDArray[np.int64] = np.rint(selected * shares).astype(np.int64)
    return usable


def compare_at_equal(runs: Sequence[PlannedRun], others: Sequence[PlannedRun], tables: Tables) -> Estimate:
    """Held-out EM of runs less that of others, over the seeds that both have, each pair where both have trained on as
    many usable trajectories: as many as the one with fewer of them has in the end."""
    pairs = [(run, other) for run in runs for other in others if run.seed == other.seed]
    rows = []
    for pair in pairs:
        count = min(int(usable_of(run, tables).sum()) for run in pair)
        first, second = (em_after(run, tables, count) for run in pair)
        rows.append(first - second)
    return estimate(np.array(rows))


def em_after(run: PlannedRun, tables: Tables, count: int) -> NDArray[np.float64]:
    """EM of each held-out question [questions] when a run had trained on `count` usable trajectories: of the newest
    version that had not trained on more, or linearly in between that and the next one scored."""
    versions, em = by_version(tables.answers_of(run), "em")
    trained = np.cumsum([0, *usable_of(run, tables)])[versions]
    newest = int(np.searchsorted(trained, count, side="right")) - 1
    following = min(newest + 1, len(versions) - 1)
    gap = trained[following] - trained[newest]
    share = (count - trained[newest]) / gap if gap else 0.0
    found: NDArray[np.float64] = (1 - share) * em[newest] + share * em[following]
    return found
