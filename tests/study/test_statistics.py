"""Intervals and differences against what is known of normal numbers, and of numbers that were planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cusearch_async.study.statistics import contributions, estimate, holm
from cusearch_async.study.tables import area_weights


def draw(rng, seeds, questions, between, within, residual, mean=0.5):
    """Seeds differ by `between`, questions by `within`, and what a seed makes of a question by `residual`."""
    shape = (seeds, questions)
    parts = (between * rng.standard_normal((seeds, 1)), within * rng.standard_normal((1, questions)))
    return mean + parts[0] + parts[1] + residual * rng.standard_normal(shape)


def width(values):
    low, high = estimate(values).interval
    return high - low


@pytest.mark.parametrize("seeds", [3, 5, 12])
@pytest.mark.parametrize(
    ("between", "within", "residual"), [(0.1, 0, 0), (0.1, 0, 0.4), (0.05, 0.2, 0.3), (0, 0.3, 0.4), (0, 0, 0.4)]
)
def test_the_interval_holds_the_truth_as_often_as_it_says(seeds, between, within, residual):
    """Where seeds decide and where questions do; it errs to the wide side where neither matters."""
    rng = np.random.default_rng(seeds)
    intervals = [estimate(draw(rng, seeds, 100, between, within, residual)).interval for _ in range(400)]
    assert 0.91 <= np.mean([low <= 0.5 <= high for low, high in intervals]) <= 0.995


def test_of_very_few_questions_the_detectable_effect_is_a_number():
    """Before, the report ended in a traceback: the degrees of freedom fell to nearly 0."""
    rng = np.random.default_rng(0)
    tables = [rng.integers(-1, 2, (2, questions)).astype(float) for questions in (2, 3, 4, 6, 8) for _ in range(60)]
    found = [estimate(table).detectable(6) for table in [np.array([[-1.0, 1, 1, 0], [1, 0, 0, 1]]), *tables]]
    assert all(one is None or np.isfinite(one) for one in found)


def test_of_seeds_alone_it_is_the_t_interval_of_their_means():
    values = draw(np.random.default_rng(0), 5, 50, 0.1, 0, 0)
    expected = stats.t.interval(0.95, 4, values.mean(), stats.sem(values.mean(axis=1)))
    assert estimate(values).interval == pytest.approx(expected)


def test_of_questions_alone_it_is_the_t_interval_of_theirs():
    values = draw(np.random.default_rng(1), 5, 50, 0, 0.3, 0)
    expected = stats.t.interval(0.95, 49, values.mean(), stats.sem(values[0]))
    assert estimate(values).interval == pytest.approx(expected)


def test_an_interval_leaves_out_zero_just_where_p_is_below_five_percent():
    rng = np.random.default_rng(2)
    found = [estimate(draw(rng, 4, 40, 0.05, 0.1, 0.2, mean=0.08)) for _ in range(200)]
    assert {one.interval[0] > 0 or one.interval[1] < 0 for one in found} == {True, False}
    assert all((one.interval[0] > 0 or one.interval[1] < 0) == (one.p < 0.05) for one in found)


def test_fewer_than_two_seeds_have_no_interval():
    one = estimate(np.full((1, 9), 0.4))
    assert (one.interval, one.p, one.detectable(3)) == (None, None, None)
    assert one.mean == pytest.approx(0.4)
    assert estimate(np.array([])).seeds == 0


def test_a_pair_of_seeds_cancels_what_they_share():
    rng = np.random.default_rng(3)
    shared = draw(rng, 5, 200, 0.3, 0.4, 0)
    better = shared + 0.05 + 0.01 * rng.standard_normal((5, 1))
    found = estimate(better - shared)
    assert found.mean == pytest.approx(0.05, abs=0.01)
    assert found.p < 0.01
    low, high = found.interval
    assert 0 < low < high < 0.1
    assert width(better) > 10 * (high - low)


@pytest.mark.parametrize(("between", "within", "residual"), [(0.1, 0.15, 0.1), (0.1, 0.05, 0.2)])
def test_far_out_in_the_tail_where_holm_looks_a_p_value_is_not_too_small(between, within, residual):
    """Of 3,000 where there is nothing about 4 are below 0.05 / 36; of the crossed design's alone 32 and 40."""
    rng, bound = np.random.default_rng(3), 0.05 / 36
    found = [estimate(draw(rng, 3, 40, between, within, residual, mean=0.0)) for _ in range(3000)]
    assert sum(one.p < bound for one in found) <= 12
    assert sum(one.spreads[0].p(one.mean) < bound for one in found) > 24


@pytest.mark.parametrize("tests", [1, 36])
@pytest.mark.parametrize("between", [0.0, 0.1])
def test_what_is_detectable_is_the_power_of_the_tests_at_holms_first_step(tests, between):
    """Of the one of the two that sees less."""
    found = estimate(draw(np.random.default_rng(4), 5, 60, between, 0.1, 0.3))
    powers = []
    for spread in found.spreads:
        bound = stats.t.isf(0.025 / tests, spread.freedom)
        shift = found.detectable(tests) / spread.error
        powers.append(np.mean(stats.nct.rvs(spread.freedom, shift, size=20_000, random_state=0) > bound))
    assert min(powers) == pytest.approx(0.8, abs=0.02)


def test_p_values_are_corrected_and_one_that_there_is_not_counts_as_a_test():
    """Holm: the smallest of four times 4, the next times 3, never falling."""
    rng = np.random.default_rng(5)
    found = [estimate(draw(rng, 5, 20, 0.02, 0, 0.3, mean=shift)) for shift in (0.0, 0.1, 0.3)]
    alone = estimate(np.ones((1, 20)))
    whole = holm([found[0], alone, found[1], found[2]])
    assert whole[1] is None
    order = np.argsort([one.p for one in found])
    expected = np.maximum.accumulate([found[i].p * (4 - n) for n, i in enumerate(order)])
    by_place = {i: min(1.0, value) for i, value in zip(order, expected, strict=True)}
    assert [whole[0], whole[2], whole[3]] == pytest.approx([by_place[i] for i in range(3)])
    assert holm([]) == []


def test_the_area_is_the_trapezoidal_mean():
    weights = area_weights(np.array([0, 2, 6]))
    assert weights == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert weights @ np.array([0.0, 0.6, 0.9]) == pytest.approx((2 * 0.3 + 4 * 0.75) / 6)
    assert area_weights(np.array([5])) == pytest.approx([1])


def test_a_question_contributes_what_it_got():
    answers = pd.DataFrame(
        {"version": [0, 0, 2, 2, 6, 6], "question": [1, 0, 0, 1, 0, 1], "em": [1, 0, 1, 0, 1, 1], "run": "a"}
    )
    assert contributions(answers, "em_last") == pytest.approx([1, 1])
    assert contributions(answers, "em_area") == pytest.approx([5 / 6, 3 / 6])
    with pytest.raises(ValueError, match="em_last, em_area or depth_growth, got 'em'"):
        contributions(answers, "em")


def test_numbers_that_agree_to_the_last_digit_have_no_p_value():
    """Their spread is rounding error: a test would call it certain."""
    values = np.full((3, 40), 0.1)
    values[1] += 1e-16
    assert estimate(values).p is None
