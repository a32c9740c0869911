"""Episodes on the page: what they are made of, and which are shown."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from cusearch_async import models
from cusearch_async.config import load_config
from cusearch_async.dashboard import episodes
from cusearch_async.dashboard.episodes import earlier, episodes_of, groups, stretches
from cusearch_async.dashboard.page import asset
from cusearch_async.dashboard.server import Shown, application
from cusearch_async.run import folder as run_folder
from cusearch_async.run.history import record_start
from cusearch_async.training.recorder import Recorder
from cusearch_async.training.selector import Selector, initial_method_state
from cusearch_async.types import Pool
from tests.fakes import ChatTokenizer
from tests.strategies import make_trajectory
from tests.training.learners import QUESTIONS

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


def test_tags_that_are_never_closed_take_no_time():
    """16,000 characters took 0.3 s, a page of a policy that has collapsed minutes."""
    began = time.process_time()
    assert episodes._closed("<think>" * 20_000 + "<plan>x</plan></search>") == {"plan"}
    assert time.process_time() - began < 1


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


PLACES = {0: "abc", 1: "bcd", 2: "cde", 3: "cab"}
"""Step -> the questions of its pool."""


@pytest.fixture
def recorded(atlas_config, tmp_path, monkeypatch):
    """The folder of a run that has recorded some steps."""
    small = ["--pool.questions", "3", "--pool.rollouts", "2", "--method.budget", "4", "--loss.minibatch", "4"]
    config = load_config(atlas_config, [*small, "--run.folder", str(tmp_path / "run")])
    run_folder.mark(config.folder, config.run.name)
    record_start(config, 1, 0)

    async def record() -> None:
        selector = Selector(config, QUESTIONS, initial_method_state(config.method, config.episode.s_max))
        async with Recorder(config.folder, config.run.records_mib, 1) as recorder:
            for step, names in PLACES.items():
                pool = (
                    make_trajectory(3 * step + i // 2, i % 2, depth=i, reward=i / 8, question_id=f"q/{names[i // 2]}")
                    for i in range(6)
                )
                recorder.write(selector.choose(Pool(step, tuple(pool))))
                await recorder.finish()

    asyncio.run(record())
    monkeypatch.setattr(models, "load_tokenizer", lambda _: Letters())
    return config.folder


def test_the_same_question_earlier_is_found_in_the_newest_steps_that_have_it(recorded, monkeypatch):
    def steps(name: str, before: int) -> list[int]:
        found = earlier(recorded, f"q/{name}", before)
        assert {group["id"] for group in found} <= {f"q/{name}"}
        return [group["step"] for group in found]

    assert steps("a", 3) == [0]
    assert steps("c", 3) == [2, 1, 0]
    assert steps("c", 1) == [0]
    assert steps("e", 1) == steps("", 3) == steps("c\0", 3) == []
    monkeypatch.setattr(episodes, "MOST_EARLIER", 2)
    assert steps("c", 3) == [2, 1]
    (group, *_) = earlier(recorded, "q/c", 3)
    assert group["colours"] == {}, "those of its own step"
    assert [one["depth"] for one in group["episodes"]] == [0, 1], "its own episodes and no others"


def test_a_record_that_cannot_be_read_hides_no_other(recorded):
    (recorded / "records" / "000001-e1.zz").write_bytes(b"damaged")
    assert [group["step"] for group in earlier(recorded, "q/c", 3)] == [2, 0]


def test_a_browser_gets_the_same_question_earlier(recorded):
    async def ask(query: str):
        server = TestServer(application({"demo": Shown(recorded, None)}))
        async with TestClient(server) as client, client.get(f"/demo/step/3/earlier{query}") as answer:
            return answer.status, await answer.json()

    status, found = asyncio.run(ask("?question=q%2Fb"))
    assert (status, [group["step"] for group in found["groups"]]) == (200, [1, 0])
    assert asyncio.run(ask("")) == (200, {"groups": []})
