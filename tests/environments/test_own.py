"""Custom environments and rewards: what the interface promises, with the calculator of docs/examples."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cusearch_async.config import EnvironmentConfig, EpisodeConfig, load_config
from cusearch_async.data.questions import load_eval_questions, load_run_questions
from cusearch_async.environments import Environment, NoSearch, Observation, Quoted, Score
from cusearch_async.environments.agent import AgentSettings
from cusearch_async.errors import ConfigError, EpisodeFailed, InvalidTrajectory
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.prompting import check_lengths
from cusearch_async.types import Question
from docs.examples.calculator import Calculator, calculate
from tests.conftest import SLOW
from tests.environments.echo import Echo
from tests.fakes import STARTER, FakeSearch, Panic, ScriptedPolicy

TOKENIZER = AutoTokenizer.from_pretrained(STARTER)
EPISODE = EpisodeConfig(s_max=3, max_prompt_tokens=400, max_observation_tokens=200)
CALCULATOR = "docs.examples.calculator:Calculator"


def runner_of(turns, environments, **settings):
    policy = ScriptedPolicy(TOKENIZER, turns)
    return EpisodeRunner(policy, environments, TOKENIZER, EPISODE.model_copy(update=settings), 0), policy


def question(environment="e", answers=("5",)):
    return Question(id="q", text="How much?", answers=answers, category="x", environment=environment)


async def roll_out(turns, environment, **settings):
    runner, _ = runner_of(turns, {"e": environment}, **settings)
    return await runner.run(question(), 3, 1, "w")


def said(trajectory):
    return TOKENIZER.decode(trajectory.token_ids[~trajectory.sampled].tolist())


# The calculator.


async def test_two_tools_of_one_environment_both_count_for_depth():
    search = FakeSearch({"capital of Peru": ['"Peru"\nThe capital of Peru is Lima.']})
    calculator = EnvironmentConfig(name=CALCULATOR).make(search)
    turns = [
        "<search>capital of Peru</search>",
        "<calculate>9 - 4</calculate>",
        "<calculate>nine</calculate>",
        "<answer>5</answer>",
    ]
    runner, policy = runner_of(turns, {"e": calculator})
    trajectory = await runner.run(question(), 3, 1, "w")
    assert (trajectory.depth, trajectory.turns, trajectory.environment) == (2, 4, "e")
    assert (trajectory.reward, trajectory.prediction) == (1.0, "5")
    counted = TOKENIZER(turns[:2], add_special_tokens=False)["input_ids"]
    assert trajectory.retrieval_tokens == sum(map(len, counted))
    assert "The capital of Peru is Lima." in said(trajectory)
    assert "<result>5</result>" in said(trajectory)
    assert "<result>cannot be calculated</result>" in said(trajectory)
    assert policy.requests[0].stops == ("</search>", "</answer>", "</calculate>")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("9 - 4", 5), (" 2*(3+4)/7 ", 2), ("-3 + 1", -2), ("1e3", 1000), ("0.1+0.2", pytest.approx(0.3))],
)
def test_expressions_are_calculated(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "1/0", "9**9**9", "print(1)", "(", "1" * 400, "1 if 1 else 2", "(" * 300, "True", "'a'*9", "1e308*10"],
)
def test_what_is_no_calculation_has_no_value(expression):
    assert calculate(expression) is None


@given(st.text(max_size=30))
def test_nothing_that_a_policy_writes_can_break_the_calculator(expression):
    value = calculate(expression)
    assert value is None or isinstance(value, float)


def test_its_questions_need_both_tools_and_have_positive_answers():
    questions = Calculator.questions()
    assert len(questions) > 50
    assert all(int(q.answers[0]) > 0 for q in questions)
    assert len({q.id for q in questions}) == len(questions)


# What the interface promises.


def echo(reward=None):
    return Echo(Echo.Settings(), EnvironmentConfig(template="{question}").prompt, NoSearch(), reward)


async def test_an_environment_needs_no_search_and_may_give_negative_rewards():
    trajectory = await roll_out(["tool", "no", "end"], echo())
    assert (trajectory.depth, trajectory.turns, trajectory.reward) == (1, 3, -3.0)
    assert said(trajectory) == "How much?<tool><no>"
    assert not Echo.uses_retriever


async def test_it_is_not_asked_after_the_last_turn():
    trajectory = await roll_out(["tool"] * 4, echo())
    assert (trajectory.depth, trajectory.turns, trajectory.reward) == (3, 4, -3.0)


async def test_a_custom_reward_takes_the_place_of_the_environments_and_no_other_figure():
    def reward(episode, score):
        assert [segment.author for segment in episode.segments] == ["model", "echo", "model"]
        return 0.25 + episode.depth

    trajectory = await roll_out(["tool", "end"], echo(reward))
    assert (trajectory.reward, trajectory.prediction, trajectory.em) == (1.25, "x", 0.0)


async def test_a_reward_may_be_asynchronous():
    async def judge(episode, score):
        await asyncio.sleep(0)
        return 0.5

    assert (await roll_out(["end"], echo(judge))).reward == 0.5


def gives(value):
    return lambda episode, score: value


def raises(error):
    def broken(episode, score):
        raise error

    return broken


def nested(depth):
    return nested(depth + 1)


async def judged(episode, score):
    raise TimeoutError("the judge is silent")


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (gives(math.nan), "must give a finite number, got nan"),
        (gives(-math.inf), "must give a finite number, got -inf"),
        (gives(10**400), "failed: OverflowError: int too large"),
        (gives(None), "failed: TypeError: float"),
        (gives([0.5]), "failed: TypeError: float"),
        (gives("very good"), "failed: ValueError: could not convert string to float: 'very good'"),
        (raises(KeyError("JUDGE_URL")), "failed: KeyError: 'JUDGE_URL'"),
        (raises(SystemExit(3)), "failed: SystemExit: 3"),
        (raises(Panic("index out of bounds")), "failed: Panic: index out of bounds"),
        (raises(StopIteration()), "failed: StopIteration: StopIteration"),
        (raises(InvalidTrajectory("of my own")), "failed: InvalidTrajectory: of my own"),
        (lambda episode, score: nested(0), "failed: RecursionError: maximum recursion depth exceeded"),
        (judged, "failed: TimeoutError: the judge is silent"),
        (lambda: 1.0, "failed: TypeError: .* takes 0 positional arguments"),
    ],
)
async def test_whatever_a_users_reward_does_fails_its_episode_and_names_it(reward, why):
    """Before, a TypeError or a RecursionError ended the worker, and a launch with it."""
    with pytest.raises(EpisodeFailed, match=rf"^the reward tests\.environments\.test_own:.* {why}"):
        await roll_out(["end"], echo(reward))


async def test_a_reward_may_fail_its_episode_in_its_own_words():
    with pytest.raises(EpisodeFailed, match=r"^the judge has no opinion$"):
        await roll_out(["end"], echo(raises(EpisodeFailed("the judge has no opinion"))))


async def test_a_reward_that_is_not_asynchronous_lets_other_episodes_continue():
    """A judge over HTTP stopped all episodes of a worker for as long as it took, one after the other."""
    inside, together = [0], [0]

    def judge(episode, score):
        inside[0] += 1
        together[0] = max(together[0], inside[0])
        time.sleep(0.2)
        inside[0] -= 1
        return 0.5

    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(beat())
    found = await asyncio.gather(*(roll_out(["end"], echo(judge)) for _ in range(4)))
    beating.cancel()
    assert [trajectory.reward for trajectory in found] == [0.5] * 4
    assert together[0] > 1
    assert beats > 3


async def test_a_reward_that_must_not_be_called_in_a_thread_says_so():
    connection = sqlite3.connect(":memory:")

    def looks_up(episode, score):
        return connection.execute("select 1").fetchone()[0]

    async def looks_up_in_turn(episode, score):
        return looks_up(episode, score)

    with pytest.raises(
        EpisodeFailed, match=r"ProgrammingError: .*; make it async if it must not be called in a thread"
    ):
        await roll_out(["end"], echo(looks_up))
    assert (await roll_out(["end"], echo(looks_up_in_turn))).reward == 1


def test_a_reward_that_never_returns_does_not_keep_the_process_from_ending():
    script = """
import asyncio, threading
from cusearch_async.concurrency import in_daemon_thread
async def main():
    try:
        await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("given up")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60 * SLOW)
    assert done.stdout == "given up\n"


async def test_a_cancelled_reward_is_cancelled():
    started = asyncio.Event()

    async def slow(episode, score):
        started.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(roll_out(["end"], echo(slow)))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_long_observation_is_cut_and_its_frame_kept():
    trajectory = await roll_out(["many words " * 60, "end"], echo(), max_observation_tokens=20)
    assert (~trajectory.sampled).sum() == len(TOKENIZER("How much?")["input_ids"]) + 20
    assert said(trajectory).endswith(">")


async def test_a_frame_that_leaves_no_room_fails_the_episode():
    class Wordy(Echo):
        async def step(self, episode, turn):
            return Observation(text=Quoted("many words " * 100, "x", ""))

    wordy = Wordy(Wordy.Settings(), EnvironmentConfig(template="{question}").prompt, NoSearch())
    with pytest.raises(EpisodeFailed, match=r"takes \d+ tokens, more than episode.max_observation_tokens \(20\)"):
        await roll_out(["a", "end"], wordy, max_observation_tokens=20)


async def test_episodes_of_one_environment_do_not_share_their_memory():
    environment = echo()
    runners = [runner_of(["a"] * n + ["end"], {"e": environment})[0] for n in (0, 1, 2)]
    found = await asyncio.gather(*(runner.run(question(), 0, i, "w") for i, runner in enumerate(runners)))
    assert [t.reward for t in found] == [-1, -2, -3]


# A run of several.


@pytest.fixture
def two(tmp_path):
    path = tmp_path / "run.toml"

    def write(text):
        path.write_text('[run]\nname = "r"\n' + text, encoding="utf-8")
        return load_config(path)

    return write


SEVERAL = f'[environment.search]\nshare = 3\n[environment.calculator]\nname = "{CALCULATOR}"\n'


def test_a_run_of_several_environments_visits_the_questions_of_each_in_its_share(two):
    questions = load_run_questions(two(SEVERAL))
    labels = [questions.of(ticket).environment for ticket in range(64)]
    assert (labels.count("search"), labels.count("calculator")) == (48, 16)
    assert questions.of(labels.index("search")).id.startswith("search:atlas/")
    assert questions.of(labels.index("calculator")).id.startswith("calculator:letters/")


def test_the_ids_of_a_run_of_one_environment_are_those_of_its_source(two):
    assert load_run_questions(two("")).of(0).id.startswith("atlas/")


def test_an_environment_may_have_a_separate_source(two, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "who", "golden_answers": ["me"]}\n', encoding="utf-8")
    config = two(f'[environment.a]\n[environment.b]\nsource = "{tmp_path}/mine.jsonl"\n')
    assert [q.text for q in load_run_questions(config).all if q.environment == "b"] == ["who?"]


@pytest.mark.parametrize("text", ['[environment.a]\nsource = "x.jsonl"\n', f'[environment.a]\nname = "{CALCULATOR}"\n'])
def test_an_environment_of_other_questions_has_no_held_out_ones_of_atlas(two, text):
    with pytest.raises(ConfigError, match=r"eval\.suite must name benchmarks"):
        load_eval_questions(two(text))


def test_held_out_questions_are_run_in_the_environment_that_the_config_names(two, tmp_path):
    assert {q.environment for q in load_eval_questions(two(SEVERAL))} == {"search"}
    (tmp_path / "held.jsonl").write_text('{"question": "who", "golden_answers": ["me"]}\n', encoding="utf-8")
    named = two(SEVERAL + f'[eval]\nenvironment = "calculator"\nsuite = ["{tmp_path}/held.jsonl"]\n')
    assert [(q.environment, q.text) for q in load_eval_questions(named)] == [("calculator", "who?")]


def test_only_a_run_that_searches_needs_a_retriever(two):
    assert two(SEVERAL).searching
    assert not two('[environment.e]\nname = "tests.environments.echo:Echo"\n').searching
    agent = '[environment.a]\nname = "agent"\nagent = "mine:answer"\nsource = "atlas"\n'
    assert two(agent).searching
    assert not two(agent + "searches = false\n").searching


def test_an_environment_that_brings_no_questions_is_refused(two):
    config = two('[environment.e]\nname = "tests.environments.test_own:Empty"\n')
    with pytest.raises(ConfigError, match=r"environment\.e: tests.*Empty has no questions; set its source"):
        load_run_questions(config)


class Empty(Echo):
    @classmethod
    def questions(cls):
        return []


def test_answers_are_compared_by_the_metric_of_the_environment_and_by_squads_where_it_has_none(two):
    found = two(
        '[environment.search]\nmetric = "strict"\n[environment.plain]\n' + SEVERAL.partition("\n")[2]
    ).environment
    assert {label: environment.scoring for label, environment in found.items()} == {
        "search": "strict",
        "plain": "squad",
        "calculator": "squad",
    }


class Comparing(Echo):
    """Scores as people write them."""

    given = Score(reward=0.0)

    async def score(self, episode):
        return self.given


def comparing(score) -> Comparing:
    environment = Comparing(Comparing.Settings(), EnvironmentConfig(template="{question}").prompt, NoSearch())
    environment.given = score
    return environment


async def test_what_comparisons_and_numpy_give_is_a_score():
    """Before: stored, and then quarantined as no trajectory; or the worker ended."""
    given = Score(reward=True, em=True, f1=np.float32(0.5), format_valid=np.bool_(True), prediction="7")
    score = await comparing(given).final_score(None)
    assert score == Score(reward=1.0, em=1.0, f1=0.5, format_valid=True, prediction="7")
    assert [type(value) for value in (score.reward, score.em, score.f1, score.format_valid)] == [float] * 3 + [bool]


@pytest.mark.parametrize(("em", "f1"), [(100.0, 0.5), (0.5, 0.5), (1.0, 66.7), (0.0, -0.1), (float("nan"), 0.0)])
async def test_a_score_in_per_cent_is_refused(em, f1):
    """Curves showed 100, and comparisons of answers counted it as wrong."""
    with pytest.raises(EpisodeFailed, match="must give an em of 0 or 1 and an f1 from 0 to 1, got Score"):
        await comparing(Score(reward=1.0, em=em, f1=f1, prediction="7")).final_score(None)


def test_lists_of_an_agents_settings_may_be_text_with_commas():
    """From the command line they could not be given."""
    own = AgentSettings(command="python,x.py", passes="A,B", tools="search", ignores=["a,b"])
    assert (own.command, own.passes, own.tools, own.ignores) == (("python", "x.py"), ("A", "B"), ("search",), ("a,b",))


async def test_half_a_character_in_an_answer_is_a_question_mark():
    """A policy may have written it as an escape in JSON; it cannot be stored, and ended the worker."""
    assert (await comparing(Score(reward=1.0, prediction="caf\ud83d")).final_score(None)).prediction == "caf?"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.5, "must give a Score of numbers, got 0.5"),
        (Score(reward="much"), "must give a Score of numbers, got Score"),
        (Score(reward=1.0, prediction=7), "must give a text or None as its prediction, got 7"),
    ],
)
async def test_another_score_fails_the_episode_and_names_the_environment(given, said):
    with pytest.raises(EpisodeFailed, match=f"test_own:Comparing.score.. {said}"):
        await comparing(given).final_score(None)


class Unfinished(Environment):
    """With nothing but a prompt of another type."""

    def prompt(self, question):
        return f"Write about {question.text}"


@pytest.mark.parametrize("method", ["step", "score"])
async def test_a_method_that_is_missing_is_named_with_its_class(method):
    environment = Unfinished(Unfinished.Settings(), EnvironmentConfig().prompt, NoSearch())
    arguments = {"step": (None, "turn"), "score": (None,)}[method]
    with pytest.raises(NotImplementedError, match=rf"test_own:Unfinished\.{method}\(\) is missing"):
        await getattr(environment, method)(*arguments)


async def test_a_prompt_that_is_no_quoted_text_is_named_with_its_class():
    """Before any episode, and in a made-up one."""
    environments = {"e": Unfinished(Unfinished.Settings(), EnvironmentConfig().prompt, NoSearch())}
    said = r"test_own:Unfinished\.prompt\(\) must give a Quoted\(before, text, after\), got 'Write about How much\?'"
    with pytest.raises(ConfigError, match=said):
        check_lengths([question()], environments, TOKENIZER, EPISODE)
    runner, _ = runner_of(["end"], environments)
    with pytest.raises(ConfigError, match=said):
        await runner.run(question(), 3, 1, "w")
