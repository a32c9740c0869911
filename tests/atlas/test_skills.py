"""What `cusearch atlas check` counts, in episodes made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cusearch_async.atlas.check import PoolFigures, Skills, pool_figures, skills
from cusearch_async.atlas.facts import Fact
from cusearch_async.atlas.questions import Chain
from tests.strategies import make_trajectory

COUNTRY = Fact("country", "Pinsk", "Belarus")
CURRENCY = Fact("currency", "Belarus", "Ruble")
CHAIN = Chain((COUNTRY, CURRENCY))
GIVEN = Chain((COUNTRY, CURRENCY), is_first_given=True)


def searches(query, thought="hm"):
    return "model", f"<think>{thought}</think><search>{query}</search>"


def shows(*facts):
    passages = "\n".join(fact.passage for fact in facts)
    return "information", f"<information>{passages}</information>"


PROMPT, ANSWER = ("prompt", "Question: ?"), ("model", f"<think>{CURRENCY.sentence}</think><answer>Ruble</answer>")
GOOD = [
    PROMPT,
    searches("country of Pinsk"),
    shows(COUNTRY),
    searches("Belarus currency", COUNTRY.sentence),
    shows(CURRENCY),
    ANSWER,
]


@pytest.mark.parametrize(
    ("episode", "chain", "counts"),
    [
        (GOOD, CHAIN, Skills(2, 2, 2, 2, 0)),
        (GOOD, GIVEN, Skills(2, 2, 2, 2, 1)),
        ([PROMPT, ANSWER], CHAIN, Skills(0, 0, 0, 0, 0)),
        ([], CHAIN, Skills(0, 0, 0, 0, 0)),
        ([PROMPT, searches("capital of Peru"), shows(), ANSWER], CHAIN, Skills(1, 0, 0, 0, 0)),
        ([PROMPT, searches("country of Pinsk"), shows(CURRENCY), ANSWER], CHAIN, Skills(1, 1, 0, 0, 0)),
        ([PROMPT, searches("country of Pinsk"), shows(COUNTRY), ANSWER], CHAIN, Skills(1, 1, 1, 0, 0)),
        ([PROMPT, searches("country of Pinsk"), shows(COUNTRY)], CHAIN, Skills(1, 1, 1, 0, 0)),
        ([PROMPT, searches("country of Pinsk")], CHAIN, Skills(0, 0, 0, 0, 0)),
        (
            [
                PROMPT,
                *[searches("country of Pinsk"), shows()] * 2,
                searches("country of Pinsk"),
                shows(COUNTRY),
                ANSWER,
            ],
            CHAIN,
            Skills(3, 3, 1, 0, 0),
        ),
        ([PROMPT, *[searches("country of Pinsk"), shows(COUNTRY)] * 3, ANSWER], CHAIN, Skills(3, 3, 3, 0, 2)),
    ],
    ids=[
        "right",
        "what the question tells was searched for",
        "no search",
        "nothing",
        "another fact",
        "not found",
        "misread",
        "ended after a result",
        "never executed",
        "a search that failed is made again",
        "a search that found is made again",
    ],
)
def test_skills_are_counted_by_hand(episode, chain, counts):
    assert skills([episode], [chain]) == counts


def test_episodes_add_up_and_belong_to_their_chains():
    other = Chain((Fact("time zone", "Minsk", "Europe/Minsk"),))
    assert skills([GOOD, GOOD], [CHAIN, other]) == Skills(4, 2, 2, 2, 0)
    with pytest.raises(ValueError, match="zip"):
        skills([GOOD, GOOD], [CHAIN])


def group(*members):
    """Of (reward, depth, first token)."""
    made = []
    for rollout, (reward, depth, token) in enumerate(members):
        trajectory = make_trajectory(0, rollout, reward=reward, depth=depth, em=0.0)
        trajectory.token_ids[0] = token
        made.append(trajectory)
    return made


def test_figures_of_pools_are_counted_by_hand():
    groups = [
        group((1.0, 0, 1), (1.0, 2, 1), (1.0, 2, 1), (1.0, 1, 2)),
        group((0.0, 0, 1), (0.2, 0, 1), (0.0, 3, 2), (0.0, 0, 3)),
        group((0.0, 0, 1), (0.0, 0, 2), (0.0, 0, 3), (0.0, 0, 4)),
    ]
    figures = pool_figures(groups, s_max=4)
    assert figures == PoolFigures(identical=3 / 12, zero_variance=2 / 3, differing=1 / 3, depths=[8, 1, 2, 1, 0])
    assert np.sum(figures.depths) == 12
