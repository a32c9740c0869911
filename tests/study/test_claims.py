"""A planted effect makes a claim hold, its opposite is told, and what no seed can tell is not said."""

from __future__ import annotations

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.study.claims import Outcome, outcomes_of
from cusearch_async.study.report import write_report
from cusearch_async.study.statistics import Difference, Estimate
from cusearch_async.study.tables import Tables
from tests.study.studies import FILE, plan_of, tables_of

BETTER = """
[[claim]]
text = "depth first is better"
part = "methods"
better = { "method.name" = "sdga_phase" }
than = { "method.name" = "grpo_full" }
measures = ["em_last"]
"""
WORSE = BETTER.replace("first is better", "first is worse").replace(
    '"sdga_phase" }\nthan = { "method.name" = "grpo_full', '"grpo_full" }\nthan = { "method.name" = "sdga_phase'
)
MORE = BETTER.replace("first is better", "first gains more") + 'more_where = { "retriever.stochastic" = true }\n'
GROWS = """
[[claim]]
text = "depth grows"
part = "methods"
better = { "method.name" = "grpo_full" }
measures = ["depth_growth"]
"""


def plan_with(folder, *claims):
    return plan_of(folder, (FILE, FILE + "".join(claims)))


def test_a_planted_effect_holds_in_each_environment_and_its_opposite_is_told(tmp_path):
    plan = plan_with(tmp_path, BETTER, WORSE)
    assert WORSE != BETTER
    tested = outcomes_of(plan, tables_of(plan))["em_last"]
    assert [(one.claim.text, dict(one.context), one.verdict) for one in tested] == [
        ("depth first is better", {"retriever.stochastic": True}, "holds"),
        ("depth first is better", {"retriever.stochastic": False}, "holds"),
        ("depth first is worse", {"retriever.stochastic": True}, "the opposite holds"),
        ("depth first is worse", {"retriever.stochastic": False}, "the opposite holds"),
    ]
    assert all(one.found.p_holm >= one.found.p for one in tested)


def test_without_an_effect_a_claim_is_not_seen(tmp_path):
    plan = plan_with(tmp_path, BETTER)
    tested = outcomes_of(plan, tables_of(plan, effect=0.0))["em_last"]
    assert [one.verdict for one in tested] == ["not seen", "not seen"]


@pytest.mark.parametrize(
    ("mean", "p", "p_holm", "verdict"),
    [
        (0.1, 0.001, 0.04, "holds"),
        (-0.1, 0.001, 0.04, "the opposite holds"),
        (0.1, 0.04, 0.2, "leans to it"),
        (-0.1, 0.04, 0.2, "leans against it"),
        (0.1, 0.2, 0.9, "not seen"),
        (0.1, None, None, "not seen"),
    ],
)
def test_a_verdict_says_how_sure_it_is(tmp_path, mean, p, p_holm, verdict):
    claim = plan_with(tmp_path, BETTER).claims[0]
    found = Difference(Estimate(mean, (mean - 0.01, mean + 0.01), 5), p, p_holm)
    assert Outcome(claim, "em_last", (), found).verdict == verdict


def test_a_larger_gain_somewhere_is_a_difference_of_differences(tmp_path):
    plan = plan_with(tmp_path, MORE)
    tables = tables_of(plan, noise=0.05)
    (even,) = outcomes_of(plan, tables)["em_last"]
    assert (even.context, even.verdict, even.found.estimate.mean) == ((), "not seen", 0.0)
    runs = tables.runs
    lifted = runs[(runs["method.name"] == "sdga_phase") & runs["retriever.stochastic"]]["run"]
    better = tables.answers.assign(
        em=tables.answers["em"].where(~tables.answers["run"].isin(lifted) | (tables.answers["question"] % 3 > 0), 1)
    )
    (more,) = outcomes_of(plan, Tables(runs, tables.steps, better))["em_last"]
    assert more.found.estimate.mean > 0.05


def test_growth_is_from_the_first_version_to_the_last(tmp_path):
    plan = plan_with(tmp_path, GROWS)
    tables = tables_of(plan)
    grown = tables.answers.assign(depth=tables.answers["depth"] + tables.answers["version"] // 2)
    tested = outcomes_of(plan, Tables(tables.runs, tables.steps, grown))["depth_growth"]
    assert [one.found.estimate.mean for one in tested] == [2.0, 2.0]


def test_runs_that_failed_or_are_to_do_tell_nothing(tmp_path):
    plan = plan_with(tmp_path, BETTER)
    tables = tables_of(plan)
    kept = [name for name in plan.runs if "-s0-" in name and "-true-" in name]
    one_seed = Tables(tables.runs[tables.runs["run"].isin(kept)], tables.steps, tables.answers)
    (tested,) = outcomes_of(plan, one_seed)["em_last"]
    assert tested.verdict == "one seed"
    lost = tuple(name for name in plan.runs if name.startswith("sdga_phase-true-2"))
    tested = outcomes_of(plan, tables_of(plan, failed=lost))["em_last"]
    assert [dict(one.context) for one in tested] == [{"retriever.stochastic": False}]


def test_the_report_has_a_row_for_each(tmp_path):
    plan = plan_with(tmp_path, BETTER, GROWS)
    text = write_report(plan, tables_of(plan), tmp_path).read_text()
    assert text.count("| depth first is better | stochastic True | 3 | +0.") == 1
    section = text.split("## Claims")[1].split("## methods")[0]
    assert section.count("holds |\n") == 2
    assert "By growth of depth over the run:" in section


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('part = "methods"\nbetter', 'part = "method"\nbetter', "part 'method' has no run with its better"),
        ('than = { "method.name" = "grpo_full" }', 'than = { "method.name" = "dapo" }', "its than: method.name = dapo"),
        ('than = { "method.name"', 'than = { "method.nam"', r"there is no setting method\.nam"),
        ('measures = ["em_last"]', 'measures = ["em"]', "measures"),
    ],
)
def test_a_claim_about_no_run_is_refused(tmp_path, old, new, said):
    assert old in BETTER
    with pytest.raises(ConfigError, match=said):
        plan_with(tmp_path, BETTER.replace(old, new))
