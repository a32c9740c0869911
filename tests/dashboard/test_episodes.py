"""Episodes on the page: what they are made of, and which are shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cusearch_async.dashboard import episodes
from cusearch_async.dashboard.episodes import episodes_of, groups, stretches
from cusearch_async.dashboard.page import asset
from tests.fakes import ChatTokenizer
from tests.strategies import make_trajectory

EPISODES = [make_trajectory(i, 0, em=float(i % 2), question=f"Question {i}?") for i in range(30)]


class Letters(ChatTokenizer):
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def written(*texts: str):
    """An episode of these texts: prompt, then policy and environment in turn."""
    ids = [ord(c) for text in texts for c in text]
    sampled = np.array([place % 2 == 1 for place, text in enumerate(texts) for _ in text])
    count = int(sampled.sum())
    return replace(
        make_trajectory(question="Is <b> bold?"),
        token_ids=np.array(ids, dtype=np.int32),
        sampled=sampled,
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
    )


def pieces(*texts: str):
    """(class, text) of each stretch of one episode, and the colours."""
    found = episodes_of([written(*texts)], Letters())
    (group,) = found["groups"]
    return [of_one for _, of_one in group["episodes"][0]["parts"]], found["colours"]


def test_each_block_has_the_colour_of_its_tags():
    texts = ("ask <search>", "<think>hm</think><search>a & b</search>", "\n<information>x</information>\n", "<answer>y")
    assert stretches(written(*texts), Letters()) == [
        ("prompt", texts[0]),
        ("model", texts[1]),
        ("environment", texts[2]),
        ("model", texts[3]),
    ]
    prompt, turn, shown, last = pieces(*texts)[0]
    assert prompt == [("", "ask <search>")], "what the prompt explains is no search"
    assert turn == [("think", "<think>hm</think>"), ("search", "<search>a & b</search>")]
    assert shown == [("", "\n"), ("information", "<information>x</information>"), ("", "\n")]
    assert last == [("answer", "<answer>y")], "an answer that was cut off is one all the same"


def test_the_tags_of_another_environment_have_colours_and_are_in_the_legend():
    tags = {"plan", "count_words", "result", "final-answer"}
    found, colours = pieces(
        "use <tool>",
        "<plan>a</plan><count_words>b c</count_words>",
        "<result><b>2</b></result>",
        "<final-answer>2</final-answer>",
    )
    assert set(colours) == tags
    assert len(set(colours.values())) == 4, "each its own colour"
    assert {kind for of_one in found for kind, _ in of_one if kind} == set(colours.values())
    assert all(f".{kind} " in asset("page.css") for kind in colours.values()), "the page has the colour"
    many = "".join(f"<t{number}>x</t{number}>" for number in range(20))
    assert len(pieces("p", many)[1]) == 6
    assert pieces("p", "no tags, 1 < 2 > 0")[1] == {}


def test_at_most_so_many_are_shown_and_first_the_wrong_ones(monkeypatch):
    wrong = [number for number, episode in enumerate(EPISODES) if not episode.em]

    def shown(most: int):
        monkeypatch.setattr(episodes, "MOST", most)
        found = episodes_of(EPISODES, Letters())
        return [int(group["number"]) for group in found["groups"]], found["counted"]

    numbers, counted = shown(20)
    assert set(wrong) < set(numbers)
    assert len(numbers) == 20
    assert counted == "20 of 30 episodes, with 15 of the 15 wrong ones"
    numbers, counted = shown(5)
    assert numbers == wrong[::3]
    assert counted == "5 of 30 episodes, with 5 of the 15 wrong ones"
    assert shown(30)[1] == "all 30 episodes"


def test_the_groups_that_taught_most_come_first_with_the_advantages_of_the_selected():
    pool = [make_trajectory(ticket, rollout) for ticket in range(3) for rollout in range(2)]
    found = groups(pool, {0: 0.1, 2: -2.0, 3: 2.0, 4: 0.0}, Letters())["groups"]
    assert [group["number"] for group in found] == ["1", "0", "2"]
    assert [[one["advantage"] for one in group["episodes"]] for group in found] == [
        [-2.0, 2.0],
        [0.1, None],
        [0.0, None],
    ]
    assert [group["taught"] for group in found] == [4.0, 0.1, 0.0]
