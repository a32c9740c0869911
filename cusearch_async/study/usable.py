"""How much of what a run trained on can teach by comparison, and runs compared where they have trained on as much.

A selected trajectory is usable when two or more of its group are selected and their rewards differ: then it has a
group-relative advantage. The others are alone in their group, or in a flat one (`algorithm/advantages.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cusearch_async.study.plan import PlannedRun
from cusearch_async.study.statistics import Estimate, by_version, estimate
from cusearch_async.study.tables import Tables


def usable_of(run: PlannedRun, tables: Tables) -> NDArray[np.int64]:
    """Usable trajectories of each learner step [steps] of a run that is done."""
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
    """What each held-out question [questions] got when a run had trained on `count` usable trajectories: of the newest
    version that had not trained on more, or linearly in between that and the next one scored."""
    versions, em = by_version(tables.answers_of(run), "em")
    trained = np.cumsum([0, *usable_of(run, tables)])[versions]
    newest = int(np.searchsorted(trained, count, side="right")) - 1
    following = min(newest + 1, len(versions) - 1)
    gap = trained[following] - trained[newest]
    share = (count - trained[newest]) / gap if gap else 0.0
    found: NDArray[np.float64] = (1 - share) * em[newest] + share * em[following]
    return found
