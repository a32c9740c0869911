"""Of what a run trained on, how much has a group-relative advantage; and runs compared where that is equal."""

from __future__ import annotations

import numpy as np
import pytest

from cusearch_async.study.tables import Tables
from cusearch_async.study.variants import compare_at_equal, em_after, usable_of
from tests.study.studies import QUESTIONS, plan_of, tables_of


@pytest.fixture
def plan(tmp_path):
    return plan_of(tmp_path)


def with_shares(tables, method_of, **flat):
    """Tables whose steps have 60 selected, none alone, and of each method such a share in flat groups."""
    shares = tables.steps["run"].map(method_of).map(flat)
    columns = {"groups/singleton_share": 0.0, "groups/zero_variance_share": shares.astype(np.float32)}
    return Tables(tables.runs, tables.steps.assign(**columns), tables.answers)


def test_usable_is_what_is_neither_alone_nor_in_a_flat_group(plan):
    tables = tables_of(plan)  # of 60 selected a tenth is alone and three tenths are flat
    run = plan.of("methods")[0]
    assert usable_of(run, tables).tolist() == [36] * 4
    late = tables.steps.assign(**{"groups/singleton_share": tables.steps["step"] / 10.0})
    shuffled = Tables(tables.runs, late.sample(frac=1, random_state=1), tables.answers)
    assert usable_of(run, shuffled).tolist() == [42, 36, 30, 24], "in the order of the steps"


def test_what_a_run_got_after_so_many_is_between_the_versions_that_were_scored(plan):
    """Scored are versions 0, 2 and 4, which had trained on 0, 72 and 144."""
    tables = tables_of(plan)
    run = plan.of("methods")[0]
    answers = tables.answers
    em = [answers[(answers["run"] == run.id) & (answers["version"] == v)]["em"].to_numpy() for v in (0, 2, 4)]
    for count, expected in ((0, em[0]), (18, 0.75 * em[0] + 0.25 * em[1]), (72, em[1]), (144, em[2])):
        assert em_after(run, tables, count) == pytest.approx(expected), count
    flat = tables.steps.assign(**{"groups/zero_variance_share": np.where(tables.steps["step"] < 2, 0.9, 0.3)})
    assert em_after(run, Tables(tables.runs, flat, answers), 0) == pytest.approx(em[1]), "the newest of both"
    flat = tables.steps.assign(**{"groups/zero_variance_share": 0.9})
    assert em_after(run, Tables(tables.runs, flat, answers), 0) == pytest.approx(em[2]), "nothing was usable"


def test_runs_are_compared_where_the_one_with_fewer_has_ended(plan):
    """sdga_phase ends 0.2 above grpo_full, with a third of its usable trajectories: grpo_full has that many after four
    thirds of a version, when it was two thirds of the way to version 2."""
    tables = tables_of(plan, noise=0.0)
    methods = {run.id: run.config.method.name for run in plan.runs.values()}
    tables = with_shares(tables, methods, grpo_full=0.0, sdga_phase=2 / 3)
    sides = [
        [run for run in plan.of("methods") if run.config.method.name == name and run.config.retriever.stochastic]
        for name in ("sdga_phase", "grpo_full")
    ]
    found = compare_at_equal(*sides, tables)
    (best,) = {float(em_after(run, tables, 80).mean()) for run in sides[0]}
    (other,) = {float(em_after(run, tables, 80).mean()) for run in sides[1]}
    first, second = (
        tables.answers[(tables.answers["run"] == sides[1][0].id) & (tables.answers["version"] == v)]["em"].mean()
        for v in (0, 2)
    )
    assert other == pytest.approx(first / 3 + 2 * second / 3)
    assert (found.seeds, found.mean) == (3, pytest.approx(best - other))
    turned = compare_at_equal(*sides[::-1], tables)
    assert turned.mean == pytest.approx(-found.mean)
    assert compare_at_equal(sides[0][:2], sides[1][1:], tables).seeds == 1, "of the seeds that both have"
    assert len(em_after(sides[0][0], tables, 80)) == QUESTIONS
