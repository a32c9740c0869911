"""Intervals and differences against what is known of normal numbers, and of numbers that were planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cusearch_async.study import statistics
from cusearch_async.study.statistics import against_zero, contributions, corrected, difference, estimate
from cusearch_async.study.tables import area_weights


def draw(seed, seeds, questions, between, within, mean=0.5):
    """Seeds differ by `between`, questions by `within`; the same questions in all seeds."""
    rng = np.random.default_rng(seed)
    return mean + between * rng.standard_normal((seeds, 1)) + within * rng.standard_normal((1, questions))


def width(values):
    low, high = estimate(values).interval
    return high - low


def test_the_interval_of_many_seeds_is_that_of_their_means():
    values = draw(0, 40, 50, between=0.1, within=0)
    assert width(values) == pytest.approx(2 * 1.96 * values.mean(axis=1).std() / np.sqrt(40), rel=0.05)


def test_questions_widen_the_interval_as_seeds_do():
    """As many seeds as there are, they are all of the same questions."""
    values = draw(1, 40, 50, between=0, within=0.3)
    assert width(values) == pytest.approx(2 * 1.96 * values[0].std() / np.sqrt(50), rel=0.08)
    both = draw(1, 40, 50, between=0.5, within=0.3)
    expected = 2 * 1.96 * np.hypot(both.mean(axis=1).std() / np.sqrt(40), both.mean(axis=0).std() / np.sqrt(50))
    assert width(both) == pytest.approx(expected, rel=0.08)


def test_the_interval_holds_the_truth_about_as_often_as_it_says(monkeypatch):
    """With 12 seeds the percentile bootstrap is somewhat narrow."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    hits = 0
    for seed in range(120):
        low, high = estimate(draw(seed, 12, 60, between=0.1, within=0.3)).interval
        hits += low <= 0.5 <= high
    assert 0.85 <= hits / 120 <= 0.99


def test_fewer_than_two_seeds_have_no_interval():
    assert estimate(np.full((1, 9), 0.4)).interval is None
    assert estimate(np.full((1, 9), 0.4)).mean == pytest.approx(0.4)
    assert difference(np.full((1, 9), 0.4), np.full((1, 9), 0.3)).p is None


def test_a_pair_of_seeds_cancels_what_they_share():
    shared = draw(2, 5, 200, between=0.3, within=0.4)
    rng = np.random.default_rng(3)
    better = shared + 0.05 + 0.01 * rng.standard_normal((5, 1))
    found = difference(better, shared)
    assert found.estimate.mean == pytest.approx(0.05, abs=0.01)
    assert found.p < 0.01
    low, high = found.estimate.interval
    assert 0 < low < high < 0.1
    assert width(better) > 10 * (high - low)


def test_p_is_the_paired_t_tests_and_what_is_detectable_is_its_power():
    rng = np.random.default_rng(4)
    a, b = rng.random((6, 30)), rng.random((6, 30))
    found = difference(a, b)
    assert found.p == pytest.approx(stats.ttest_rel(a.mean(axis=1), b.mean(axis=1)).pvalue)
    spread = (a - b).mean(axis=1).std(ddof=1)
    shift = found.detectable * np.sqrt(6) / spread  # the non-centrality of the t-statistic
    bound = stats.t.ppf(0.975, 5)
    assert stats.nct.sf(bound, 5, shift) + stats.nct.cdf(-bound, 5, shift) == pytest.approx(0.8, abs=1e-3)


def test_matrices_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        difference(np.zeros((2, 3)), np.zeros((3, 3)))


def test_p_values_are_corrected_over_those_that_there_are():
    """Holm: the smallest of three times 3, the next times 2, never falling."""
    rng = np.random.default_rng(5)
    found = [difference(rng.random((5, 20)) + shift, np.zeros((5, 20))) for shift in (0.0, 0.2, 0.4)]
    alone = difference(np.ones((1, 20)), np.zeros((1, 20)))
    whole = corrected([found[0], alone, found[1], found[2]])
    assert whole[1].p_holm is None
    order = np.argsort([one.p for one in found])
    expected = np.maximum.accumulate([found[i].p * (3 - n) for n, i in enumerate(order)])
    by_place = {i: min(1.0, value) for i, value in zip(order, expected, strict=True)}
    kept = [whole[0], whole[2], whole[3]]
    assert [one.p_holm for one in kept] == pytest.approx([by_place[i] for i in range(3)])


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


def test_seeds_that_agree_to_the_last_digit_have_no_p_value():
    """Their spread is rounding error: a test would call it certain."""
    values = np.full((3, 40), 0.0)
    values[:, 7] = [1.0, 1.0, 1.0 + 1e-15]
    assert against_zero(values).p is None
