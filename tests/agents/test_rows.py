"""Which history a request continues: a program may change its own, branch, ask twice, or two things at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.agents.api import Refused, TurnRequest
from cusearch_async.agents.conversation import Message
from cusearch_async.agents.turns import Turns
from cusearch_async.environments import Episode
from cusearch_async.errors import EngineDied, EpisodeFailed
from cusearch_async.rollout.limit import Limit
from tests.agents.programs import SEARCH
from tests.agents.test_episodes import QUESTION, Scene, calling, parser  # noqa: F401
from tests.weights.test_http import until

END = Scene([]).tokenizer.eos_token


def turns_of(scene: Scene) -> Turns:
    environment = scene.runner._environments["a"]
    return Turns(scene.runner.chat, environment, Episode(question=QUESTION, ticket=3, rollout=1), 1.0, Limit(600.0))


def request_of(*texts: str) -> TurnRequest:
    """Messages of the program and the policy in turn."""
    messages = (Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts))
    return TurnRequest(tuple(messages), (), 50, (), False)


async def test_a_changed_history_is_a_row_of_its_own():
    scene = Scene(["a", "5"], "rewrites_history")
    trajectory = await scene.run()
    first, second = trajectory.rows
    asked = f"user: Where?{END}\nassistant: "
    assert scene.text(first) == f"{asked}a{END}"
    assert scene.text(second) == f"{asked}(a summary) a{END}\nuser: And?{END}\nassistant: 5{END}"
    assert [row.sampled.sum() for row in (first, second)] == [2, 2]
    assert scene.tokenizer.decode(second.token_ids[second.sampled]) == f"5{END}", "the summary is not the policy's"
    assert [row.versions.tolist() for row in (first, second)] == [[0, 0], [1, 1]]
    assert (trajectory.turns, trajectory.depth, trajectory.reward) == (2, 1, 1.0)


async def test_a_turn_with_its_stop_put_back_is_known():
    """Each request began a row, and nothing counted: Search-R1's loops close the tag for the policy."""
    trajectory = await Scene(["<search>a</search>", "<search>b</search>", "5"], "writes_its_tags_back").run()
    assert (len(trajectory.starts), trajectory.depth, trajectory.reward) == (1, 2, 1.0)


async def test_without_tools_turns_of_one_growing_message_count():
    """A ReAct program with a scratchpad had depth 0 whatever it did."""
    trajectory = await Scene(["<search>a</search>", "<search>b</search>", "5"], "grows_one_message").run()
    assert (len(trajectory.starts), trajectory.depth, trajectory.reward) == (3, 2, 1.0)


async def test_a_result_counts_once_though_the_history_changes_at_every_turn():
    scene = Scene([calling("Pinsk"), calling("Belarus"), "5"], "forgets_old_results")
    trajectory = await scene.run()
    assert [scene.text(row).count("<tool_call>") for row in trajectory.rows] == [2, 2]
    assert (trajectory.depth, trajectory.turns, trajectory.reward) == (2, 3, 1.0)
    assert trajectory.retrieval_tokens == sum(len(turn) for turn in scene.policy._turns[:2])


@pytest.mark.parametrize("program", ["gives_other_ids_and_forgets", "gives_no_ids_and_forgets"])
async def test_results_count_though_the_history_changes_and_the_ids_are_the_programs(program):
    """Those of a new row were taken for results of other calls, and none counted."""
    trajectory = await Scene([calling("Pinsk"), calling("Belarus"), "5"], program).run()
    assert (trajectory.depth, trajectory.turns, len(trajectory.starts)) == (2, 3, 2)


async def test_results_that_are_told_as_text_count():
    scene = Scene([calling("Pinsk"), calling("Belarus"), "5"], "tells_its_calls_as_text")
    trajectory = await scene.run()
    assert (trajectory.depth, len(trajectory.starts), trajectory.turns) == (2, 3, 3)
    assert (await Scene([calling("Pinsk"), "5"], "tells_its_calls_as_text", tools=("calculate",)).run()).depth == 0


async def test_another_sample_of_the_first_turn_holds_no_results():
    """All samples before it counted, though no program had run their calls."""
    turns = turns_of(Scene([calling("Pinsk"), calling("Pinsk"), "5"]))
    request = replace(request_of("Where?"), tools=(SEARCH,), max_tokens=200, is_first=True)
    for _ in range(3):
        await turns.ask(request)
    assert (len(turns.rows), turns._episode.depth, turns.counted_tokens) == (3, 0, 0)


async def test_two_requests_at_once_are_two_rows():
    scene = Scene(["5", "6"], "asks_two_at_once")
    trajectory = await scene.run()
    assert sorted(scene.text(row) for row in trajectory.rows) == [
        f"user: Or where?{END}\nassistant: 6{END}",
        f"user: Where?{END}\nassistant: 5{END}",
    ]
    assert (trajectory.prediction, trajectory.turns, trajectory.depth) == ("5 6", 2, 0), "neither answers the other"


@dataclass
class Written:
    """A row, as the oracle writes it down."""

    texts: list[str]
    """Of its messages."""
    tokens: str
    requests: list[TurnRequest] = field(default_factory=list)

    def continues(self, texts: list[str]) -> bool:
        return texts[: len(self.texts)] == self.texts and len(texts) == len(self.texts) + 1


KINDS = st.tuples(st.sampled_from(["continue", "edit", "cut", "fresh", "again"]), st.integers(0, 9))


@given(st.lists(KINDS, max_size=6))
def test_every_request_is_asked_behind_the_longest_row_that_it_continues(kinds):
    """The oracle holds whole texts: what was asked, and what the policy said to it."""
    scene = Scene([f"t{number}" for number in range(9)], s_max=8)
    turns, rows, asked = turns_of(scene), [], 0

    async def ask_all() -> None:
        nonlocal asked
        for number, (kind, place) in enumerate([("fresh", 0), *kinds]):
            row = rows[place % len(rows)] if rows else None
            if kind == "again" and row is not None:
                before = await turns.ask(row.requests[-1])
                assert before.message.content == row.texts[-1], "no second sample"
                continue
            if kind == "fresh" or row is None:
                texts = [f"q{number}"]
            elif kind == "continue":
                texts = [*row.texts, f"n{number}"]
            elif kind == "edit":
                texts = [*row.texts[:-1], "edited", f"n{number}"]
            else:  # an older turn is asked anew
                texts = [*row.texts[:-2], f"n{number}"]
            request = request_of(*texts)
            reply = await turns.ask(request)
            assert reply.message.content == f"t{asked}"
            longest = max((row for row in rows if row.continues(texts)), key=lambda row: len(row.texts), default=None)
            if longest is None:
                prompt = "".join(f"{m.role}: {m.content}{END}\n" for m in request.messages) + "assistant: "
                longest = Written([], prompt)
                rows.append(longest)
            else:
                longest.tokens += f"\nuser: {texts[-1]}{END}\nassistant: "
            assert scene.tokenizer.decode(scene.policy.requests[asked].prompt) == longest.tokens
            longest.texts, longest.tokens = [*texts, f"t{asked}"], longest.tokens + f"t{asked}{END}"
            longest.requests.append(request)
            asked += 1

    asyncio.run(ask_all())
    found = [row.tape for row in turns.rows]
    assert [scene.tokenizer.decode(tape.token_ids) for tape in found] == [row.tokens for row in rows]
    assert turns.finished == len(scene.policy.requests) == asked
    for tape in found:
        sampled = np.array(tape.token_ids)[tape.sampled]
        assert len(sampled) == sum(map(len, tape.logprobs))
        assert scene.tokenizer.decode(sampled).replace(END, "").replace("t", "").isdigit()


class Slow:
    """A policy that waits until it may answer."""

    def __init__(self, scene: Scene) -> None:
        self.begun, self.go = 0, asyncio.Event()
        self._generate = scene.policy.generate
        scene.policy.generate = self.generate

    async def generate(self, *arguments):
        self.begun += 1
        await self.go.wait()
        return await self._generate(*arguments)


async def test_two_equal_requests_at_once_are_one():
    scene = Scene(["5"])
    slow, turns = Slow(scene), turns_of(scene)
    both = asyncio.gather(turns.ask(request_of("?")), turns.ask(request_of("?")))
    slow.go.set()
    one, other = await both
    assert one is other
    assert (slow.begun, len(turns.rows)) == (1, 1)


async def test_a_row_that_is_being_asked_is_not_continued():
    scene = Scene(["a", "b", "c"])
    turns = turns_of(scene)
    await turns.ask(request_of("?"))
    slow = Slow(scene)
    both = asyncio.gather(turns.ask(request_of("?", "a", "x")), turns.ask(request_of("?", "a", "y")))
    await until(lambda: slow.begun == 2)
    slow.go.set()
    assert [reply.message.content for reply in await both] == ["b", "c"]
    begun = f"user: ?{END}\nassistant: a{END}\nuser: "
    assert [scene.tokenizer.decode(row.tape.token_ids) for row in turns.rows] == [
        f"{begun}x{END}\nassistant: b{END}",
        f"{begun}y{END}\nassistant: c{END}",
    ]


def with_a_tool(text: str) -> TurnRequest:
    return replace(request_of(text), tools=({"type": "function", "function": {"name": "search"}},))


async def test_a_mistake_is_remembered_until_a_turn_after_it_is_sound():
    """Not by one beside it, which the program asked for at the same time."""
    scene = Scene(['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "b", "c"])
    slow, turns = Slow(scene), turns_of(scene)
    both = asyncio.gather(turns.ask(with_a_tool("x")), turns.ask(with_a_tool("y")))
    await until(lambda: slow.begun == 2)
    slow.go.set()
    await both
    assert turns.may_fail
    await turns.ask(with_a_tool("z"))
    assert not turns.may_fail


async def test_a_limit_is_remembered_though_another_row_has_room():
    scene = Scene(["a", "b"])
    turns = turns_of(scene)
    await turns.ask(request_of("?"))
    with pytest.raises(Refused):
        await turns.ask(request_of("?", "a", "word " * 2000))
    assert turns.at_limit == "episode.max_observation_tokens (200)"
    await turns.ask(request_of("and?"))
    assert (turns.at_limit, turns.may_fail) == ("", True)


async def test_searches_at_once_are_waited_for_once(monkeypatch):
    scene, now = Scene([]), [0.0]
    turns, go = turns_of(scene), asyncio.Event()

    async def search(*_):
        await go.wait()
        return []

    monkeypatch.setattr(type(turns._environment.search), "search", search)
    monkeypatch.setattr("cusearch_async.agents.turns.time.monotonic", lambda: now[0])
    both = [asyncio.ensure_future(turns.search("x"))]
    await asyncio.sleep(0)
    now[0] = 1.0
    both.append(asyncio.ensure_future(turns.search("y")))
    await asyncio.sleep(0)
    now[0] = 3.0
    go.set()
    await asyncio.gather(*both)
    assert turns.waited_s == 3.0


async def test_a_row_of_which_nothing_was_asked_is_continued_last():
    """Any request continues it, also those of other rows."""
    scene = Scene(["a", "b"])
    turns = turns_of(scene)
    await turns.ask(request_of("?"))
    with pytest.raises(Refused):
        await turns.ask(request_of("other", "x", "word " * 2000))
    assert (await turns.ask(request_of("?", "a", "more"))).message.content == "b"
    assert [len(row.tape.logprobs) for row in turns.rows] == [2, 0]


async def test_a_turn_is_sampled_to_its_end_though_the_client_has_gone():
    scene = Scene(["5"])
    slow, turns = Slow(scene), turns_of(scene)
    asking = asyncio.ensure_future(turns.ask(request_of("?")))
    await until(lambda: slow.begun == 1)
    asking.cancel()
    await asyncio.wait([asking])
    slow.go.set()
    assert (await turns.ask(request_of("?"))).message.content == "5"
    assert slow.begun == 1


@pytest.mark.parametrize("is_first_done", [True, False])
async def test_a_request_that_is_sent_again_gets_its_own_sample(is_first_done):
    """It got that of the first that had asked the same; its own was trained, and nobody had read it."""
    scene = Scene(["5", "6"])
    turns, request = turns_of(scene), replace(request_of("?"), is_first=True)
    slow = Slow(scene)
    first = asyncio.ensure_future(turns.ask(request))
    await until(lambda: slow.begun == 1)
    if is_first_done:
        slow.go.set()
        await first
        slow.go.clear()
    asking = asyncio.ensure_future(turns.ask(request))
    await until(lambda: slow.begun == 2)
    asking.cancel()
    await asyncio.wait([asking])
    again = asyncio.ensure_future(turns.ask(replace(request, is_first=False)))
    slow.go.set()
    assert [(await one).message.content for one in (first, again)] == ["5", "6"]
    assert (slow.begun, len(turns.rows)) == (2, 2)


async def test_two_that_lost_their_connections_get_their_own_samples():
    scene = Scene(["5", "6"])
    turns, request = turns_of(scene), replace(request_of("?"), is_first=True)
    slow = Slow(scene)
    both = [asyncio.ensure_future(turns.ask(request)) for _ in range(2)]
    await until(lambda: slow.begun == 2)
    again = []
    for asking in both:
        asking.cancel()
        await asyncio.wait([asking])
        again.append(asyncio.ensure_future(turns.ask(replace(request, is_first=False))))
        await asyncio.sleep(0)
    slow.go.set()
    assert [(await one).message.content for one in again] == ["5", "6"]


async def test_the_end_of_an_episode_ends_its_turns():
    scene = Scene(["5"])
    slow, turns = Slow(scene), turns_of(scene)
    asking = asyncio.ensure_future(turns.ask(request_of("?")))
    await until(lambda: slow.begun == 1)
    await turns.end()
    with pytest.raises(Refused, match="this session has ended"):
        await asking
    with pytest.raises(Refused, match="this session has ended"):
        await turns.ask(request_of("?"))


async def test_a_request_that_failed_leaves_its_row_as_it_was():
    """The next one continues it."""
    scene = Scene(["a", "b"])
    turns = turns_of(scene)
    await turns.ask(request_of("?"))
    with pytest.raises(Refused, match=r"more than episode\.max_observation_tokens"):
        await turns.ask(request_of("?", "a", "long " * 300))
    assert (await turns.ask(request_of("?", "a", "short"))).message.content == "b"
    assert len(turns.rows) == 1


async def test_a_new_row_has_the_room_of_an_episode():
    scene = Scene(["a", "b"], max_prompt_tokens=20)
    turns = turns_of(scene)
    await turns.ask(request_of("?"))
    longer = "word " * 15
    assert (await turns.ask(request_of("?", "other", longer))).message.content == "b"
    with pytest.raises(Refused, match="more than is left of the row"):
        await turns.ask(request_of("?", "other", "word " * 2000))
    assert turns.at_limit


async def test_an_outage_is_remembered_whatever_fails_after_it(monkeypatch):
    scene = Scene([])
    turns, failures = turns_of(scene), [EngineDied("no memory"), EpisodeFailed("too long")]

    async def fails(*_):
        raise failures.pop(0)

    monkeypatch.setattr(scene.policy, "generate", fails)
    for failure, text in ((EngineDied, "a"), (EpisodeFailed, "b")):
        with pytest.raises(failure):
            await turns.ask(request_of(text))
    assert str(turns.outage) == "no memory"


async def test_what_a_chat_template_cannot_render_fails_the_request_alone(monkeypatch):
    scene = Scene(["a"])
    turns = turns_of(scene)
    render = scene.tokenizer.apply_chat_template

    def fails(messages, **options):
        if messages[0]["content"] == "no":
            raise ValueError("not so")
        return render(messages, **options)

    monkeypatch.setattr(scene.tokenizer, "apply_chat_template", fails)
    with pytest.raises(EpisodeFailed, match="not so"):
        await turns.ask(request_of("no"))
    assert (await turns.ask(request_of("yes"))).message.content == "a"
    assert len(turns.rows) == 1, "nothing was asked in the first"
