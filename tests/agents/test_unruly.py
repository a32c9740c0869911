"""Programs of users that misbehave: their episode fails with the reason, and the worker continues."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from contextlib import suppress
from dataclasses import replace

import aiohttp
import pytest

from cusearch_async.agents import conversation
from cusearch_async.agents import episode as agent_episode
from cusearch_async.agents.api import Refused
from cusearch_async.agents.conversation import Message, ToolCall
from cusearch_async.agents.parsing import Parsed
from cusearch_async.environments.task import Ending, Task
from cusearch_async.errors import ContractMismatch, EpisodeFailed
from cusearch_async.lifecycle import signals
from cusearch_async.transport import codec
from tests.agents.programs import SEARCH, client_of, with_tools
from tests.agents.test_episodes import Scene, calling, parser  # noqa: F401  (a fixture)
from tests.agents.test_rows import request_of, turns_of
from tests.conftest import SLOW
from tests.fakes import Panic
from tests.rollout.workers import until


async def ask(task: Task) -> str:
    async with client_of(task) as client:
        messages = [{"role": "user", "content": task.question}]
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        return reply.choices[0].message.content or ""


async def cancels_what_it_awaits(task: Task) -> str:
    await ask(task)
    helper = asyncio.ensure_future(asyncio.sleep(100))
    helper.cancel()
    await helper
    return "5"


async def exits(task: Task) -> str:
    await ask(task)
    sys.exit(3)


async def runs_a_tool_that_exits(task: Task) -> str:
    async def tool() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    await ask(task)
    await asyncio.gather(tool())
    return "5"


async def pastes_a_whole_site(task: Task) -> str:
    messages = [{"role": "user", "content": task.question}, {"role": "assistant", "content": await ask(task)}]
    async with client_of(task) as client:
        messages.append({"role": "user", "content": "word " * 1_000_000})
        reply = await client.chat.completions.create(model=task.model, messages=messages)
        return reply.choices[0].message.content or ""


def fails_at_once(task: Task) -> str:
    raise SystemExit(3)


async def panics(task: Task) -> str:
    await ask(task)
    raise Panic("index out of bounds")


def returning(result: object):
    async def agent(task: Task) -> object:
        await ask(task)
        return result

    return agent


def scene_of(agent, turns=("5", "5"), **settings) -> Scene:
    scene = Scene([*turns], **settings)
    scene.runner._environments["a"].agent = agent
    return scene


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        (cancels_what_it_awaits, "with_tools failed: CancelledError: it has cancelled itself"),
        (exits, "with_tools failed: SystemExit: 3"),
        (runs_a_tool_that_exits, "with_tools failed: EpisodeFailed: SystemExit: 3"),
        (fails_at_once, "with_tools failed: SystemExit: 3"),
        (panics, "with_tools failed: Panic: index out of bounds"),
        (returning(Ending("5", stderr=b"log")), r"must give its stderr as a text, got b'log'"),
        (returning(10**400), r"a text, a finite number or None, got 1000"),
        (returning("x" * 100_000), r"an answer of 100000 characters, more than 65536"),
    ],
)
async def test_the_episode_fails_by_name(agent, told):
    with pytest.raises(EpisodeFailed, match=told):
        await scene_of(agent).run()


async def test_of_what_cannot_fit_no_token_is_made(monkeypatch):
    """5 MB took seconds, in which all other episodes waited."""
    encoded = []
    encode = conversation.encode
    monkeypatch.setattr(
        conversation, "encode", lambda *given, **more: encoded.append(given[1]) or encode(*given, **more)
    )
    trajectory = await scene_of(pastes_a_whole_site).run()
    assert trajectory.prediction is None
    assert max(map(len, encoded), default=0) < 100_000


LONG = "word " * 1_000_000


@pytest.mark.parametrize("place", ["a call", "a tool"])
async def test_calls_and_tools_that_cannot_fit_are_not_tokenised_either(place, monkeypatch):
    """Only the text of messages was counted."""
    rendered = []
    scene = Scene([])
    render = scene.tokenizer.apply_chat_template
    monkeypatch.setattr(scene.tokenizer, "apply_chat_template", lambda *a, **b: rendered.append(a) or render(*a, **b))
    turns, asked = turns_of(scene), request_of("?")
    call = Message("assistant", "", (ToolCall("call00000", "search", json.dumps({"query": LONG})),))
    tool = {"type": "function", "function": {"name": "search", "description": LONG}}
    of = {"a call": replace(asked, messages=(*asked.messages, call)), "a tool": replace(asked, tools=(tool,))}
    with pytest.raises(Refused, match="more than the tokens of an episode can"):
        await turns.ask(of[place])
    assert not rendered


async def test_a_task_that_is_cancelled_before_it_begins_leaves_no_warning(recwarn):
    async def begins_and_cancels(task: Task) -> str:
        asyncio.ensure_future(asyncio.sleep(100)).cancel()
        return await ask(task)

    assert (await scene_of(begins_and_cancels).run()).reward == 1.0
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


async def test_a_cancelled_episode_is_not_its_agents_failure():
    """As where the worker ends."""
    asked = asyncio.Event()

    async def waits(task: Task) -> str:
        asked.set()
        await asyncio.sleep(1000)
        return "5"

    running = asyncio.ensure_future(scene_of(waits).run())
    await asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 10 * SLOW)


@pytest.mark.parametrize("result", ["half \ud83d", Ending("half \ud83d", stderr="half \ud83d")])
async def test_half_a_character_is_stored_as_a_question_mark(result):
    """The policy itself may have written it, as an escape in the arguments of a call."""
    trajectory = await scene_of(returning(result)).run()
    assert trajectory.prediction == "half ?"
    stored = codec.decode(codec.encode(trajectory), 10_000)
    assert (stored.prediction, stored.stderr) == ("half ?", trajectory.stderr)


async def test_an_agent_that_does_not_end_loses_its_slot_after_a_while(monkeypatch, caplog):
    """It catches everything and tries again, as retry loops do."""
    monkeypatch.setattr(agent_episode, "END_S", 0.05)
    is_over = False

    async def never_ends(task: Task) -> str:
        while not is_over:
            try:
                await ask(task)
                await asyncio.sleep(1000)
            except BaseException:
                await asyncio.sleep(0)
        return "5"

    try:
        with pytest.raises(EpisodeFailed, match=r"with_tools took longer than episode\.timeout_s"):
            await asyncio.wait_for(scene_of(never_ends, timeout_s=0.2).run(), 20 * SLOW)
        assert "with_tools does not end though it is cancelled; it is left alone" in caplog.text
    finally:
        is_over = True


async def test_an_agent_that_swallows_its_first_cancellation_is_cancelled_again(monkeypatch, caplog):
    monkeypatch.setattr(agent_episode, "END_S", 0.05)

    async def swallows_one(task: Task) -> str:
        await ask(task)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)
        return "5"

    with pytest.raises(EpisodeFailed, match="took longer"):
        await asyncio.wait_for(scene_of(swallows_one, timeout_s=0.2).run(), 20 * SLOW)
    assert "does not end" not in caplog.text


async def test_the_program_of_an_episode_that_is_ended_at_once_is_cancelled_on(monkeypatch):
    """After a learner has gone back, an episode is cancelled again each second; the program was left running."""
    monkeypatch.setattr(agent_episode, "END_S", 0.05)
    monkeypatch.setattr(signals, "CANCEL_AGAIN_S", 0.02)
    programs = []

    async def swallows_two(task: Task) -> str:
        programs.append(asyncio.current_task())
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
        return await asyncio.sleep(1000, "5")

    episode = asyncio.ensure_future(scene_of(swallows_two).run())
    await until(lambda: programs)
    await signals.end_tasks([episode])
    await until(programs[0].done)


async def test_a_long_stderr_is_cut_to_what_the_buffer_takes():
    """It was stored, refused when it was claimed, and its episode run again."""
    trajectory = await scene_of(returning(Ending("5", stderr="x" * 2_000_000 + "end"))).run()
    assert trajectory.stderr.endswith("xend")
    assert codec.decode(codec.encode(trajectory), 10_000).stderr == trajectory.stderr


class OfAnotherCorpus:
    async def search(self, *_: object) -> list[str]:
        raise ContractMismatch("the retriever serves another corpus now")


async def test_a_retriever_with_another_corpus_is_no_failure_of_the_agents():
    async def forgiving(task: Task) -> str:
        with pytest.raises(ContractMismatch):
            await task.search("Pinsk")
        return await ask(task)

    scene = scene_of(forgiving)
    scene.runner._environments["a"].search = OfAnotherCorpus()
    with pytest.raises(ContractMismatch, match="another corpus"):
        await scene.run()


def called_with(name: str, arguments: str) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "x"}, turn, {"role": "tool", "tool_call_id": "1", "content": "y"}]


@pytest.mark.parametrize(
    ("messages", "tool"),
    [
        (called_with("search", '{"query": "\\ud83d"}'), SEARCH),
        (called_with("search", "[" * 5000), SEARCH),
        (called_with("search\ud83d", "{}"), SEARCH),
        ([{"role": "user", "content": "x"}], SEARCH | {"function": SEARCH["function"] | {"name": "a\ud83d"}}),
    ],
    ids=["half a character in arguments", "deep arguments", "in a name", "in a tool"],
)
async def test_what_the_policy_may_have_written_is_sent_back_without_an_error_of_the_server(messages, tool):
    async def agent(task: Task) -> str:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
            body = json.dumps({"messages": messages, "tools": [tool]})
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{task.base_url}/chat/completions", data=body, headers=headers) as answer:
                assert answer.status in (200, 400), await answer.text()
        return await ask(task)

    assert (await scene_of(agent).run()).reward == 1.0


async def test_the_policy_with_unruly_arguments_is_searched_for_without_half_characters():
    turn = '<tool_call>{"name": "search", "arguments": {"query": "Pinsk \\ud83d"}}</tool_call>'
    trajectory = await scene_of(with_tools, (turn, calling("Pinsk"), "5")).run()
    assert (trajectory.depth, trajectory.reward) == (2, 1.0)


async def test_a_turn_that_cannot_be_read_fails_its_episode_though_the_program_asks_again(monkeypatch):
    """It was sampled and on no tape: what broke a parser was left out of what is trained on."""
    read = []

    def fails_once(_, said, tools):
        read.append(said)
        if len(read) == 1:
            raise ZeroDivisionError("in the parser")
        return Parsed(said, ())

    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: fails_once)
    with pytest.raises(EpisodeFailed, match="what the policy wrote cannot be read: ZeroDivisionError: in the parser"):
        await Scene(["odd", "5"], "asks_until_it_is_answered").run()
    assert len(read) == 2
