"""The claims of a study, tested on its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cusearch_async.study.plan import Claim, Measure, Plan, PlannedRun, Value, has, value_of
from cusearch_async.study.statistics import LEVEL, Difference, against_zero, contributions, corrected
from cusearch_async.study.tables import Tables

Verdict = Literal["holds", "leans to it", "not seen", "leans against it", "the opposite holds", "one seed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A claim by one measure, in one setting of what it does not name."""

    claim: Claim
    measure: Measure
    context: tuple[tuple[str, Any], ...]
    """The setting: the values of what varies in the part and the claim does not name."""
    found: Difference

    @property
    def verdict(self) -> Verdict:
        """It holds by Holm's p-value over all claims by the same measure, and leans to it by its own alone."""
        if self.found.estimate.seeds < 2:
            return "one seed"
        is_positive = self.found.estimate.mean > 0
        if self.found.p_holm is not None and self.found.p_holm <= 1 - LEVEL:
            return "holds" if is_positive else "the opposite holds"
        if self.found.p is not None and self.found.p <= 1 - LEVEL:
            return "leans to it" if is_positive else "leans against it"
        return "not seen"


def outcomes_of(plan: Plan, tables: Tables) -> dict[Measure, list[Outcome]]:
    """By measure, in the order of the plan; without those whose runs are still to do."""
    found: dict[Measure, list[Outcome]] = {}
    done = [run for run in plan.runs.values() if tables.statuses.get(run.id) == "done"]
    for claim in plan.claims:
        for measure in claim.measures or plan.study.primary:
            found.setdefault(measure, []).extend(_tested(claim, measure, plan, done, tables))
    return {
        measure: [replace(one, found=f) for one, f in zip(tested, corrected([t.found for t in tested]), strict=True)]
        for measure, tested in found.items()
    }


def _tested(
    claim: Claim, measure: Measure, plan: Plan, done: Sequence[PlannedRun], tables: Tables
) -> Iterator[Outcome]:
    named = {*claim.better, *claim.than, *claim.more_where}
    free = [key for key in plan.differing(claim.part) if key not in named]
    contexts: dict[tuple[tuple[str, Any], ...], list[PlannedRun]] = {}
    for run in done:
        if claim.part in run.parts:
            contexts.setdefault(tuple((key, value_of(run.config, key)) for key in free), []).append(run)
    for context, runs in contexts.items():
        rows = _claimed(claim, measure, runs, tables)
        if rows:
            yield Outcome(claim, measure, context, against_zero(np.array(rows)))


def _claimed(claim: Claim, measure: Measure, runs: Sequence[PlannedRun], tables: Tables) -> list[NDArray[np.float64]]:
    """Of each seed that can tell [questions]: what is claimed to be above 0 on average."""
    if not claim.more_where:
        return list(_gains(claim, measure, runs, tables).values())
    where, elsewhere = (
        _gains(claim, measure, [run for run in runs if has(run.config, claim.more_where) == is_there], tables)
        for is_there in (True, False)
    )
    return [where[seed] - elsewhere[seed] for seed in where if seed in elsewhere]


def _gains(
    claim: Claim, measure: Measure, runs: Sequence[PlannedRun], tables: Tables
) -> dict[int, NDArray[np.float64]]:
    """Seed -> [questions] the measure of the better run, less that of the one it is compared with."""
    better = _by_seed(runs, claim.better, measure, tables)
    if not claim.than:
        return better
    than = _by_seed(runs, claim.than, measure, tables)
    return {seed: better[seed] - than[seed] for seed in better if seed in than}


def _by_seed(
    runs: Sequence[PlannedRun], settings: dict[str, Value], measure: Measure, tables: Tables
) -> dict[int, NDArray[np.float64]]:
    """Of the runs with these settings: seed -> [questions] the measure."""
    answers = tables.answers
    found = [run for run in runs if has(run.config, settings)]
    return {run.seed: contributions(answers[answers["run"] == run.id], measure) for run in found}
