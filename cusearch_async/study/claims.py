"""The claims of a study, tested on its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cusearch_async.study.plan import Claim, Context, Measure, Plan, PlannedRun, has
from cusearch_async.study.statistics import LEVEL, Estimate, contributions, estimate, holm
from cusearch_async.study.tables import Tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """A claim by one measure, in one setting of what it does not name."""

    claim: Claim
    measure: Measure
    context: Context
    """The values of what varies in the part and the claim does not name."""
    found: Estimate
    """Of the seeds whose runs are all done."""
    planned: int
    """Seeds."""
    is_over: bool
    """All its runs are done or have failed."""
    p_holm: float | None = None
    reported: float | None = None
    """The difference that somebody else has found for it."""

    @property
    def verdict(self) -> str:
        """It holds by Holm's p-value over all claims by the same measure, and leans to it by its own alone. There is no
        verdict before the last seed: who may stop at any seed finds something sooner or later; nor one of fewer seeds
        than were planned: who may leave some out finds it too."""
        if not self.is_over:
            return "not over"
        lost = self.planned - self.found.seeds
        if lost:
            return f"{lost} of {self.planned} seeds failed"
        if self.found.seeds < 2:
            return "too few seeds"
        is_positive = self.found.mean > 0
        if self.p_holm is not None and self.p_holm <= 1 - LEVEL:
            return "holds" if is_positive else "the opposite holds"
        if self.found.p is not None and self.found.p <= 1 - LEVEL:
            return "leans to it" if is_positive else "leans against it"
        return "not seen"


def outcomes_of(plan: Plan, tables: Tables) -> dict[Measure, list[Outcome]]:
    """By measure, in the order of the plan. Those without data count in Holm's correction."""
    found: dict[Measure, list[Outcome]] = {}
    for claim in plan.claims:
        for measure in claim.measures or plan.study.primary:
            found.setdefault(measure, []).extend(_tested(claim, measure, plan, tables))
    return {
        measure: [replace(one, p_holm=p) for one, p in zip(tested, holm([one.found for one in tested]), strict=True)]
        for measure, tested in found.items()
    }


def _tested(claim: Claim, measure: Measure, plan: Plan, tables: Tables) -> Iterator[Outcome]:
    for context, runs in plan.contexts(claim.part, claim.named).items():
        about = [run for run in runs if any(has(run, side) for side in claim.sides)]
        rows = _claimed(claim, measure, runs, tables)
        is_over = all(run.id in tables.statuses for run in about)
        there = (one for one in claim.reported if one.measure == measure and has(runs[0], one.where))
        reported = next((one.difference for one in there), None)
        seeds = len({run.seed for run in about})
        yield Outcome(claim, measure, context, estimate(np.array(rows)), seeds, is_over, reported=reported)


def _claimed(claim: Claim, measure: Measure, runs: Sequence[PlannedRun], tables: Tables) -> list[NDArray[np.float64]]:
    """Of each seed with all its runs [questions]: what is claimed to be above 0 on average."""
    first, *others = (_gains(claim, measure, half, tables) for half in claim.halves(runs))
    return [first[seed] - sum(one[seed] for one in others) for seed in first if all(seed in one for one in others)]


def _gains(
    claim: Claim, measure: Measure, runs: Sequence[PlannedRun], tables: Tables
) -> dict[int, NDArray[np.float64]]:
    """Seed -> [questions] the measure of the better run, less that of the one it is compared with."""
    better, *others = (
        {
            run.seed: contributions(tables.answers_of(run), measure)
            for run in runs
            if has(run, side) and tables.statuses.get(run.id) == "done"
        }
        for side in claim.sides
    )
    return {s: better[s] - sum(one[s] for one in others) for s in better if all(s in one for one in others)}
