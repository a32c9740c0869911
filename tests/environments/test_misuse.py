"""A user's environment or reward that does what it should not: named, and never more than its episode is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cusearch_async.config import EnvironmentConfig, load_config
from cusearch_async.data.questions import first_question, load_run_questions
from cusearch_async.environments import NoSearch, Observation, Quoted
from cusearch_async.errors import ConfigError, EpisodeFailed
from cusearch_async.types import Question
from tests.environments.echo import Echo
from tests.environments.test_own import echo, question, roll_out, runner_of


async def cancels_itself(episode, score):
    task = asyncio.ensure_future(asyncio.sleep(9))
    task.cancel()
    await task


def is_cancelled(episode, score):
    raise asyncio.CancelledError


@pytest.mark.parametrize("reward", [cancels_itself, is_cancelled])
async def test_a_reward_that_cancels_itself_fails_its_episode(reward):
    """As with a judge's cached task: no attempt counted, and the ticket was granted again and again without a word."""
    said = rf"^the reward tests.*:{reward.__name__} failed: CancelledError: it has cancelled itself$"
    with pytest.raises(EpisodeFailed, match=said):
        await roll_out(["end"], echo(reward))


def of_step(step):
    class Own(Echo):
        pass

    Own.step = step
    return Own(Own.Settings(), EnvironmentConfig(template="{question}").prompt, NoSearch())


async def gives_nothing(self, episode, turn):
    return None


async def gives_text(self, episode, turn):
    return Observation(text="12")


def gives_at_once(self, episode, turn):
    return Observation(text=Quoted("", "12", ""))


@pytest.mark.parametrize("step", [gives_nothing, gives_text, gives_at_once])
async def test_a_step_that_gives_no_observation_is_named(step):
    """It was an AttributeError of our files."""
    with pytest.raises(ConfigError, match=r"Own\.step\(\) must be async and give an Observation .*, got "):
        await roll_out(["a", "end"], of_step(step))


async def ends_the_process(self, episode, turn):
    exec("exit()")


@pytest.mark.parametrize(
    ("step", "why"), [(ends_the_process, "SystemExit"), (cancels_itself, "CancelledError: it has cancelled itself")]
)
async def test_a_step_ends_no_more_than_its_episode(step, why):
    """A policy that wrote exit() into a tool for code ended the worker with status 0."""
    both = lambda self, episode, turn: step(self, episode, turn) if step is ends_the_process else step(episode, turn)  # noqa: E731
    with pytest.raises(EpisodeFailed, match=rf"Own\.step\(\) failed: {why}"):
        await roll_out(["a", "end"], of_step(both))


def test_one_text_as_stops_is_refused():
    class Stopping(Echo):
        stops = "</call>"

    with pytest.raises(ConfigError, match=r"Stopping\.stops must be a tuple of texts, got '</call>'; is a comma"):
        Stopping(Stopping.Settings(), EnvironmentConfig(template="{question}").prompt, NoSearch())


async def test_metadata_that_a_users_code_changes_is_the_same_for_the_next_episode():
    """What a rollout had added to its messages was in the prompts of its siblings."""
    seen = []

    def adds(episode, score):
        seen.append(len(episode.question.metadata["messages"]))
        episode.question.metadata["messages"].append("mine")
        return 1.0

    asked = replace(question(), metadata={"messages": ["theirs"]})
    for rollout in range(2):
        runner, _ = runner_of(["end"], {"e": echo(adds)})
        await runner.run(asked, 3, rollout, "w")
    assert seen == [1, 1]


class Given(Echo):
    given: Any = ()

    @classmethod
    def questions(cls):
        return cls.given


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.toml").write_text(
        "[run]\nname = 'r'\n[environment.a]\nname = 'tests.environments.test_misuse:Given'\n", encoding="utf-8"
    )
    return load_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "given",
    [
        [Question(id=7, text="a", answers=("b",), category="c")],
        [Question(id="7", text="a", answers=(5,), category="c")],
        [Question(id="7", text="a", answers="Lima", category="c")],
        [Question(id="7", text="a", answers=None, category="c")],
        ["a question"],
    ],
)
def test_questions_of_ones_own_are_checked(config, given, monkeypatch):
    """All their episodes were quarantined, after they had been generated."""
    monkeypatch.setattr(Given, "given", given)
    for read in (load_run_questions, lambda config: first_question(config, "a")):
        with pytest.raises(ConfigError, match=r"test_misuse:Given\.questions\(\) must give Questions with texts"):
            read(config)


def test_questions_of_ones_own_have_the_answers_that_are_needed(config, monkeypatch):
    """Their episodes had the reward of the format alone, or failed at each simulated search."""
    monkeypatch.setattr(Given, "given", [Question(id="7", text="a", answers=(), category="c")])
    assert first_question(config, "a").id == "7"
    monkeypatch.setattr(Given, "needs_answers", True)
    with pytest.raises(ConfigError, match=r"environment\.a: its question '7' has no gold answers, which its reward"):
        first_question(config, "a")


def test_questions_of_ones_own_may_come_one_by_one(config, monkeypatch):
    monkeypatch.setattr(Given, "given", (Question(id=n, text="a", answers=("b",), category="c") for n in "12"))
    assert first_question(config, "a").id == "1"
