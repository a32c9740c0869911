"""A planted effect makes a claim hold, its opposite is told, and what no seed can tell is not said."""

from __future__ import annotations

import pytest

from cusearch_async.errors import ConfigError
from cusearch_async.study.claims import Outcome, outcomes_of
from cusearch_async.study.report import report_of
from cusearch_async.study.statistics import Estimate, Spread
from cusearch_async.study.tables import Tables
from tests.study.studies import FILE, one_of, plan_of, tables_of

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
    assert all(one.p_holm >= one.found.p for one in tested)


def test_without_an_effect_a_claim_is_not_seen(tmp_path):
    plan = plan_with(tmp_path, BETTER)
    tested = outcomes_of(plan, tables_of(plan, effect=0.0))["em_last"]
    assert [one.verdict for one in tested] == ["not seen", "not seen"]


@pytest.mark.parametrize(
    ("mean", "error", "p_holm", "verdict"),
    [
        (0.1, 0.01, 0.04, "holds"),
        (-0.1, 0.01, 0.04, "the opposite holds"),
        (0.1, 0.03, 0.2, "leans to it"),
        (-0.1, 0.03, 0.2, "leans against it"),
        (0.1, 0.09, 0.9, "not seen"),
        (0.1, 0.0, None, "not seen"),
    ],
)
def test_a_verdict_says_how_sure_it_is(tmp_path, mean, error, p_holm, verdict):
    claim = plan_with(tmp_path, BETTER).claims[0]
    found = Estimate(mean, 5, (Spread(error, 4.0),))
    assert Outcome(claim, "em_last", (), found, 5, True, p_holm).verdict == verdict
    assert Outcome(claim, "em_last", (), found, 9, False, p_holm).verdict == "not over"
    assert Outcome(claim, "em_last", (), found, 6, True, p_holm).verdict == "1 of 6 seeds failed"


def test_a_larger_gain_somewhere_is_a_difference_of_differences(tmp_path):
    plan = plan_with(tmp_path, MORE)
    tables = tables_of(plan, noise=0.05)
    (even,) = outcomes_of(plan, tables)["em_last"]
    assert (even.context, even.verdict, even.found.mean) == ((), "not seen", 0.0)
    runs = tables.runs
    lifted = runs[(runs["method.name"] == "sdga_phase") & runs["retriever.stochastic"]]["run"]
    better = tables.answers.assign(
        em=tables.answers["em"].where(~tables.answers["run"].isin(lifted) | (tables.answers["question"] % 3 > 0), 1)
    )
    (more,) = outcomes_of(plan, Tables(runs, tables.steps, better))["em_last"]
    assert more.found.mean > 0.05


def test_growth_is_from_the_first_version_to_the_last(tmp_path):
    plan = plan_with(tmp_path, GROWS)
    tables = tables_of(plan)
    grown = tables.answers.assign(depth=tables.answers["depth"] + tables.answers["version"] // 2)
    tested = outcomes_of(plan, Tables(tables.runs, tables.steps, grown))["depth_growth"]
    assert [one.found.mean for one in tested] == [2.0, 2.0]


def test_there_is_no_verdict_before_the_last_run_and_a_failed_one_is_over(tmp_path):
    plan = plan_with(tmp_path, BETTER)
    tables = tables_of(plan)
    last = list(plan.runs)[-5:]
    early = Tables(tables.runs[~tables.runs["run"].isin(last)], tables.steps, tables.answers)
    assert [one.verdict for one in outcomes_of(plan, early)["em_last"]] == ["not over", "not over"]
    lost = one_of(plan, "sdga_phase", True, 2)
    tested = outcomes_of(plan, tables_of(plan, failed=(lost,)))["em_last"]
    assert [(one.found.seeds, one.planned) for one in tested] == [(2, 3), (3, 3)]
    assert [one.verdict for one in tested] == ["1 of 3 seeds failed", "holds"]


def test_a_claim_without_data_keeps_its_row_and_its_place_in_holms_correction(tmp_path):
    plan = plan_with(tmp_path, BETTER)
    lost = tuple(one_of(plan, "sdga_phase", True, seed) for seed in range(3))
    tested = outcomes_of(plan, tables_of(plan, failed=lost))["em_last"]
    assert [one.verdict for one in tested] == ["3 of 3 seeds failed", "holds"]
    assert (tested[0].found.seeds, tested[0].p_holm) == (0, None)
    assert tested[1].p_holm == pytest.approx(2 * tested[1].found.p)


def test_the_report_has_a_row_for_each(tmp_path):
    plan = plan_with(tmp_path, BETTER, GROWS)
    text = report_of(plan, tables_of(plan))
    assert text.count("| depth first is better | stochastic | 3 of 3 | +0.") == 1
    section = text.split("## Claims")[1].split("## methods")[0]
    assert section.count("holds |\n") == 2
    assert "By growth of depth over the run:" in section


REPORTED = 'reported = [{ difference = %s, where = { "retriever.stochastic" = true } }]\n'


@pytest.mark.parametrize(("difference", "place"), [(0.9, "above"), (0.2, "inside"), (-0.3, "below")])
def test_what_was_reported_is_shown_with_its_place_by_the_interval(tmp_path, difference, place):
    plan = plan_with(tmp_path, BETTER + REPORTED % difference)
    text = report_of(plan, tables_of(plan))
    rows = [line for line in text.splitlines() if line.startswith("| depth first is better")]
    assert [row.split(" | ")[-2] for row in rows] == [f"{difference:+.3f}: {place}", "–"]


@pytest.mark.parametrize("where", ['"retriever.noise" = 0.25', '"learner.lr" = "1e-4"', '"learner.lr" = 0.0001'])
def test_what_was_reported_of_all_runs_is_shown_however_it_is_written(tmp_path, where):
    """Before, it was accepted and not shown."""
    settings = '"run.steps" = 4', '"run.steps" = 4\n"retriever.noise" = 0.25\n"learner.lr" = "1e-4"'
    claim = BETTER + REPORTED.replace('"retriever.stochastic" = true', where) % 0.9
    plan = plan_of(tmp_path, (FILE, FILE.replace(*settings) + claim))
    lines = report_of(plan, tables_of(plan)).splitlines()
    rows = [line for line in lines if line.startswith("| depth first is better")]
    assert [row.split(" | ")[-2] for row in rows] == ["+0.900: above"] * 2


def test_what_was_reported_of_no_setting_of_the_claim_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such setting as its reported where: retriever\.noise = 0\.75"):
        plan_with(tmp_path, BETTER + (REPORTED % 0.1).replace('stochastic" = true', 'noise" = 0.75'))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('part = "methods"\nbetter', 'part = "method"\nbetter', "part 'method' is no part; there are methods"),
        ('than = { "method.name" = "grpo_full" }', 'than = { "method.name" = "dapo" }', "its than: method.name = dapo"),
        ('than = { "method.name"', 'than = { "method.nam"', r"method\.nam: unknown key; did you mean method\.name"),
        ('measures = ["em_last"]', 'measures = ["em"]', "measures"),
        ('= "grpo_full" }\n', '= "sdga_phase" }\n', "compares runs with themselves"),
        (
            '"sdga_phase" }',
            '"sdga_phase", "retriever.stochastic" = true }',
            "several runs of one seed with method.name =",
        ),
    ],
)
def test_a_claim_about_no_run_is_refused(tmp_path, old, new, said):
    assert old in BETTER
    with pytest.raises(ConfigError, match=said):
        plan_with(tmp_path, BETTER.replace(old, new))


MORE_VALUES = """
[[part]]
name = "values"
seeds = 1
[part.grid]
"method.name" = ["grpo_full", "sdga_phase"]
"%s" = [%s]
"""


def test_more_than_elsewhere_needs_one_elsewhere(tmp_path):
    more = MORE.replace('"methods"', '"values"').replace('"retriever.stochastic" = true', '"retriever.noise" = 0.25')
    two, three = (MORE_VALUES % ("retriever.noise", values) for values in ("0.0, 0.25", "0.0, 0.25, 0.5"))
    assert plan_with(tmp_path, two, more).claims
    with pytest.raises(ConfigError, match=r"several runs of one seed with method\.name = sdga_phase"):
        plan_with(tmp_path, three, more)


def test_a_claim_without_runs_at_a_setting_that_one_side_lacks_is_refused(tmp_path):
    """Its runs were said to have failed, and it counted among the tests that are corrected for."""
    part = MORE_VALUES % ("method.phase_reserve", "0.0, 0.5")
    with pytest.raises(ConfigError, match=r"part 'values' has no run with method\.name = grpo_full at one value"):
        plan_with(tmp_path, part, BETTER.replace('"methods"', '"values"'))


def test_sides_that_are_scored_on_other_questions_are_refused(tmp_path):
    part = MORE_VALUES % ("eval.questions_per_category", "4, 8")
    claim = BETTER.replace('"methods"', '"values"')
    assert plan_with(tmp_path, part, claim).claims, "a context for each"
    for side, count in (("sdga_phase", 4), ("grpo_full", 8)):
        claim = claim.replace(f'= "{side}"', f'= "{side}", "eval.questions_per_category" = {count}')
    with pytest.raises(ConfigError, match="scored on other held-out questions"):
        plan_with(tmp_path, part, claim)
