"""What `check` tries before an engine is loaded: environments, rewards and methods of the user's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from cusearch_async.agents import episode as agent_episode
from cusearch_async.algorithm.methods import Method, NoMemory, PlansRollouts, Selection
from cusearch_async.cli.preflight.calls import OneCall
from cusearch_async.cli.preflight.trial import trial
from cusearch_async.config import load_config
from cusearch_async.environments import DONE, Environment, Episode, Observation, Score
from cusearch_async.environments.task import Task
from cusearch_async.models import check_model
from cusearch_async.types import Question
from tests.agents.templates import chat_tokenizer

HERE = "tests.cli.test_trial"


class Loops(Environment):
    """Never ends an episode by itself, and has its questions with it."""

    @classmethod
    def questions(cls):
        return [Question(id="1", text="?", answers=("a",), category="x")]

    async def step(self, episode: Episode, turn: str) -> Observation:
        return Observation(counts=True)

    async def score(self, episode: Episode) -> Score:
        return Score(reward=float(episode.depth))


class Breaks(Loops):
    async def step(self, episode: Episode, turn: str) -> Observation:
        raise ValueError("my tool is broken")


class Ends(Loops):
    async def step(self, episode: Episode, turn: str) -> Observation:
        return DONE

    async def score(self, episode: Episode) -> Score:
        return Score(reward=float("nan"))


class Hangs(Loops):
    async def step(self, episode: Episode, turn: str) -> Observation:
        await asyncio.Event().wait()
        return DONE


class Searches(Loops):
    """Takes any turn for a search."""

    uses_retriever = True

    async def step(self, episode: Episode, turn: str) -> Observation:
        await self.search.search(turn, episode.seed, episode.question, episode.ticket)
        return Observation(counts=True)


def judge_is_down(episode: Episode, score: Score) -> float:
    raise ConnectionRefusedError(111, "Connection refused")


def no_file(episode: Episode, score: Score) -> float:
    return float(Path("/nowhere/weights.json").read_text())


def wants_an_answer(episode: Episode, score: Score) -> float:
    return float(score.prediction.lower() == episode.question.answers[0].lower())


def never_content(episode: Episode, score: Score) -> float:
    return 0.0


def of_a_hundred(episode: Episode, score: Score) -> float:
    return 100 * score.f1


def no_number(episode: Episode, score: Score) -> float:
    return float("nan")


class Twice(Method[NoMemory]):
    def select(self, pool, memory, rng):
        return Selection(indices=np.array([0, 0]), memory=memory)


class Raises(Method[NoMemory]):
    def select(self, pool, memory, rng):
        raise IndexError("list index out of range")


class Means(msgspec.Struct, frozen=True):
    means: tuple[float, ...] = ()


class Remembers(Method[Means]):
    """A mean of nothing, which JSON has no number for."""

    Memory = Means

    def select(self, pool, memory, rng):
        return Selection(indices=np.arange(32), memory=Means((0.5, float("nan"))))


class NumpyRemembers(Remembers):
    def select(self, pool, memory, rng):
        return Selection(indices=np.arange(32), memory=Means((np.float64(0.5).astype(np.float32),)))


class SkipsAll(PlansRollouts[NoMemory]):
    def select(self, pool, memory, rng):
        return Selection(indices=np.arange(4), memory=memory)

    def group_sizes(self, memory, questions, rollouts):
        return [0] * len(questions)


class Nothing(Method[NoMemory]):
    def select(self, pool, memory, rng):
        return Selection(indices=np.arange(0), memory=memory)


def two_arguments(ratio, advantages):
    return ratio * advantages


def one_number(ratio, advantages, settings):
    return (ratio * advantages).sum()


def detached(ratio, advantages, settings):
    return (ratio * advantages).detach()


def nothing_at_all(ratio, advantages, settings):
    pass


def found(atlas_config, *overrides: str) -> dict[str, tuple[str, str]]:
    config = load_config(atlas_config, overrides)
    tokenizer = check_model(config.model.location, config.episode.max_tokens)
    return {finding.what: (finding.status, finding.text) for finding in trial(config, tokenizer)}


def test_a_shipped_config_passes(atlas_config):
    tried = found(atlas_config)
    assert tried["environment.search"] == ("ok", "a made-up episode with the right answer has reward 0.8")
    assert tried["method.name"] == ("ok", "sdga_phase selects 96 of 192 made-up trajectories")


SHORT = ("--environment.mine.template", "atlas")


def test_of_several_environments_each_has_its_share_of_the_tickets(atlas_config):
    """A second label over a config that has one makes two, not another one."""
    tried = found(atlas_config, "--environment.mine.name", f"{HERE}:Loops", "--environment.mine.share", "3", *SHORT)
    assert (
        tried["environment.search"][1]
        == "a made-up episode with the right answer has reward 0.8; 1 of 4 tickets are its"
    )
    assert tried["environment.mine"][1].endswith("has reward 5; 3 of 4 tickets are its")


@pytest.mark.parametrize(
    ("setting", "value", "what", "said"),
    [
        (
            "environment.search.reward",
            "tests.environments.rewards:broken",
            "environment.search",
            "KeyError: 'JUDGE_URL'",
        ),
        ("environment.search.reward", f"{HERE}:no_file", "environment.search", "FileNotFoundError"),
        (
            "environment.search.reward",
            f"{HERE}:wants_an_answer",
            "environment.search",
            "episode without an answer failed: the reward tests.cli.test_trial:wants_an_answer failed: AttributeError",
        ),
        ("environment.search.reward", f"{HERE}:no_number", "environment.search", "must give a finite number, got nan"),
        ("environment.search.name", f"{HERE}:Breaks", "environment.search", "ValueError: my tool is broken"),
        ("environment.search.name", f"{HERE}:Ends", "environment.search", "reward"),
        ("method.name", f"{HERE}:Twice", "method.name", "select() gave"),
        ("method.name", f"{HERE}:Raises", "method.name", "IndexError: list index out of range"),
        ("method.name", f"{HERE}:Remembers", "method.name", "(0.5, nan)) could not be read back: Expected `float`"),
        ("method.name", f"{HERE}:NumpyRemembers", "method.name", "could not be read back: Encoding objects"),
        ("method.name", f"{HERE}:SkipsAll", "method.name", "SkipsAll.group_sizes() must give for each of the 64"),
        ("loss.objective", f"{HERE}:two_arguments", "loss.objective", "takes 2 positional arguments but 3 were given"),
        ("loss.objective", f"{HERE}:one_number", "loss.objective", "objective must have shape [4], got []"),
        ("loss.objective", f"{HERE}:detached", "loss.objective", "does not require grad"),
        ("loss.objective", f"{HERE}:nothing_at_all", "loss.objective", "gave None"),
    ],
)
def test_what_breaks_a_run_is_an_error_that_names_it(atlas_config, setting, value, what, said):
    status, text = found(atlas_config, f"--{setting}", value)[what]
    assert status == "error"
    assert said in text


def test_an_objective_that_can_be_trained_with_passes(atlas_config):
    tried = found(atlas_config, "--loss.objective", "docs.examples.objectives:cispo")
    assert tried["loss.objective"][0] == "ok"
    assert "loss.objective" not in found(atlas_config)


def test_a_method_that_selects_nothing_is_warned_of(atlas_config):
    status, text = found(atlas_config, "--method.name", f"{HERE}:Nothing")["method.name"]
    assert (status, text.endswith("selects 0 of 192 made-up trajectories")) == ("warning", True)


def test_a_reward_of_nothing_for_the_right_answer_is_warned_of(atlas_config):
    status, text = found(atlas_config, "--environment.search.reward", f"{HERE}:never_content")["environment.search"]
    assert (status, "with the right answer has reward 0; is the reward wrong" in text) == ("warning", True)


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [((), True), (("--method.singleton", "pool"), False), (("--method.name", "grpo_full"), False)],
)
def test_a_large_reward_that_would_be_an_advantage_is_warned_of(atlas_config, overrides, warns):
    tried = found(atlas_config, "--environment.search.reward", f"{HERE}:of_a_hundred", *overrides)
    assert tried["environment.search"][0] == "ok"
    assert ("method.singleton" in tried) == warns
    if warns:
        status, text = tried["method.singleton"]
        assert (status, "'raw' takes a reward, 100 in environment.search, as the advantage" in text) == (
            "warning",
            True,
        )


def test_an_environment_that_does_not_end_an_episode_is_ended(atlas_config):
    assert found(atlas_config, "--environment.search.name", f"{HERE}:Loops")["environment.search"] == (
        "ok",
        "a made-up episode with the right answer has reward 5",
    )


def test_a_service_that_is_not_there_yet_is_no_error(atlas_config):
    status, text = found(atlas_config, "--environment.search.reward", f"{HERE}:judge_is_down")["environment.search"]
    assert status == "not reachable"
    assert "Connection refused" in text


def test_a_search_finds_nothing_and_fails_nothing(atlas_config):
    assert found(atlas_config, "--environment.search.name", f"{HERE}:Searches")["environment.search"][0] == "ok"


def test_a_tool_that_hangs_is_given_up(atlas_config, monkeypatch):
    monkeypatch.setattr("cusearch_async.cli.preflight.trial.PATIENCE_S", 0.1)
    found_of = found(atlas_config, "--environment.search.name", f"{HERE}:Hangs")
    assert found_of["environment.search"][0] == "not reachable"


def test_questions_that_are_not_here_are_left_to_their_own_finding(atlas_config):
    assert found(atlas_config, "--data.source", "nowhere.jsonl") == {}


def test_an_agents_tool_is_called_once(atlas_config, tmp_path, monkeypatch):
    """Before any engine is loaded, and whatever form the model writes calls in."""
    model = chat_tokenizer()
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: None)
    CALLED.clear()
    config = load_config(
        atlas_config, ["--environment.search.name", "agent", "--environment.search.agent", f"{HERE}:calls_a_tool"]
    )
    tried = {finding.what: finding for finding in trial(config, model)}
    assert tried["environment.search"].status == "ok", tried
    assert "with the right answer has reward 1" in tried["environment.search"].text, "without the tags of searches"
    assert CALLED == [{"query": ANY, "count": 1, "kind": "web", "all": False}]
    assert CALLED[0]["query"].endswith("?")


@pytest.mark.parametrize("parameters", [None, {}, {"properties": None, "required": None}, {"required": ["query"]}])
def test_a_tool_may_leave_out_what_it_does_not_need(parameters):
    tools = [{"type": "function", "function": {"name": "finish", "parameters": parameters}}]
    (call,) = OneCall("Who?")((), "whatever", tools).calls
    assert call == ("finish", '{"query": "Who?"}' if parameters and parameters["required"] else "{}")


ELSEWHERE = ("--environment.far.name", "agent", "--environment.far.remote", "http://127.0.0.1:9000")


@pytest.mark.parametrize("token", ["", "t"])
def test_agents_elsewhere_need_a_token_and_others_do_not_need_theirs(atlas_config, monkeypatch, token):
    """Without one, or with a model that is no chat model, the worker ended after it had loaded vLLM, and the other
    environment's episode was said to fail."""
    monkeypatch.setenv("CUSEARCH_AGENTS_TOKEN", token)
    tried = found(atlas_config, *ELSEWHERE)
    assert tried["environment.search"][0] == "ok"
    status, text = tried["environment.far"]
    said = "an agent needs a chat model: " if token else "environment.LABEL.remote needs a token: set"
    assert (status, text.startswith(said)) == ("error", True)
    assert found(atlas_config, *ELSEWHERE, "--environment.b.name", "agent")["environment.far"][0] == "error"
    monkeypatch.setattr("cusearch_async.cli.preflight.trial.AgentRunner", lambda *_: None)
    said = "no made-up episode: its agents run elsewhere"
    assert found(atlas_config, *ELSEWHERE)["environment.far"][1].startswith(said)


CALLED: list[dict] = []


async def calls_a_tool(task: Task) -> str:
    fields = {
        "query": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"enum": ["web", "news"]},
        "all": {"type": "boolean"},
        "page": {"type": "integer"},
    }
    parameters = {"type": "object", "properties": fields, "required": ["query", "count", "kind", "all"]}
    tools: list = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    messages: list = [{"role": "user", "content": task.question}]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or ():
                CALLED.append(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "nothing"})
    return message.content or ""
