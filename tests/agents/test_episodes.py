"""Episodes of agents, with the real openai client over HTTP, a scripted policy, and templates of several habits."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from cusearch_async.agents import episode as agent_episode
from cusearch_async.agents.conversation import further_ends
from cusearch_async.agents.episode import AgentRunner
from cusearch_async.agents.parsing import Parsed
from cusearch_async.config import EnvironmentConfig, EpisodeConfig
from cusearch_async.errors import ConfigError, EngineDied, EpisodeFailed, RetrievalUnavailable, SearchRefused
from cusearch_async.types import Question
from tests.agents.templates import PLAIN, TEMPLATES, chat_starter, chat_tokenizer
from tests.conftest import SLOW
from tests.fakes import FakeSearch, ScriptedPolicy

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
QUESTION = Question(id="q", text="Where?", answers=("5",), category="x", environment="a", metadata={"rubric": "short"})
FOUND = {"Pinsk": ["Pinsk is in Belarus."], "Belarus": ["Its capital is Minsk.", "It has 5 parts."]}


def hermes(prompt, text, tools):
    calls = [json.loads(match) for match in CALL.findall(text)]
    found = [(call["name"], json.dumps(call["arguments"])) for call in calls]
    return Parsed(CALL.sub("", text), found) if tools else Parsed(text)


def without_thoughts(prompt, text, tools):
    thoughts, _, said = text.rpartition("</think>")
    return hermes(prompt, said, tools)._replace(thoughts=thoughts.removeprefix("<think>"))


def calling(*queries: str, text: str = "") -> str:
    calls = ({"name": "search", "arguments": {"query": query}} for query in queries)
    return text + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


class Scene:
    def __init__(self, turns, program="with_tools", template=PLAIN, found=FOUND, seed=0, **settings) -> None:
        self.tokenizer = chat_tokenizer(template)
        end = self.tokenizer.eos_token
        self.policy = ScriptedPolicy(self.tokenizer, [turn if turn.endswith("CUT") else turn + end for turn in turns])
        self.search = FakeSearch(found)
        own = {
            key: settings.pop(key) for key in ("tools", "ignores", "command", "remote", "silence_s") if key in settings
        }
        own |= {} if own.keys() & {"command", "remote"} else {"agent": f"tests.agents.programs:{program}"}
        environment = EnvironmentConfig(name="agent", **own)
        episode = EpisodeConfig(s_max=3, max_prompt_tokens=200, max_observation_tokens=200, max_turn_tokens=200)
        environments = {"a": environment.make(self.search)}
        self.runner = AgentRunner(
            self.policy, environments, self.tokenizer, episode.model_copy(update=settings), seed=seed
        )

    async def run(self, temperature: float | None = None):
        return await self.runner.run(QUESTION, 3, 1, "w", temperature)

    def text(self, trajectory) -> str:
        return self.tokenizer.decode(trajectory.token_ids)


@pytest.fixture(autouse=True)
def parser(monkeypatch):
    """vLLM's takes seconds to load; tests/system/test_agents.py has it."""
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: hermes)


async def test_an_agent_with_a_tool_makes_a_trajectory_of_what_was_asked_and_sampled():
    scene = Scene([calling("Pinsk"), calling("Belarus", text="Next. "), "5"])
    trajectory = await scene.run()
    end = scene.tokenizer.eos_token
    assert scene.text(trajectory) == (
        f"Tools: searchuser: Where?{end}\nassistant: "
        f"{calling('Pinsk')}{end}\ntool: Pinsk is in Belarus.{end}\nassistant: "
        f"Next. {calling('Belarus')}{end}\ntool: Its capital is Minsk.\nIt has 5 parts.{end}\nassistant: 5{end}"
    )
    assert (trajectory.depth, trajectory.turns, trajectory.reward, trajectory.em) == (2, 3, 1.0, 1.0)
    assert (trajectory.prediction, trajectory.format_valid, trajectory.environment) == ("5", True, "a")
    assert trajectory.retrieval_tokens == sum(len(turn) for turn in scene.policy._turns[:2])


@pytest.mark.parametrize("template", TEMPLATES)
async def test_every_sampled_token_is_the_policys_and_the_next_turn_is_asked_behind_it(template):
    """Whatever the client and the template make of it: the JSON is written with other spaces than the policy's."""
    turns = ['<think>hm</think>So: <tool_call>{"name":"search","arguments":{"query":"Pinsk"}}</tool_call>', "5"]
    scene = Scene(turns, template=TEMPLATES[template])
    trajectory = await scene.run()
    sampled = trajectory.token_ids[trajectory.sampled]
    assert sampled.tolist() == [token for turn in scene.policy._turns for token in turn]
    first, second = scene.policy.requests
    assert second.prompt[: len(first.prompt) + len(scene.policy._turns[0])] == first.prompt + scene.policy._turns[0]
    assert trajectory.token_ids.tolist() == second.prompt + scene.policy._turns[1]
    np.testing.assert_array_equal(trajectory.logprobs, -(np.arange(len(sampled), dtype=np.float32) + 1) / 8)


@pytest.mark.parametrize("program", ["with_responses", "with_messages"])
async def test_the_other_apis_give_the_same_trajectory(program):
    turns = [calling("Pinsk", "Belarus"), calling("Belarus", text="Next. "), "5"]
    one, other = await Scene(turns).run(), await Scene(turns, program).run()
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert (other.depth, other.turns, len(other.starts), other.reward) == (2, 3, 1, 1.0)


async def test_every_search_has_a_draw_of_its_own_also_before_the_first_turn():
    """All that came before a turn had the seed 0, and those of one turn had the same: noise was one draw."""
    scene = Scene(["5"] * 4, "searches_first")
    for ticket, rollout in ((3, 0), (3, 1), (4, 0), (3, 0)):
        await scene.runner.run(QUESTION, ticket, rollout, "w")
    drawn = [seed for _, seed in scene.search.asked]
    assert len(set(drawn[:6])) == 6
    assert drawn[6:] == drawn[:2], "a repeated episode meets the same"


async def test_without_tools_an_answered_turn_counts():
    scene = Scene(["search: Pinsk", "5"], "in_words")
    trajectory = await scene.run()
    assert (trajectory.depth, trajectory.reward) == (1, 1.0)


async def test_only_results_of_the_named_tools_count():
    trajectory = await Scene([calling("Pinsk"), "5"], tools=("calculate",)).run()
    assert (trajectory.depth, trajectory.retrieval_tokens) == (0, 0)


@pytest.mark.parametrize("program", ["gives_other_ids", "gives_no_ids"])
async def test_results_count_whatever_ids_the_program_gives_its_calls(program):
    """Before: all of its trajectories were of depth 0, without a word."""
    trajectory = await Scene([calling("Pinsk"), calling("Belarus"), "5"], program).run()
    assert (trajectory.depth, trajectory.turns, len(trajectory.starts)) == (2, 3, 1)


async def test_two_calls_at_once_are_one_turn_of_depth():
    trajectory = await Scene([calling("Pinsk", "Belarus"), "5"]).run()
    assert (trajectory.depth, trajectory.turns) == (1, 2)


@pytest.mark.parametrize("program", ["streaming", "streaming_responses"])
async def test_a_streaming_client_gets_the_same(program):
    trajectory = await Scene(["5"], program).run()
    assert (trajectory.reward, trajectory.depth) == (1.0, 0)


async def test_a_request_that_is_sent_again_gets_the_same_turn():
    scene = Scene(["5"], "asks_twice")
    trajectory = await scene.run()
    assert (len(scene.policy.requests), trajectory.turns) == (1, 1)


async def test_a_request_for_more_tokens_is_another_one():
    """Before: the turn that was cut came again."""
    trajectory = await Scene(["5 it is", "5"], "asks_for_more").run()
    assert (trajectory.turns, trajectory.prediction) == (2, "5")


async def test_a_reward_of_the_agents_own():
    trajectory = await Scene([calling("Pinsk"), "x"], "rewards_itself").run()
    assert (trajectory.reward, trajectory.em, trajectory.prediction) == (0.25, 0, None)


async def test_a_request_that_is_made_anew_gets_another_sample_up_to_the_limit_of_turns():
    scene = Scene(["a", "b", "5"], "samples_three")
    trajectory = await scene.run()
    assert (trajectory.turns, len(trajectory.starts), trajectory.prediction) == (3, 3, "5")
    trajectory = await Scene(["a", "b", "5"], "samples_three", s_max=1).run()
    assert (trajectory.turns, trajectory.prediction) == (2, None)


async def test_a_program_that_asks_the_same_for_ever_is_stopped():
    with pytest.raises(EpisodeFailed, match=r"the same request came 101 times; its answer does not change"):
        await Scene(["a"], "asks_for_ever").run()


async def test_a_turn_for_which_the_program_asked_less_is_not_cut_at_the_runs_limit():
    """The alarm advised a larger episode.max_turn_tokens, which changed nothing."""
    trajectory = await Scene(["It isCUT"], "asks_for_little").run()
    assert (trajectory.prediction, trajectory.cut_turns) == ("length", 0)
    assert (await Scene(["It isCUT"], "asks_for_little", max_turn_tokens=6).run()).cut_turns == 1


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("It isCUT", "AssertionError"),
        ('<tool_call>{"name": "look", "arguments": {"query": "x"}}</tool_call>', "KeyError: 'look'"),
        ('<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>', "KeyError: 'query'"),
        ('<tool_call>{"name": "search", "arguments": "x"}</tool_call>', "TypeError"),
        ('<tool_call>{"name": "search", "arguments": {"query": null}}</tool_call>', "AttributeError"),
        ('<tool_call>{"name": "search", "arguments": {"query": ["x"]}}</tool_call>', "AttributeError"),
    ],
)
async def test_a_program_that_fails_at_the_policys_mistake_ends_the_episode_without_an_answer(turn, said):
    """Else the policy's worst turns would be tried again, and never trained on."""
    trajectory = await Scene([turn], "trusts_the_policy", max_turn_tokens=6 if "CUT" in turn else 200).run()
    assert (trajectory.prediction, trajectory.reward, trajectory.turns) == (None, 0.0, 1)
    assert said in trajectory.stderr


async def test_a_program_that_fails_after_a_sound_turn_fails_its_episode():
    with pytest.raises(EpisodeFailed, match="TypeError"):
        await Scene(["5"], "trusts_the_policy").run()


async def test_calls_have_ids_of_nine_letters_and_digits_as_mistrals_templates_want_them():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('id') }}{% endif %}{% endfor %}{% endfor %}" + PLAIN
    )
    assert (await Scene([calling("Pinsk", "Belarus"), "5"], template=template).run()).depth == 1


async def test_a_template_that_shows_one_call_a_turn_takes_two():
    """As Llama 3's."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one') }}{% endif %}{% endfor %}" + PLAIN
    )
    trajectory = await Scene([calling("Pinsk", "Belarus"), "5"], template=template).run()
    assert (trajectory.depth, trajectory.turns, len(trajectory.starts)) == (1, 2, 1)


async def test_a_special_token_in_a_result_stays_text():
    scene = Scene([calling("Pinsk"), "5"], found={"Pinsk": ["a <|endoftext|> b"]})
    trajectory = await scene.run()
    given = trajectory.token_ids[~trajectory.sampled]
    assert (given == scene.tokenizer.eos_token_id).sum() == 2, "the ends of the question and of the result"
    assert "a <|endoftext|> b" in scene.text(trajectory)


async def test_a_turn_that_was_cut_is_ended_for_the_policy():
    scene = Scene(["search: PinskCUT", "5"], "in_words", found={"PinskCUT": ["x"]})
    trajectory = await scene.run()
    assert f"PinskCUT{scene.tokenizer.eos_token}\nuser: x" in scene.text(trajectory)
    given = scene.tokenizer.decode(trajectory.token_ids[~trajectory.sampled])
    assert given.startswith(f"user: Where?{scene.tokenizer.eos_token}\nassistant: {scene.tokenizer.eos_token}\nuser: x")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("fails", r"the agent tests.agents.programs:fails failed: KeyError: .no such thing"),
        ("times_out", r"failed: TimeoutError: its browser"),
        ("asks_nothing", r"ended without asking the policy$"),
        ("rewards_nothing_finite", r"must return a text, a finite number or None, got nan"),
        ("changes_temperature", r"temperature must be the run's, 1 \(episode.temperature\), got 0.123"),
    ],
)
async def test_a_failure_is_named(program, message):
    with pytest.raises(EpisodeFailed, match=message) as failed:
        await Scene(["a", "b"], program).run()
    assert str(failed.value).count("must be") <= 1, "and once"


async def test_a_field_that_is_ignored_is_told_once_and_counted(caplog):
    caplog.set_level("INFO")
    scene = Scene(["a", "b"], "changes_temperature", ignores=("temperature",))
    counted = [(await scene.run()).ignored_fields for _ in range(2)]
    assert counted == [1, 1]
    (said,) = [record.message for record in caplog.records if "ignored" in record.message]
    assert "gives temperature, which is ignored (environment.LABEL.ignores)" in said
    assert [request.temperature for request in scene.policy.requests] == [1.0, 1.0]


async def test_an_agent_that_hangs_fails_its_episode():
    with pytest.raises(EpisodeFailed, match=r"took longer than episode.timeout_s \(0.05 s\)"):
        await Scene(["a"], "hangs", timeout_s=0.05).run()


async def test_an_agents_time_is_that_beside_the_policys_turns(monkeypatch):
    scene = Scene(["5"], timeout_s=1.0 * SLOW)
    generate = scene.policy.generate

    async def slow(*given):
        await asyncio.sleep(1.2 * SLOW)
        return await generate(*given)

    monkeypatch.setattr(scene.policy, "generate", slow)
    assert (await scene.run()).prediction == "5"


@pytest.mark.parametrize("error", [RetrievalUnavailable("down"), SearchRefused("no")])
@pytest.mark.parametrize("program", ["with_tools", "forgives"])
async def test_a_retriever_that_fails_keeps_its_name_whatever_the_agent_makes_of_it(program, error):
    with pytest.raises(type(error), match=str(error)):
        await Scene([calling("Pinsk"), "5"], program, found={"Pinsk": error}).run()


@pytest.mark.parametrize("program", ["with_tools", "forgives"])
async def test_an_engine_that_dies_keeps_its_name(program, monkeypatch):
    scene = Scene(["5"], program)

    async def dies(*_):
        raise EngineDied("out of memory")

    monkeypatch.setattr(scene.policy, "generate", dies)
    with pytest.raises(EngineDied, match="out of memory"):
        await scene.run()


@pytest.mark.parametrize("program", ["with_tools", "forgives"])
async def test_an_episode_ends_after_its_turns_without_an_answer(program):
    scene = Scene([calling("Pinsk")] * 5, program, s_max=2)
    trajectory = await scene.run()
    assert (trajectory.turns, trajectory.depth, trajectory.reward, trajectory.format_valid) == (3, 2, 0.0, False)
    assert trajectory.sampled[-1], "nothing after the last turn"


@pytest.mark.parametrize(
    ("found", "settings", "limit"),
    [
        ("long " * 300, {}, "episode.max_observation_tokens (200)"),
        ("long " * 100_000, {}, "the 25600 characters of an episode's tokens"),
        ("short", {"s_max": 1}, "2 turns (episode.s_max)"),
    ],
)
async def test_a_limit_ends_the_episode_without_an_answer_and_is_told_once(found, settings, limit, caplog):
    """In silence the policy learned not to search."""
    scene = Scene([calling("Pinsk")] * 6, found={"Pinsk": [found]}, **settings)
    for _ in range(2):
        trajectory = await scene.run()
        assert (trajectory.prediction, trajectory.reward) == (None, 0.0)
    (said,) = [record for record in caplog.records if "ended without an answer" in record.message]
    assert (said.levelname, f"with_tools asked for more than {limit}: " in said.message) == ("WARNING", True)
    assert scene.runner.limits_met == {limit}


async def test_a_prompt_that_is_too_long_is_said():
    with pytest.raises(
        EpisodeFailed, match=r"ended without .*; it was refused: the new messages take .*max_prompt_tokens"
    ):
        await Scene(["5"], max_prompt_tokens=10).run()


async def test_a_parser_that_fails_is_named_and_the_turn_is_not_taken_twice(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("in the parser")

    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: fails)
    with pytest.raises(EpisodeFailed, match="what the policy wrote cannot be read: ZeroDivisionError: in the parser"):
        await Scene(["5"]).run()


@pytest.mark.parametrize("template", TEMPLATES)
async def test_thoughts_that_a_parser_takes_out_are_not_the_programs_and_are_trained_on(template, monkeypatch):
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: without_thoughts)
    turns = [f"<think>Pinsk?</think>{calling('Pinsk')}", "<think>So.</think>5"]
    scene = Scene(turns, template=TEMPLATES[template])
    trajectory = await scene.run()
    assert (trajectory.prediction, trajectory.reward, trajectory.depth) == ("5", 1.0, 1)
    (row,) = trajectory.rows
    end = scene.tokenizer.eos_token
    assert scene.tokenizer.decode(row.token_ids[row.sampled]) == "".join(turn + end for turn in turns)


async def test_a_turn_ends_where_the_models_generation_config_says(monkeypatch, tmp_path):
    starter = chat_starter(tmp_path / "model")
    assert further_ends(AutoTokenizer.from_pretrained(starter)) == ("</search>", "</answer>")
    assert further_ends(chat_tokenizer()) == ()
    monkeypatch.setattr(agent_episode, "further_ends", lambda tokenizer: ("</search>", "</answer>"))
    scene = Scene([])
    texts = ["<think>a</think><search>Pinsk</search>", "5" + scene.tokenizer.eos_token]
    scene.policy = ScriptedPolicy(scene.tokenizer, texts)
    monkeypatch.setattr(
        scene.runner, "chat", replace(scene.runner.chat, policy=scene.policy, parsers={"a": reads_searches})
    )
    trajectory = await scene.run()
    assert [request.stops for request in scene.policy.requests] == [("</search>", "</answer>")] * 2
    assert (trajectory.depth, trajectory.cut_turns, trajectory.prediction) == (1, 0, "5")
    (row,) = trajectory.rows
    assert scene.tokenizer.decode(row.token_ids[row.sampled]) == "".join(texts)


async def test_the_end_of_text_ends_a_turn_too_where_the_template_has_another_end(monkeypatch):
    """A base model's habit. Before, the answer was `5<|endoftext|>`, and its reward 0."""

    plain = chat_tokenizer()

    def tokenizer_with_im_end(template):
        tokenizer = deepcopy(plain)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
        tokenizer.chat_template = template.replace("END", "<|im_end|>")
        return tokenizer

    monkeypatch.setattr(sys.modules[__name__], "chat_tokenizer", tokenizer_with_im_end)
    scene = Scene([calling("Pinsk"), "5"])
    assert scene.runner.chat.end == "<|im_end|>" != scene.tokenizer.eos_token
    trajectory = await scene.run()
    assert (trajectory.prediction, trajectory.reward, trajectory.depth, trajectory.cut_turns) == ("5", 1.0, 1, 0)
    assert len(trajectory.starts) == 1, "what follows continues the same row"


@pytest.mark.parametrize(("ids", "ends"), [(2, 1), ([2, 3], 2), (None, 0)])
def test_one_number_in_the_generation_config_is_an_end_too(monkeypatch, ids, ends):
    monkeypatch.setattr("cusearch_async.models.generation_config", lambda _: SimpleNamespace(eos_token_id=ids))
    tokenizer = chat_tokenizer()
    assert tokenizer.eos_token_id not in (2, 3)
    assert len(further_ends(tokenizer)) == ends


def reads_searches(_, text, tools):
    if match := re.search("<search>(.*)</search>", text):
        return Parsed("", [("search", json.dumps({"query": match[1]}))])
    return Parsed(text)


async def test_greedy_episodes_have_no_seed_and_others_one_of_each_turn():
    greedy, sampled = Scene([calling("Pinsk"), "5"]), Scene([calling("Pinsk"), "5"])
    await greedy.run(temperature=0.0)
    await sampled.run()
    assert [request.seed for request in greedy.policy.requests] == [None, None]
    assert len({request.seed for request in sampled.policy.requests} - {None}) == 2


async def test_the_seed_of_a_turn_is_a_function_of_seed_ticket_rollout_and_turn():
    async def seeds(ticket, rollout, seed):
        scene = Scene([calling("Pinsk"), "5"], seed=seed)
        await scene.runner.run(QUESTION, ticket, rollout, "w")
        return tuple(request.seed for request in scene.policy.requests)

    places = [(ticket, rollout, seed) for ticket in range(2) for rollout in range(2) for seed in range(2)]
    found = [await seeds(*place) for place in places]
    assert found == [await seeds(*place) for place in places]
    assert len({seed for of_turns in found for seed in of_turns}) == 2 * len(places)


def test_a_model_without_a_chat_template_and_a_program_that_is_not_async_are_refused():
    with pytest.raises(ConfigError, match="needs a chat model"):
        Scene(["5"], template="")
    with pytest.raises(ConfigError, match=r"tests.agents.programs:not_async' must be an async function"):
        Scene(["5"], "not_async")
    with pytest.raises(ConfigError, match="needs one of its settings agent"):
        EnvironmentConfig(name="agent").make(FakeSearch({}))


async def test_a_template_that_shows_no_tools_is_refused():
    scene = Scene(["5"], template=PLAIN.replace("{% if tools %}", "{% if false %}"))
    with pytest.raises(EpisodeFailed, match="does not show tools to the policy"):
        await scene.run()
