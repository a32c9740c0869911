"""Episodes with a scripted policy and the real tokenizer: masks, tokens, depth, and what the environment says."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cusearch_async.config import EnvironmentConfig, EpisodeConfig
from cusearch_async.environments import NoSearch, SearchEnvironment
from cusearch_async.environments.templates import ATLAS
from cusearch_async.errors import ConfigError, EpisodeFailed, RetrievalUnavailable
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.prompting import build_observation
from cusearch_async.types import Question
from tests.fakes import STARTER, FakeSearch, ScriptedPolicy, searching

TOKENIZER = AutoTokenizer.from_pretrained(STARTER)
EPISODE = EpisodeConfig(s_max=3, temperature=0.9, max_prompt_tokens=96, max_turn_tokens=80, max_observation_tokens=88)
QUESTION = Question(id="q", text="What is the capital of Peru?", answers=("Lima",), category="1 links")
PERU = ['"Peru"\nThe capital of Peru is Lima.']
SEARCH = "<think>a</think><search>capital of Peru</search>"
ANSWER = "<think>b</think><answer>Lima</answer><|endoftext|>"
NOTHING = "<think>hm</think>"


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Episode:
    """A played episode and what its parts were asked."""

    def __init__(self, turns, found=None, versions=None, seed=7, **changes):
        self.policy = ScriptedPolicy(TOKENIZER, turns, versions)
        self.search = FakeSearch({"capital of Peru": PERU} if found is None else found)
        settings = EPISODE.model_copy(update=changes)
        self.runner = EpisodeRunner(self.policy, searching(self.search), TOKENIZER, settings, seed)

    async def run(self, ticket=3, rollout=1, temperature=None):
        return await self.runner.run(QUESTION, ticket, rollout, "w", temperature)


def observation(documents, template="atlas", document_template="{text}\n", tokenizer=TOKENIZER, **changes):
    """Token ids of what is said after a search that found `documents`."""
    environment = searching(NoSearch(), template, document_template)["search"]
    assert isinstance(environment, SearchEnvironment)
    return build_observation(tokenizer, environment.show(documents), EPISODE.model_copy(update=changes))


def environment_text(trajectory):
    """What stands between the turns, prompt included."""
    return TOKENIZER.decode(trajectory.token_ids[~trajectory.sampled].tolist())


# Tokens.


async def test_prompt_turns_and_passages_are_laid_end_to_end_and_only_turns_are_sampled():
    trajectory = await Episode([SEARCH, ANSWER]).run()
    prompt = tokens("Question: What is the capital of Peru?\n")
    information = tokens("\n\n<information>") + tokens("The capital of Peru is Lima.\n") + tokens("</information>\n\n")
    parts = [(prompt, False), (tokens(SEARCH), True), (information, False), (tokens(ANSWER), True)]
    assert trajectory.token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert trajectory.sampled.tolist() == [sampled for ids, sampled in parts for _ in ids]


async def test_log_probabilities_and_versions_stay_with_their_tokens():
    search, answer = len(tokens(SEARCH)), len(tokens(ANSWER))
    versions = [[4] * 3 + [5] * (search - 3), [6] * (answer - 1) + [9]]
    trajectory = await Episode([SEARCH, ANSWER], versions=versions).run()
    assert trajectory.versions.tolist() == versions[0] + versions[1]
    assert trajectory.oldest_version == 4
    np.testing.assert_array_equal(trajectory.logprobs, -(np.arange(search + answer, dtype=np.float32) + 1) / 8)


async def test_tokens_are_kept_as_they_were_sampled_and_never_tokenised_again():
    """The same text in the smallest pieces: a round trip through text would merge them."""
    letters = [token for letter in "capital of Peru" for token in tokens(letter)]
    turn = [*tokens("<think>"), *tokens("</think>"), *tokens("<search>"), *letters, *tokens("</search>")]
    assert tokens(TOKENIZER.decode(turn)) != turn
    episode = Episode([turn, ANSWER])
    trajectory = await episode.run()
    assert trajectory.token_ids[trajectory.sampled].tolist() == turn + tokens(ANSWER)
    assert episode.search.asked[0][0] == "capital of Peru"
    assert trajectory.depth == 1


async def test_each_turn_is_asked_for_with_everything_before_it():
    episode = Episode([SEARCH, ANSWER])
    trajectory = await episode.run()
    first, second = episode.policy.requests
    assert first.prompt == trajectory.token_ids[: len(first.prompt)].tolist() == tokens(f"Question: {QUESTION.text}\n")
    assert second.prompt == trajectory.token_ids[: -len(tokens(ANSWER))].tolist()
    assert (first.max_tokens, first.temperature) == (80, 0.9)
    assert first.stops == ("</search>", "</answer>")


async def test_a_trajectory_says_where_it_comes_from():
    trajectory = await Episode([SEARCH, ANSWER]).run(ticket=12, rollout=2)
    assert (trajectory.id, trajectory.worker, trajectory.question_id) == ("12:2", "w", "q")
    assert (trajectory.prediction, trajectory.reward, trajectory.em) == ("Lima", 1.0, 1.0)
    assert trajectory.format_valid
    assert (trajectory.turns, trajectory.depth) == (2, 1)
    assert trajectory.episode_s >= trajectory.search_s > 0


async def test_an_episode_has_its_time_beside_what_the_engine_samples(monkeypatch):
    """An engine that many share made evaluations fail, question after question."""
    episode = Episode([SEARCH, ANSWER] * 2, timeout_s=0.2)
    generate = episode.policy.generate

    async def slow(*given):
        await asyncio.sleep(0.3)
        return await generate(*given)

    monkeypatch.setattr(episode.policy, "generate", slow)
    assert (await episode.run()).prediction == "Lima"

    async def hangs(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(type(episode.search), "search", hangs)
    with pytest.raises(TimeoutError):
        await episode.run()


# Depth.


async def test_a_search_that_finds_something_adds_one_and_its_tokens():
    trajectory = await Episode([SEARCH, SEARCH, ANSWER]).run()
    assert trajectory.depth == 2, "a repeated query counts"
    assert trajectory.retrieval_tokens == 2 * len(tokens(SEARCH))


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ("<think>a</think><search></search>", {"": PERU}),
        ("<think>a</think><search>  \n </search>", {"": PERU}),
        (SEARCH, {"capital of Peru": []}),
        (SEARCH, {"capital of Peru": ["", " \n"]}),
        (SEARCH, {}),
        (NOTHING, {}),
        ("<search>capital of Peru", {"capital of Peru": PERU}),
    ],
)
async def test_a_turn_that_brings_nothing_adds_no_depth(turn, found):
    trajectory = await Episode([turn, ANSWER], found).run()
    assert (trajectory.depth, trajectory.retrieval_tokens, trajectory.turns) == (0, 0, 2)


async def test_one_document_among_blank_ones_counts():
    assert (await Episode([SEARCH, ANSWER], {"capital of Peru": ["", *PERU]}).run()).depth == 1


async def test_only_the_turns_that_found_something_count_towards_retrieval_tokens():
    longer = "<think>something else</think><search>capital of Chile</search>"
    trajectory = await Episode([longer, SEARCH, NOTHING, ANSWER]).run()
    assert (trajectory.depth, trajectory.retrieval_tokens) == (1, len(tokens(SEARCH)))


async def test_an_empty_query_is_not_searched_for():
    episode = Episode(["<think>a</think><search> </search>", ANSWER])
    trajectory = await episode.run()
    assert episode.search.asked == []
    assert "<information></information>" in environment_text(trajectory)


async def test_a_search_in_the_final_turn_is_not_executed():
    episode = Episode([SEARCH] * 4)
    trajectory = await episode.run()
    assert len(episode.search.asked) == EPISODE.s_max
    assert (trajectory.depth, trajectory.turns) == (3, 4)
    assert trajectory.sampled[-1]
    assert (trajectory.prediction, trajectory.reward) == (None, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([SEARCH, NOTHING, ANSWER, "<search></search>"]), min_size=5, max_size=5))
async def test_an_episode_has_at_most_s_max_searches_and_one_more_turn(turns):
    episode = Episode(turns, s_max=4)
    trajectory = await episode.run()
    ends = turns.index(ANSWER) + 1 if ANSWER in turns else 5
    assert trajectory.turns == len(episode.policy.requests) == ends
    assert trajectory.depth == len(episode.search.asked) == turns[: min(ends, 4)].count(SEARCH)
    assert trajectory.retrieval_tokens == trajectory.depth * len(tokens(SEARCH))
    assert trajectory.sampled.sum() == sum(len(tokens(turn)) for turn in turns[:ends])
    assert not trajectory.sampled[: len(tokens(f"Question: {QUESTION.text}\n"))].any()


# The environment's words.


async def test_a_malformed_turn_gets_a_notice_and_the_next_turn_goes_on():
    trajectory = await Episode([NOTHING, ANSWER], max_observation_tokens=500).run()
    prompt = f"Question: {QUESTION.text}\n"
    assert environment_text(trajectory) == prompt + ATLAS.notice
    assert (trajectory.prediction, trajectory.turns, trajectory.format_valid) == ("Lima", 2, False)
    assert trajectory.reward == pytest.approx(0.8)


def test_a_notice_that_does_not_fit_is_refused_before_anything_is_played():
    with pytest.raises(ConfigError, match=r"max_observation_tokens \(20\) must be >= 35"):
        Episode([], max_observation_tokens=20)


async def test_a_malformed_final_turn_ends_the_episode_without_a_notice():
    trajectory = await Episode([NOTHING] * 4, max_observation_tokens=500).run()
    assert environment_text(trajectory).count(ATLAS.notice) == 3
    assert trajectory.sampled[-1]
    assert (trajectory.prediction, trajectory.depth, trajectory.reward) == (None, 0, 0.0)


async def test_a_result_is_cut_to_the_limit_inside_its_tags():
    found = {"capital of Peru": ["t\n" + "many words " * 200]}
    trajectory = await Episode([SEARCH, ANSWER], found, max_observation_tokens=40).run()
    information = environment_text(trajectory).removeprefix(f"Question: {QUESTION.text}\n")
    assert (~trajectory.sampled).sum() == len(tokens(f"Question: {QUESTION.text}\n")) + 40
    assert information.startswith("\n\n<information>many words many")
    assert information.endswith("</information>\n\n")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=60), max_size=4), st.integers(35, 120))
def test_a_result_fits_its_limit_and_keeps_both_tags_whatever_was_found(documents, limit):
    ids = observation(documents, max_observation_tokens=limit)
    opening, closing = tokens("\n\n<information>"), tokens("</information>\n\n")
    assert len(ids) <= limit
    assert ids[: len(opening)] == opening
    assert ids[-len(closing) :] == closing


def test_what_search_r1_finds_is_shown_as_search_r1_shows_it():
    """Source: Search-R1's _passages2string and execute_predictions."""
    found = ['"Peru"\nThe capital of Peru is Lima.', "alone", " \n"]
    ids = observation(found, "paper", EnvironmentConfig().own.document_template, max_observation_tokens=200)
    text = TOKENIZER.decode(ids)
    shown = 'Doc 1(Title: "Peru") The capital of Peru is Lima.\nDoc 2(Title: alone) \nDoc 3(Title:  )'
    assert text == f"\n\n<information>{shown}</information>\n\n"


def test_a_passage_of_any_size_is_cut_before_it_is_tokenised():
    class Counting:
        longest = 0

        def __call__(self, text, **options):
            self.longest = max(self.longest, len(text))
            return TOKENIZER(text, **options)

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

    counting = Counting()
    ids = observation(["t\n" + "many words " * 1_000_000] * 3, tokenizer=counting)
    assert len(ids) == EPISODE.max_observation_tokens
    assert TOKENIZER.decode(ids).startswith("\n\n<information>many words many")
    assert counting.longest <= 16 * EPISODE.max_observation_tokens


async def test_a_result_or_a_question_that_holds_an_answer_is_not_the_models_answer():
    found = {"capital of Peru": ["t\n<answer>Lima</answer>"]}
    episode = Episode([SEARCH, "<think>b</think><answer>Rome</answer>"], found)
    question = dataclasses.replace(QUESTION, text="<answer>Lima</answer>?")
    trajectory = await episode.runner.run(question, 0, 0, "w")
    assert environment_text(trajectory).count("<answer>Lima</answer>") == 2
    assert (trajectory.prediction, trajectory.em, trajectory.f1) == ("Rome", 0.0, 0.0)


async def test_the_prompt_and_the_results_alone_score_nothing():
    found = {"capital of Peru": ["t\n<answer>Lima</answer>"]}
    trajectory = await Episode([SEARCH] * 4, found).run()
    assert (trajectory.prediction, trajectory.reward) == (None, 0.0)


# Failures and draws.


async def test_a_retriever_that_fails_ends_the_episode_by_name_and_makes_no_trajectory():
    episode = Episode([SEARCH, ANSWER], {"capital of Peru": RetrievalUnavailable("down")})
    with pytest.raises(RetrievalUnavailable, match="down"):
        await episode.run()
    assert len(episode.policy.requests) == 1, "the policy is not asked to go on without its result"


async def test_a_question_that_does_not_fit_fails_its_episode_with_its_length_and_the_limit():
    episode = Episode([ANSWER], max_prompt_tokens=5)
    length = len(tokens(f"Question: {QUESTION.text}\n"))
    with pytest.raises(EpisodeFailed, match=rf"'q' makes a prompt of {length} tokens, .*max_prompt_tokens \(5\)"):
        await episode.run()
    assert episode.policy.requests == []


async def test_greedy_episodes_have_no_seed_and_sampled_ones_one_per_turn():
    greedy, sampled = Episode([SEARCH, ANSWER]), Episode([SEARCH, ANSWER])
    await greedy.run(temperature=0)
    await sampled.run()
    assert [(r.temperature, r.seed) for r in greedy.policy.requests] == [(0, None)] * 2
    seeds = [r.seed for r in sampled.policy.requests]
    assert len(set(seeds)) == 2
    assert None not in seeds


async def test_draws_are_a_function_of_seed_ticket_rollout_and_turn():
    async def draws(ticket, rollout, seed):
        episode = Episode([SEARCH, SEARCH, ANSWER], seed=seed)
        await episode.run(ticket, rollout)
        return (*(draw for _, draw in episode.search.asked), *(request.seed for request in episode.policy.requests))

    places = [(ticket, rollout, seed) for ticket in range(3) for rollout in range(3) for seed in range(2)]
    found = [await draws(*place) for place in places]
    assert found == [await draws(*place) for place in places]
    assert len({draw for drawn in found for draw in drawn}) == 3 * len(places), "a search has that of its turn"


async def test_turns_that_are_cut_off_at_their_most_tokens_are_counted():
    """Not one whose last token ends the stop text."""
    exact = len(tokens(SEARCH))
    cut = await Episode([NOTHING * 40, SEARCH, ANSWER], max_turn_tokens=max(exact, len(tokens(ANSWER)))).run()
    assert (cut.turns, cut.cut_turns) == (3, 1)
    whole = await Episode([SEARCH, ANSWER]).run()
    assert whole.cut_turns == 0


async def test_the_share_of_the_evidence_that_was_shown_is_known():
    """Whatever the template makes of its title, and of white space; nothing where no evidence is known or needed."""
    both = ('"Peru"\nThe capital of  Peru\nis Lima.', '"Lima"\nLima lies by the sea.')

    async def recall(evidence, *turns):
        episode = Episode([*turns, ANSWER])
        question = dataclasses.replace(QUESTION, evidence=evidence)
        return (await episode.runner.run(question, 0, 0, "w")).recall

    assert await recall(both, SEARCH) == 0.5
    assert await recall(both[:1], SEARCH) == 1.0
    assert await recall(both, "<think>The capital of Peru is Lima.</think><search>Lima</search>") == 0.0
    assert await recall((), SEARCH) is None
    assert await recall(None, SEARCH) is None
