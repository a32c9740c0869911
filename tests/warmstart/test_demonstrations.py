"""Demonstrations become the trajectories that a rollout worker would have made, or are left out with their row."""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas
import pytest

from cusearch_async.agents import episode as agent_episode
from cusearch_async.agents.episode import AgentRunner
from cusearch_async.cli.buffer import as_json
from cusearch_async.config import Config, load_config
from cusearch_async.data.questions import load_run_questions
from cusearch_async.environments import SearchEnvironment
from cusearch_async.errors import ConfigError
from cusearch_async.models import load_tokenizer
from cusearch_async.rollout.episode import EpisodeRunner
from cusearch_async.rollout.turn import Turn
from cusearch_async.training.recorder import Record
from cusearch_async.transport.codec import encode
from cusearch_async.types import Question
from cusearch_async.warmstart.demonstrations import Sources, read_demonstrations
from tests.agents.templates import chat_tokenizer
from tests.agents.test_episodes import calling, hermes

GOOD: dict[str, Any] = {
    "question": "What is the currency of the country of Pinsk?",
    "golden_answers": ["Ruble"],
    "turns": [
        "<think>Let me search.</think><search>country of Pinsk</search>",
        "<think>The country of Pinsk is Belarus.</think><search>currency of Belarus</search>",
        "<think>The currency of Belarus is Ruble.</think><answer>Ruble</answer>",
    ],
    "documents": [
        ['"Pinsk"\nThe country of Pinsk is Belarus.', '"Minsk"\nThe country of Minsk is Belarus.'],
        ['"Belarus"\nThe currency of Belarus is Ruble.'],
    ],
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(load_config(Path("atlas")).model.location)


@pytest.fixture
def config() -> Config:
    return load_config(Path("atlas"))


def written(folder: Path, *rows: dict[str, Any]) -> Sources:
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Sources((str(path),))


class Scripted:
    """A policy and a retriever that have their answers already, as an engine and a server would give them."""

    def __init__(self, tokenizer: Any, row: dict[str, Any]) -> None:
        self.tokenizer, self.turns, self.documents = tokenizer, list(row["turns"]), list(row["documents"])

    async def generate(self, prompt: Any, max_tokens: Any, temperature: Any, seed: Any, stops: Any) -> Turn:
        ids = self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]
        return Turn(ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32))

    async def search(self, *_: Any) -> list[str]:
        return self.documents.pop(0)


def test_a_demonstration_has_the_tokens_and_the_mask_of_the_same_rollout(tmp_path, tokenizer, config):
    [found] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    scripted = Scripted(tokenizer, GOOD)
    runner = EpisodeRunner(scripted, config.environments(scripted), tokenizer, config.episode, 0)
    question = Question(id="q", text=GOOD["question"], answers=("Ruble",), category="c")
    rollout = asyncio.run(runner.run(question, 0, 0, "w"))
    assert found.token_ids.tolist() == rollout.token_ids.tolist()
    assert found.sampled.tolist() == rollout.sampled.tolist()
    assert (found.depth, found.em, found.reward, found.turns) == (2, 1.0, 1.0, 3)
    assert not found.logprobs.any(), "nobody has sampled it"


def test_what_is_told_of_a_demonstration_names_its_row(tmp_path, tokenizer, config):
    """All were trajectory 0:0."""
    read = read_demonstrations(written(tmp_path, GOOD, GOOD | {"question": "Pinsk?"}), tokenizer, config)
    assert [one.id for one in read.trajectories] == ["0:0", "1:0"]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(agent_episode, "parser_of", lambda *_: hermes)
    return of_agent("--environment.search.agent", "tests.agents.programs:with_tools")


def of_agent(*options: str) -> Config:
    return load_config(Path("atlas"), ["--environment.search.name", "agent", *options])


OF_AGENT = GOOD | {"turns": [calling("country of Pinsk"), calling("currency of Belarus"), "Ruble"]}


def test_an_agent_runs_with_the_written_turns_and_documents(tmp_path, agent):
    """Its program writes the messages; the turns are in the form in which the model writes tool calls."""
    chat = chat_tokenizer()
    with_ends = {"turns": [turn + chat.eos_token for turn in OF_AGENT["turns"]], "documents": OF_AGENT["documents"]}
    found = read_demonstrations(written(tmp_path, OF_AGENT, OF_AGENT | {"question": "Pinsk?"}), chat, agent)
    assert found.problems == []
    scripted = Scripted(chat, with_ends)
    runner = AgentRunner(scripted, agent.environments(scripted), chat, agent.episode, 0)
    question = Question(id="q", text=GOOD["question"], answers=("Ruble",), category="c")
    rollout = asyncio.run(runner.run(question, 0, 0, "w"))
    assert found.trajectories[0].token_ids.tolist() == rollout.token_ids.tolist()
    assert found.trajectories[0].sampled.tolist() == rollout.sampled.tolist()
    assert (rollout.depth, rollout.prediction) == (2, "Ruble")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"turns": OF_AGENT["turns"][:2]}, "it has 2 turns, and the episode has not ended with the last of them"),
        ({"turns": [*OF_AGENT["turns"], "More."]}, "the episode ended with turn 3 of 4, 'Ruble'"),
        (
            {"turns": ['{"name": "search"}', *OF_AGENT["turns"][1:]]},
            'the episode ended with turn 1 of 3, \'{"name": "search"}\'',
        ),
        ({"documents": [["a"]]}, "'documents' has 1 lists, one for each search, and none for 'currency of Belarus'"),
    ],
)
def test_what_an_agent_could_not_have_made_is_left_out_with_its_row(tmp_path, agent, change, problem):
    read = read_demonstrations(written(tmp_path, OF_AGENT, OF_AGENT | change), chat_tokenizer(), agent)
    assert len(read.trajectories) == 1
    (said,) = read.problems
    assert problem in said
    assert "line 2" in said


@pytest.mark.parametrize("written_end", ["", "<|endoftext|>"])
def test_a_written_turn_of_an_agent_ends_as_the_policys_own(tmp_path, agent, monkeypatch, written_end):
    """With the end of text where that is the template's, and not with another end that generation_config.json has."""
    chat = chat_tokenizer()
    chat.add_special_tokens({"additional_special_tokens": ["<|other|>"]})
    monkeypatch.setattr(agent_episode, "further_ends", lambda tokenizer: ("<|other|>",))
    turns = [turn + written_end.replace("<|endoftext|>", chat.eos_token) for turn in OF_AGENT["turns"]]
    [found] = read_demonstrations(written(tmp_path, OF_AGENT | {"turns": turns}), chat, agent).trajectories
    said = chat.decode(found.token_ids[found.sampled].tolist())
    assert said == "".join(turn + chat.eos_token for turn in OF_AGENT["turns"])


def test_agents_elsewhere_cannot_be_asked(tmp_path):
    elsewhere = of_agent("--environment.search.remote", "http://127.0.0.1:9000")
    with pytest.raises(ConfigError, match=r"the agents of environment.search run elsewhere; export one of their"):
        read_demonstrations(written(tmp_path, OF_AGENT), chat_tokenizer(), elsewhere)


def test_gold_answers_are_needed_only_where_the_run_needs_them(tmp_path, tokenizer, agent):
    """An agent, or a reward of the user's."""
    rewarded = load_config(Path("atlas"), ["--environment.search.reward", "docs.examples.rewards:brief"])
    for config, tokens, row in ((agent, chat_tokenizer(), OF_AGENT), (rewarded, tokenizer, GOOD)):
        without = {name: value for name, value in row.items() if name != "golden_answers"}
        [made] = read_demonstrations(written(tmp_path, without), tokens, config).trajectories
        [again] = read_demonstrations(written(tmp_path, as_json(made)), tokens, config).trajectories
        assert made.answers == again.answers == ()


def test_what_the_environment_wrote_is_masked(tmp_path, tokenizer, config):
    [found] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    trained = tokenizer.decode(found.token_ids[found.sampled], skip_special_tokens=False)
    assert trained == "".join(GOOD["turns"])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv"])
def test_demonstrations_may_be_a_table(tmp_path, tokenizer, config, name):
    [expected] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    table = pandas.DataFrame([GOOD])
    table.to_parquet(tmp_path / name) if name.endswith("parquet") else table.to_csv(tmp_path / name, index=False)
    [found] = read_demonstrations(Sources((str(tmp_path / name),)), tokenizer, config).trajectories
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def test_a_turn_without_a_stop_text_ends_with_the_end_of_text(tmp_path, tokenizer, config):
    row = GOOD | {"turns": ["I know it.", GOOD["turns"][2]], "documents": []}
    [found] = read_demonstrations(written(tmp_path, row), tokenizer, config).trajectories
    assert tokenizer.eos_token_id in found.token_ids[found.sampled]


def test_equal_demonstrations_count_once(tmp_path, tokenizer, config):
    assert len(read_demonstrations(written(tmp_path, GOOD, GOOD), tokenizer, config).trajectories) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"turns": None}, "'turns' must be a list of texts, got None"),
        ({"turns": []}, "'turns' must be a list of texts, got []"),
        ({"turns": ["a", 3]}, "'turns' must be a list of texts"),
        ({"question": None}, "question"),
        ({"golden_answers": []}, "golden_answers"),
        ({"documents": "none"}, "'documents' must hold a list of texts for each search, got 'none'"),
        ({"documents": [["a"], "b"]}, "each of 'documents' must be a list of texts, got 'b'"),
        ({"documents": [["a"]]}, "'documents' has 1 lists, one for each search, and none for 'currency of Belarus'"),
        ({"documents": [*GOOD["documents"], ["c"]]}, "'documents' has 3 lists, and the turns search 2 times"),
        ({"documents": [["<answer>Lie</answer>"], ["b"]]}, "a document contains the tag <answer>"),
        ({"turns": GOOD["turns"][:2]}, "it has 2 turns, and the episode has not ended with the last of them"),
        ({"turns": [*GOOD["turns"], "More."]}, "the episode ended with turn 3 of 4"),
        ({"turns": [GOOD["turns"][0] + " And?", *GOOD["turns"][1:]]}, "turn 1 continues after its end, with ' And?'"),
        ({"turns": ["word " * 90 + GOOD["turns"][0], *GOOD["turns"][1:]]}, "more than episode.max_turn_tokens (80)"),
        ({"question": "word " * 200}, "more than episode.max_prompt_tokens (96)"),
        ({"environment": "other"}, "'environment' must be one of search, got 'other'"),
        ({"environment": ["search"]}, "'environment' must be one of search, got ['search']"),
        ({"turns": ["<think>\ud83d</think>", *GOOD["turns"][1:]]}, r"contains an unpaired surrogate, \ud83d"),
        ({"documents": [["a \ud83d"], ["b"]]}, r"contains an unpaired surrogate, \ud83d"),
        ({"turns": ["Action: Search[x]"] * 6, "documents": []}, "it gives no answer; its last turn is 'Action"),
    ],
)
def test_what_no_rollout_could_have_made_is_left_out_with_its_row(tmp_path, tokenizer, config, change, problem):
    sources = written(tmp_path, GOOD, GOOD | change)
    read = read_demonstrations(sources, tokenizer, config)
    assert len(read.trajectories) == 1
    assert len(read.problems) == 1
    assert problem in read.problems[0]
    assert f"{sources.files[0]}, line 2" in read.problems[0]


class Judged(SearchEnvironment):
    """Its judge answers in time, but for one question."""

    async def score(self, episode):
        if episode.question.text == "Pinsk?":
            raise TimeoutError
        return await super().score(episode)


def test_a_row_whose_score_is_late_is_left_out_alone(tmp_path, tokenizer):
    """As a worker's episode; before, a TimeoutError without a name ended the warm start."""
    config = load_config(Path("atlas"), ["--environment.search.name", "tests.warmstart.test_demonstrations:Judged"])
    sources = written(tmp_path, GOOD | {"question": "Pinsk?"}, GOOD)
    read = read_demonstrations(sources, tokenizer, config)
    assert len(read.trajectories) == 1
    assert read.problems == [f"{sources.files[0]}, line 1: TimeoutError"]


def test_a_file_without_any_that_can_be_used_is_refused(tmp_path, tokenizer, config):
    with pytest.raises(ConfigError, match=r"none of 1 demonstrations can be used: .*line 1: 'turns' must be"):
        read_demonstrations(written(tmp_path, GOOD | {"turns": []}), tokenizer, config)
    with pytest.raises(ConfigError, match=r"--demonstrations: cannot read .*absent\.jsonl: there is no such file"):
        read_demonstrations(Sources((str(tmp_path / "absent.jsonl"),)), tokenizer, config)


def test_an_exported_trajectory_is_a_demonstration_with_its_own_tokens(tmp_path, tokenizer, config):
    [made] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    sampled = replace(made, logprobs=np.full_like(made.logprobs, -1.5), versions=np.full_like(made.versions, 4))
    [found] = read_demonstrations(written(tmp_path, as_json(sampled)), tokenizer, config).trajectories
    assert found.token_ids.tolist() == made.token_ids.tolist()
    assert found.sampled.tolist() == made.sampled.tolist()
    assert not found.logprobs.any()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"question": "Who?"}, "it does not begin with the prompt of this run's model and template"),
        ({"sampled": [True] * 3}, "it is no exported trajectory: InvalidTrajectory"),
        ({"token_ids": "x"}, "it is no exported trajectory"),
        ({"depth": "deep"}, "it is no exported trajectory"),
        ({"depth": 1.5}, "depth 1.5 must be an integer"),
        ({"question": 5}, "question, question_id, environment and prediction must be texts"),
        ({"answers": "Ruble"}, "'answers' must be a list of texts, got 'Ruble'"),
        ({"token_ids": "FAR"}, "token 99999 is none of the tokenizer's"),
        ({"environment": "other"}, "'environment' must be one of search, got 'other'"),
    ],
)
def test_an_exported_trajectory_of_another_run_is_left_out(tmp_path, tokenizer, config, change, problem):
    [made] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    if change.get("token_ids") == "FAR":
        change = {"token_ids": [*made.token_ids.tolist()[:-1], 99999]}
    read = read_demonstrations(written(tmp_path, GOOD, as_json(made) | change), tokenizer, config)
    assert [problem in one for one in read.problems] == [True]


def test_an_exported_trajectory_longer_than_an_episode_is_left_out(tmp_path, tokenizer, config):
    [made] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    lengths = {"s_max": 1, "max_prompt_tokens": 40, "max_turn_tokens": 12, "max_observation_tokens": 36}
    short = load_config(Path("atlas"), [part for k, v in lengths.items() for part in (f"--episode.{k}", str(v))])
    with pytest.raises(ConfigError, match="an episode of this run at most"):
        read_demonstrations(written(tmp_path, as_json(replace(made, token_ids=made.token_ids))), tokenizer, short)


def test_an_exported_trajectory_deeper_than_an_episode_is_left_out(tmp_path, tokenizer, config):
    """The step that had it ended with an index beyond the depths that are counted, each time it was continued."""
    [made] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    shallow = load_config(Path("atlas"), ["--episode.s_max", "1", "--episode.max_turn_tokens", "200"])
    with pytest.raises(ConfigError, match=r"it has depth 2 and 1 rows, .* at most 1 \(episode.s_max\)"):
        read_demonstrations(written(tmp_path, as_json(made)), tokenizer, shallow)


def test_more_documents_than_a_search_of_the_run_finds_are_left_out(tmp_path, tokenizer):
    """It learned to read what it would never be shown."""
    one = load_config(Path("atlas"), ["--retriever.topk", "1"])
    with pytest.raises(ConfigError, match=r"search 1 finds 2 documents, and in the run at most 1 \(retriever.topk\)"):
        read_demonstrations(written(tmp_path, GOOD), tokenizer, one)


def recorded_as(folder: Path, *payloads: bytes) -> Sources:
    record = Record(step=0, epoch=1, memory="", pool=[*payloads], selected=[], advantages=[], metrics={})
    (folder / "records").mkdir(parents=True)
    (folder / "records" / "000000-e1.zz").write_bytes(zlib.compress(msgspec.msgpack.encode(record)))
    return Sources(runs=(folder,))


def test_recorded_trajectories_of_a_run_are_demonstrations_if_their_reward_suffices(tmp_path, tokenizer, config):
    """Rejection sampling. The records of a learner that was replaced do not count."""
    [good] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    bad = replace(good, ticket=1, reward=0.2, token_ids=np.flip(good.token_ids).copy())
    folder = tmp_path / "run"
    recorded_as(folder, encode(good), encode(bad))
    [found] = read_demonstrations(Sources(runs=(folder,)), tokenizer, config).trajectories
    assert found.token_ids.tolist() == good.token_ids.tolist()
    read = read_demonstrations(Sources(runs=(folder,), min_reward=0.1), tokenizer, config)
    assert (len(read.trajectories), len(read.problems)) == (1, 1)
    assert f"{folder}, step 0, trajectory 1:0: it does not begin with the prompt" in read.problems[0]
    with pytest.raises(ConfigError, match=r"no demonstration in .*run has a reward of 2"):
        read_demonstrations(Sources(runs=(folder,), min_reward=2), tokenizer, config)
    with pytest.raises(ConfigError, match=r"no demonstration: .*empty has no recorded steps"):
        read_demonstrations(Sources(runs=(tmp_path / "empty",)), tokenizer, config)


class OfChoices(SearchEnvironment):
    """Its prompt shows what only a question of the run has."""

    def prompt(self, question):
        return self.template.prompt(f"{question.text} ({question.metadata['choices']})")


def test_the_prompt_of_ones_own_environment_is_made_of_the_whole_question(tmp_path, tokenizer):
    """It was made without the metadata: a KeyError ended the warm start, or all were of "another template"."""
    asked = {"id": "1", "question": GOOD["question"], "golden_answers": ["Ruble"], "metadata": {"choices": "a, b"}}
    (tmp_path / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    name = "tests.warmstart.test_demonstrations:OfChoices"
    config = load_config(Path("atlas"), ["--environment.search.name", name, "--data.source", f"{tmp_path}/asked.jsonl"])
    [question], scripted = load_run_questions(config).all, Scripted(tokenizer, GOOD)
    runner = EpisodeRunner(scripted, config.environments(scripted), tokenizer, config.episode, 0)
    rollout = asyncio.run(runner.run(question, 0, 0, "w"))
    for number, payloads in enumerate([[rollout], [rollout, replace(rollout, question_id="9", ticket=1)]]):
        read = read_demonstrations(recorded_as(tmp_path / str(number), *map(encode, payloads)), tokenizer, config)
        assert [one.token_ids.tolist() for one in read.trajectories] == [rollout.token_ids.tolist()]
    (problem,) = read.problems
    assert "its question '9' of environment.search is none of this run's, so its prompt cannot be made" in problem


def test_a_record_of_an_older_payload_is_named_by_its_step_and_folder(tmp_path, tokenizer, config):
    [good] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    payload = encode(good)
    older = recorded_as(tmp_path / "run", payload[:3] + b"\x05" + payload[4:])
    with pytest.raises(ConfigError, match=r"the record of step 0 in .*run cannot be read: payload"):
        read_demonstrations(older, tokenizer, config)


def test_a_record_that_is_half_written_leaves_out_its_step_alone(tmp_path, tokenizer, config):
    """As after a crash of the machine; it ended the warm start."""
    [good] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    recorded_as(tmp_path / "run", encode(good))
    (tmp_path / "run" / "records" / "000001-e1.zz").write_bytes(zlib.compress(b"half")[:6])
    read = read_demonstrations(Sources(runs=(tmp_path / "run",)), tokenizer, config)
    assert len(read.trajectories) == 1
    assert "the record of step 1 in" in read.problems[0]


def test_a_recorded_token_that_the_model_does_not_have_is_told(tmp_path, tokenizer, config):
    """Of an agent, whose prompt is not compared; it ended in the embedding."""
    [good] = read_demonstrations(written(tmp_path, GOOD), tokenizer, config).trajectories
    strange = replace(good, ticket=1, token_ids=np.append(good.token_ids[:-1], 99_999).astype(np.int32))
    read = read_demonstrations(recorded_as(tmp_path / "run", encode(good), encode(strange)), tokenizer, config)
    assert len(read.trajectories) == 1
    assert "trajectory 1:0: token 99999 is none of the tokenizer's 384" in read.problems[0]


def test_a_recorded_episode_of_many_rows_is_read(tmp_path, tokenizer):
    """An agent that changes its history; before, its size ended the command."""
    lengths = {"s_max": 30, "max_prompt_tokens": 3000, "max_turn_tokens": 500, "max_observation_tokens": 500}
    long = load_config(Path("atlas"), [part for k, v in lengths.items() for part in (f"--episode.{k}", str(v))])
    [good] = read_demonstrations(written(tmp_path, GOOD), tokenizer, long).trajectories
    rows, length = 30, 10_000
    ids = np.full(rows * length, good.token_ids[-1], np.int32)
    sampled = np.arange(rows * length) % length > 0
    noise = np.random.default_rng(0).normal(size=int(sampled.sum())).astype(np.float32)
    tokens = {"token_ids": ids, "sampled": sampled, "logprobs": noise, "versions": np.zeros(len(noise), np.int32)}
    many = replace(good, ticket=1, starts=tuple(range(0, rows * length, length)), **tokens)
    read = read_demonstrations(recorded_as(tmp_path / "run", encode(good), encode(many)), tokenizer, long)
    assert [found.token_ids.tolist() for found in read.trajectories] == [good.token_ids.tolist()]
    assert "trajectory 1:0: it does not begin with the prompt" in read.problems[0]
