"""The order in which a rollout worker and the evaluator come to play, and what they leave behind."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path

import pytest

from cusearch_async.config import load_config
from cusearch_async.errors import ConfigError, ContractMismatch, RetrievalUnavailable
from cusearch_async.models import load_tokenizer, vocab_size
from cusearch_async.processes.start import worker_name
from cusearch_async.run.identity import Identity
from tests.conftest import SLOW
from tests.fakes import STARTER
from tests.processes.scene import CLOSED, CONTRACT, RETRIEVER, STARTED
from tests.rollout.workers import until
from tests.transport.filling import start

both = pytest.mark.parametrize("name", ["rollout", "evaluator"])


@both
async def test_the_contract_is_checked_before_the_retriever_is_asked_and_an_engine_started(scene, name):
    await start(scene.learner(Identity({"run.seed": "7"})))
    with pytest.raises(ContractMismatch, match=r"run\.seed is 0 here and 7 in the run"):
        await scene.process(name)
    assert scene.events == [CONTRACT]


@both
@pytest.mark.parametrize("serves", ["another corpus (2)", None])
async def test_a_process_whose_retriever_serves_another_corpus_is_refused_before_an_engine_is_started(
    scene, name, serves
):
    """Before: two indexes could be mixed within a group, and nobody noticed."""
    await start(scene.learner())
    scene.serves = serves
    scene.retriever_answers.set()
    said = f"retriever serves is {serves or 'not reported'} here and a corpus (1) in the run"
    with pytest.raises(ContractMismatch, match=re.escape(said)):
        await scene.process(name)
    assert scene.events == [CONTRACT, RETRIEVER]


@both
async def test_an_engine_is_started_when_the_retriever_answers_and_closed_at_the_end(scene, name):
    async with scene.running(name):
        await until(lambda: RETRIEVER in scene.events)
        assert STARTED not in scene.events
        scene.retriever_answers.set()
        await until(lambda: STARTED in scene.events)
    assert scene.events == [CONTRACT, RETRIEVER, STARTED, CLOSED]


@pytest.mark.parametrize("drain_s", [0.0, 0.5])
async def test_a_worker_waits_for_redis_as_long_as_it_drains(make_scene, drain_s):
    scene = make_scene(drain_s=drain_s)
    scene.retriever_answers.set()
    async with scene.running("rollout"):
        await until(lambda: STARTED in scene.events)
        scene.stop.set()
        assert scene.gives_up.is_set() is (not drain_s)
        await asyncio.wait_for(scene.gives_up.wait(), 5 * SLOW)


@both
async def test_a_process_that_is_stopped_while_it_waits_for_the_retriever_starts_no_engine(scene, name):
    async with scene.running(name):
        await until(lambda: RETRIEVER in scene.events)
    assert scene.events == [CONTRACT, RETRIEVER]


@both
async def test_a_retriever_that_does_not_answer_in_time_ends_the_process_before_an_engine_is_started(scene, name):
    scene.retriever_fails = RetrievalUnavailable("down")
    with pytest.raises(RetrievalUnavailable, match="down"):
        await scene.process(name)
    assert scene.events == [CONTRACT, RETRIEVER]


@both
async def test_the_engine_is_closed_when_the_loop_fails(scene, name):
    scene.retriever_answers.set()
    scene.loading_fails = TypeError("a bug")
    await start(scene.learner())
    with pytest.raises(TypeError, match="a bug"):
        await scene.process(name)
    assert scene.events[-2:] == [STARTED, CLOSED]


@both
async def test_a_run_that_does_not_search_waits_for_no_retriever(make_scene, tmp_path, name):
    path = tmp_path / "echo.toml"
    path.write_text('[environment.search]\nname = "tests.environments.echo:Echo"\n', encoding="utf-8")
    scene = make_scene(path)
    async with scene.running(name):
        await until(lambda: STARTED in scene.events)
    assert scene.events == [CONTRACT, STARTED, CLOSED]


def test_no_engine_is_loaded_for_which_no_player_can_be_made(scene, monkeypatch):
    """Two addresses of agents elsewhere, a parser that does not exist: it was told after minutes of loading."""

    def refuse(*arguments):
        raise ConfigError("the frames do not fit")

    monkeypatch.setattr(scene.engines, "AgentRunner", refuse)
    location = scene.config.model.location
    with (
        pytest.raises(ConfigError, match="the frames do not fit"),
        scene.engines.open_runner(scene.config, location, load_tokenizer(location), scene),
    ):
        pass
    assert scene.events == []


def test_episodes_have_the_seed_and_the_template_of_the_config(scene, atlas_config, monkeypatch):
    """As the checks before the run, and as other processes of it."""
    words = ["--run.seed", "7", "--model.chat_template", "{enable_thinking = false}", "--episode.temperature", "0.7"]
    config, made = load_config(atlas_config, words), []
    monkeypatch.setattr(scene.engines, "AgentRunner", lambda *arguments: made.append(arguments))
    location = config.model.location
    with scene.engines.open_runner(config, location, load_tokenizer(location), scene):
        pass
    *_, (_, _, _, episode, seed, template, _) = made
    assert (episode.temperature, seed) == (0.7, 7)
    assert template == config.model.template_arguments
    assert "enable_thinking" in str(template)


@pytest.mark.parametrize(("depth", "name"), [(0, ""), (5, "a_folder_of_a_job"), (1, "ж" * 40)])
def test_vllm_leaves_no_sockets_and_their_names_are_short(scene, monkeypatch, tmp_path, depth, name):
    """Each engine left three in the folder of temporary files; in a long one, as Slurm's, vLLM ended with an error."""
    folder = tmp_path.joinpath(*[name] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(scene.engines, "LONGEST_FOLDER", len(str(tmp_path)) + (41 if "ж" in name else 0))
    location = scene.config.model.location
    with scene.engines.open_runner(scene.config, location, load_tokenizer(location), scene):
        sockets = Path(os.environ["VLLM_RPC_BASE_PATH"])
        (sockets / "socket").touch()
        assert sockets.parent == (Path("/tmp") if depth else tmp_path)
    assert not sockets.exists()
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_a_folder_that_a_user_names_for_vllms_sockets_is_taken(scene, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    monkeypatch.setattr(scene.engines, "LONGEST_FOLDER", len(str(tmp_path)))
    location = scene.config.model.location
    with scene.engines.open_runner(scene.config, location, load_tokenizer(location), scene):
        assert Path(os.environ["VLLM_RPC_BASE_PATH"]).parent == tmp_path
    assert os.environ["VLLM_RPC_BASE_PATH"] == str(tmp_path)


async def test_a_worker_plays_the_runs_questions_and_gives_back_what_is_not_played_when_it_is_stopped(scene, caplog):
    """Version 0 opens tickets below 12, version 1 those below 16."""
    caplog.set_level("INFO")
    scene.retriever_answers.set()
    learner = scene.learner()
    await start(learner)
    async with scene.running("rollout"):
        await until(lambda: scene.run.ready == set(range(12)))
        played = [entry.trajectory for entry in scene.run.entries.values()]
        assert {trajectory.question for trajectory in played} == {f"who {i}?" for i in range(5)}
        assert all(trajectory.em == 1.0 for trajectory in played)
        scene.engine_answers.clear()
        await learner.announce(1, "v000001-e1")
        await until(lambda: scene.run.leases.keys() == {12, 13, 14, 15})
    assert not scene.run.leases
    assert scene.run.requeue == {12, 13, 14, 15}
    assert caplog.messages[-1] == "stopped; its tickets are released"


async def test_a_worker_hands_its_buffer_no_token_that_the_model_does_not_have(scene):
    scene.retriever_answers.set()
    scene.loading_fails = TypeError("far enough")
    await start(scene.learner())
    with pytest.raises(TypeError, match="far enough"):
        await scene.process("rollout")
    assert scene.vocab_sizes[-1] == vocab_size(str(STARTER)) == 384


def test_workers_with_one_host_name_and_one_process_number_have_two_names():
    """As those of two containers may have."""
    first, second = worker_name(), worker_name()
    assert first != second
    assert first.startswith(f"{socket.gethostname()}-{os.getpid()}-")


async def test_a_worker_ends_when_the_run_is_finished(scene, caplog):
    caplog.set_level("INFO")
    scene.retriever_answers.set()
    learner = scene.learner()
    await start(learner)
    working = asyncio.create_task(scene.process("rollout"))
    await until(lambda: scene.run.ready == set(range(12)))
    scene.engine_answers.clear()
    await learner.announce(1, "v000001-e1")
    await until(lambda: scene.run.leases.keys() == {12, 13, 14, 15})
    await learner.finish()
    await working
    assert not scene.run.leases
    assert scene.events[-1] == CLOSED
    assert caplog.messages[-1].startswith("run atlas is finished; this worker ends")


async def test_a_worker_that_comes_when_its_run_is_finished_starts_no_engine(scene, caplog):
    caplog.set_level("INFO")
    await finished(scene, step=4)
    await scene.process("rollout")
    assert scene.events == [CONTRACT]
    assert caplog.messages[-1].startswith("run atlas is finished; this worker ends")


async def test_a_worker_with_more_steps_waits_for_the_learner_that_continues_the_run(scene, caplog):
    caplog.set_level("INFO")
    scene.retriever_answers.set()
    await finished(scene, step=2)
    async with scene.running("rollout") as working:
        await until(lambda: scene.run.leases or scene.run.ready)
        assert "run atlas was finished at step 2: waiting for a learner that continues it" in caplog.messages
        continuing = scene.learner()
        await continuing.recover(2)
        await continuing.announce(2, "v000002-e2")
        await until(lambda: {8, 9, 10, 11} <= scene.run.ready)
        await continuing.finish()
        await working


async def finished(scene, step: int) -> None:
    learner = scene.learner()
    await learner.recover(step)
    await learner.announce(step, f"v{step:06d}-e1")
    await learner.finish()


@both
async def test_a_process_that_is_stopped_while_its_weights_arrive_ends(scene, name):
    """Large ones take minutes, and whoever is not patient kills it."""
    scene.weights_arrive.clear()
    scene.retriever_answers.set()
    await start(scene.learner())
    async with scene.running(name):
        await until(lambda: STARTED in scene.events)
        await asyncio.sleep(0.1)
    assert scene.events[-1] == CLOSED


async def test_an_evaluator_makes_its_folder_before_it_scores(scene):
    """On a machine of its own nobody else makes it; the scores of the first version were lost."""
    async with scene.running("evaluator"):
        await until(lambda: RETRIEVER in scene.events)
        assert scene.config.folder.is_dir()
