"""The search environment's reward: what the policy wrote is judged by hand-worked tables, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.environments import Episode, NoSearch, SearchEnvironment
from cusearch_async.environments.search import SearchSettings, is_format_valid, last_answer, score
from cusearch_async.environments.templates import PAPER
from cusearch_async.types import Question, Segment

EOS = "<|endoftext|>"
LAMBDA = 0.2
SEARCH = "<think>I need it.</think><search>capital of Peru</search>"
ANSWER = "<think>Found.</think><answer>Lima</answer>"
INFORMATION = "\n\n<information>The capital of Peru is Lima.</information>\n\n"

WORDS = st.lists(st.sampled_from(["Lima", "peru", "The", "a", "city", "of", "1998", "é", "-", "?"]), max_size=8)
PHRASES = WORDS.map(" ".join)
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]
TAGGED = st.lists(st.sampled_from([*TAGS, "Lima", "Peru", " ", "\n", EOS]), max_size=12).map("".join)


def episode(*texts):
    """Model turns and information blocks in turn."""
    return [Segment("model" if i % 2 == 0 else "information", text) for i, text in enumerate(texts)]


@st.composite
def segments(draw):
    authors = st.sampled_from(["model", "information", "notice"])
    return draw(st.lists(st.builds(Segment, authors, TAGGED), max_size=6))


# Which answer counts.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>Lima</answer>", "Lima"),
        ("<answer>\n Lima \n</answer>", "Lima"),
        ("<answer>Rome</answer> no, <answer>Lima</answer>", "Lima"),
        ("<answer>Lima</answer><answer>Rome", "Lima"),
        ("<answer>Rome <answer>Lima</answer>", "Lima"),
        ("<answer></answer>", ""),
        ("<answer>Lima</answer></answer>", "Lima"),
        ("<answer>Lima", None),
        ("<answer>Lima</answ", None),
        ("Lima</answer>", None),
        ("<answer>Lima<answer>", None),
        ("<Answer>Lima</Answer>", None),
        ("Lima", None),
        ("", None),
    ],
)
def test_the_last_complete_answer_block_counts(text, answer):
    assert last_answer([Segment("model", text)]) == answer


def test_the_last_turn_with_an_answer_counts():
    turns = episode("<answer>Rome</answer>", INFORMATION, "<answer>Lima</answer>", INFORMATION, "I am done.")
    assert last_answer(turns) == "Lima"


@pytest.mark.parametrize("author", ["information", "notice"])
def test_an_answer_in_the_environments_text_is_not_the_models(author):
    assert last_answer([Segment(author, "<answer>Lima</answer>")]) is None
    assert last_answer([*episode("<answer>Rome</answer>"), Segment(author, "<answer>Lima</answer>")]) == "Rome"


def test_an_answer_is_not_pieced_together_across_the_environments_text():
    assert last_answer(episode("<think>It is <answer>", "Lima</answer>", "</answer>")) is None
    assert last_answer(episode("<answer>", "Lima", "</answer>")) is None


@given(segments(), PHRASES.map(lambda gold: [gold or "Lima"]), st.data())
def test_the_environments_text_never_changes_what_an_answer_scores(turns, answers, data):
    others = [s if s.author == "model" else Segment(s.author, data.draw(TAGGED)) for s in turns]
    silent = [s for s in turns if s.author == "model"]
    found, changed, alone = (score(t, answers, LAMBDA, EOS) for t in (turns, others, silent))
    assert (found.prediction, found.f1, found.em) == (changed.prediction, changed.f1, changed.em)
    assert (found.prediction, found.f1, found.em) == (alone.prediction, alone.f1, alone.em)


@given(st.lists(st.builds(Segment, st.sampled_from(["information", "notice"]), TAGGED), max_size=6))
def test_an_episode_in_which_the_model_says_nothing_scores_nothing(turns):
    assert score(turns, ["Lima", "Peru"], LAMBDA, EOS).reward == 0


# Format.


@pytest.mark.parametrize(
    "turns",
    [
        [ANSWER],
        [SEARCH, INFORMATION, ANSWER],
        [SEARCH, INFORMATION, SEARCH, INFORMATION, ANSWER],
        ["\n <think>x</think>\n\n<answer>Lima</answer>\n"],
        ["<think></think><answer></answer>"],
        ["<think>line\nline</think><answer>Lima\nPeru</answer>"],
        [SEARCH + "\n", INFORMATION, "\n" + ANSWER],
        [ANSWER + EOS],
        [ANSWER + "\n" + EOS],
        [ANSWER + EOS + "\n"],
        [SEARCH, "a passage without tags", ANSWER],
    ],
)
def test_think_search_information_think_answer_is_valid(turns):
    assert is_format_valid(episode(*turns), EOS)


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [""],
        [SEARCH],
        [SEARCH, INFORMATION],
        ["Lima"],
        ["<answer>Lima</answer>"],  # no thought
        ["<search>x</search>", INFORMATION, ANSWER],
        [SEARCH, INFORMATION, "<answer>Lima</answer>"],
        ["Well. " + ANSWER],
        [ANSWER + " Done."],
        ["<think>a</think> so <answer>Lima</answer>"],
        [ANSWER, INFORMATION],
        [ANSWER, INFORMATION, ANSWER],
        [ANSWER + ANSWER],
        [SEARCH + ANSWER],
        ["<think>a</think>" + ANSWER],
        ["<think>a<think>b</think></think><answer>Lima</answer>"],
        ["<think>a</think><answer>Lima"],
        ["<think>a</think><answer>Lima</search>"],
        ["<think>a</think><answer><search>Lima</search></answer>"],
        ["<think>a</think><information>Lima</information><answer>Lima</answer>"],
        [ANSWER + EOS + EOS],
        [EOS + ANSWER],
        ["<think>a</think>" + EOS + "<answer>Lima</answer>"],
    ],
)
def test_anything_else_is_invalid(turns):
    assert not is_format_valid(episode(*turns), EOS)


@pytest.mark.parametrize(
    "turns",
    [
        [Segment("model", "hm"), Segment("notice", "again"), Segment("model", ANSWER)],
        [Segment("model", SEARCH), Segment("model", ANSWER)],
        [Segment("information", INFORMATION), Segment("model", ANSWER)],
    ],
)
def test_notices_missing_results_and_information_at_first_make_the_format_invalid(turns):
    assert not is_format_valid(turns, EOS)


def test_end_of_text_counts_as_text_where_the_tokenizer_has_none():
    assert not is_format_valid(episode(ANSWER + EOS))
    assert is_format_valid(episode(ANSWER))


@given(st.integers(0, 6), st.booleans())
def test_any_number_of_searches_is_valid_and_a_missing_answer_is_not(searches, answered):
    turns = [SEARCH, INFORMATION] * searches + [ANSWER] * answered
    assert is_format_valid(episode(*turns), EOS) == answered


# Reward.


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([ANSWER], 1.0),
        ([SEARCH, INFORMATION, ANSWER], 1.0),
        (["<answer>Lima</answer>"], 0.8),
        (["<think>x</think><answer>Rome</answer>"], 0.2),
        (["<think>x</think><answer>old Lima</answer>"], 0.8 * 2 / 3 + 0.2),
        (["<answer>old Lima</answer>"], 0.8 * 2 / 3),
        (["no idea"], 0.0),
        ([SEARCH, INFORMATION], 0.0),
    ],
)
def test_the_reward_is_four_parts_f1_and_one_part_format(turns, reward):
    assert score(episode(*turns), ["Lima"], LAMBDA, EOS).reward == pytest.approx(reward)


@given(segments(), st.floats(0, 1))
def test_the_reward_is_the_weighted_mean_of_f1_and_format(turns, weight):
    found = score(turns, ["Lima"], weight, EOS)
    assert found.reward == pytest.approx((1 - weight) * found.f1 + weight * found.format_valid)
    assert 0 <= found.reward <= 1
    assert found.em <= found.f1


@pytest.mark.parametrize(("metric", "reward"), [("squad", 1.0), ("strict", 0.2)])
async def test_the_reward_uses_the_metric_of_the_settings(metric, reward):
    environment = SearchEnvironment(SearchSettings(metric=metric), PAPER, NoSearch())
    question = Question(id="q", text="how high?", answers=("3.5",), category="x")
    answered = episode("<think>x</think><answer>35</answer>")
    scored = await environment.score(Episode(question=question, ticket=0, rollout=0, segments=answered))
    assert (scored.reward, scored.em) == (pytest.approx(reward), float(metric == "squad"))
