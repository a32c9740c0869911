"""What `check` tries of users' agents, before an engine is loaded."""

from __future__ import annotations

import asyncio
import gc
import re

import pytest
from openai import AsyncOpenAI, OpenAI

from cusearch_async.agents import episode as agent_episode
from cusearch_async.agents.parsing import Parsed
from cusearch_async.cli.preflight import calls
from cusearch_async.cli.preflight.trial import trial
from cusearch_async.config import load_config
from cusearch_async.environments.task import Task
from tests.agents.programs import in_words, with_tools
from tests.agents.templates import chat_tokenizer
from tests.agents.test_episodes import hermes

HERE = "tests.cli.test_trial_agents"
PATIENCE_S, ENDS_S = 3.0, 9.0
"""A blocked agent outlasts the trial, and ends before it is told of (`blocking.BLOCKED_S`) in a later test's log."""


@pytest.fixture(autouse=True)
def parser(monkeypatch):
    """vLLM's takes seconds to load."""
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: None)
    monkeypatch.setattr(calls, "parser_of", lambda *_: hermes)


def tried(atlas_config, agent: str, *overrides: str) -> dict[str, tuple[str, str]]:
    setting = "command" if "/" in agent else "agent"
    own = ["--environment.search.name", "agent", f"--environment.search.{setting}", agent, *overrides]
    found = trial(load_config(atlas_config, own), chat_tokenizer())
    return {finding.what: (finding.status, finding.text) for finding in found}


answers_with_tools, answers_in_words = with_tools, in_words


async def blocks(task: Task) -> str:
    client = OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=ENDS_S)
    reply = client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": task.question}])
    return reply.choices[0].message.content or ""


async def asks_much(task: Task) -> str:
    return await with_tools(Task(**{name: getattr(task, name) for name in task.__slots__} | {"search": finds_much}))


async def finds_much(query: str) -> list[str]:
    return ["long " * 1000]


async def gives_top_p(task: Task) -> str:
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    messages: list = [{"role": "user", "content": task.question}]
    reply = await client.chat.completions.create(model=task.model, messages=messages, top_p=0.95)
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("agent", ["answers_with_tools", "answers_in_words"])
def test_an_agent_with_and_without_tools_passes(atlas_config, agent):
    """The tags of the environment search came with the answer where there was no tool."""
    assert tried(atlas_config, f"{HERE}:{agent}") == {
        "environment.search": ("ok", "a made-up episode with the right answer has reward 1"),
        "method.name": ("ok", "sdga_phase selects 96 of 192 made-up trajectories"),
    }


def test_an_agent_that_blocks_the_event_loop_is_an_error_that_names_the_line(atlas_config, monkeypatch):
    """`check` and `launch` hung: it waits for an answer of the very loop that it blocks."""
    monkeypatch.setattr("cusearch_async.cli.preflight.trial.PATIENCE_S", PATIENCE_S)
    status, text = tried(atlas_config, f"{HERE}:blocks")["environment.search"]
    assert status == "error"
    line = blocks.__code__.co_firstlineno + 2
    assert f"it blocks the event loop (its newest frame: {__file__}:{line}); use an asynchronous client" in text


def test_an_episode_that_ended_at_a_limit_is_a_warning(atlas_config):
    status, text = tried(atlas_config, f"{HERE}:asks_much")["environment.search"]
    assert status == "warning"
    assert re.search(r"has reward 0: it asked for more than episode\.max_observation_tokens \(\d+\), which ended", text)


def test_a_field_that_is_refused_is_said_once_with_its_remedy_and_nothing_else(atlas_config, caplog):
    """Its client is left open, and was collected in the next loop: "Event loop is closed"."""
    status, text = tried(atlas_config, f"{HERE}:gives_top_p")["environment.search"]
    assert status == "error"
    assert text.count("top_p must be 1, got 0.95") == 1
    assert text.endswith("; leave it out, or name it in environment.LABEL.ignores")

    async def later() -> None:
        gc.collect()
        await asyncio.sleep(0.1)

    asyncio.run(later())
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text


def test_a_program_that_is_not_there_is_an_error(atlas_config):
    status, text = tried(atlas_config, "/nowhere/agent")["environment.search"]
    assert (status, "/nowhere/agent cannot be started: No such file or directory" in text) == ("error", True)


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        (lambda prompt, text, tools: Parsed(text), "it reads no call in '<tool_call>{"),
        (lambda prompt, text, tools: Parsed("", [("search", "{}")]), "it reads [('search', {})] in "),
        (lambda prompt, text, tools: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
    ids=["none", "another", "raises"],
)
def test_a_parser_that_does_not_read_what_the_chat_template_writes_is_told(atlas_config, monkeypatch, parser, said):
    """The policy's calls would be text, and no tool ever called."""
    monkeypatch.setattr(calls, "parser_of", lambda *_: parser)
    status, text = tried(atlas_config, f"{HERE}:answers_with_tools")["environment.search.parser"]
    assert (status, text.startswith("'hermes' may not be for the chat template of this model: ")) == ("warning", True)
    assert said in text
    assert "environment.search.parser" not in tried(atlas_config, f"{HERE}:answers_in_words")
