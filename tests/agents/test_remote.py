"""Agents that run elsewhere: they take an episode, ask the policy, and end it; over real HTTP."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from contextlib import asynccontextmanager
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from cusearch_async.agents import remote
from cusearch_async.agents.gateway import Gateway
from cusearch_async.agents.remote import TASKS, Remote
from cusearch_async.config import EnvironmentConfig, EpisodeConfig, load_config
from cusearch_async.environments.task import Task
from cusearch_async.errors import ConfigError, EpisodeFailed
from docs.examples import remote as remote_example
from tests.agents.test_episodes import Scene, parser  # noqa: F401
from tests.conftest import free_port
from tests.weights.test_http import until

ROOT = Path(__file__).parents[2]
TOKEN = "of this test"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("CUSEARCH_AGENTS_TOKEN", TOKEN)


def scene_of(*turns: str, **settings) -> tuple[Scene, str]:
    address = f"http://127.0.0.1:{free_port()}"
    return Scene(turns, remote=address, **settings), address


@asynccontextmanager
async def running(scene: Scene):
    """An episode, which is waiting for a program."""
    episode = asyncio.ensure_future(scene.run())
    await until(lambda: bool(scene.runner._remote._waiting) and scene.runner._gateway._runner is not None)
    try:
        yield episode
    finally:
        episode.cancel()
        await asyncio.wait([episode])
        await scene.runner._gateway.close()


async def take(address: str) -> dict:
    async with aiohttp.request("POST", f"{address}/tasks", headers=HEADERS) as response:
        assert response.status == 200
        return await response.json()


async def ask(task: dict, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    return (await posted(task, f"{task['base_url']}/chat/completions", body))["choices"][0]["message"]["content"]


async def posted(task: dict, url: str, body: dict, status: int = 200) -> dict:
    headers = {"Authorization": f"Bearer {task['api_key']}"}
    async with aiohttp.request("POST", url, json=body, headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_program_elsewhere_takes_an_episode_and_ends_it():
    scene, address = scene_of("search: Pinsk", "5")
    async with running(scene) as episode:
        task = await take(address)
        assert (task["question"], task["question_id"], task["model"]) == ("Where?", "q", "policy")
        assert task["metadata"] == {"rubric": "short"}
        assert task["base_url"].startswith(f"{address}/sessions/")
        assert await ask(task, task["question"]) == "search: Pinsk"
        assert (await posted(task, task["search_url"], {"query": "Pinsk"}))["documents"] == ["Pinsk is in Belarus."]
        await posted(task, task["end_url"], {"answer": "5"})
        trajectory = await episode
    assert (trajectory.prediction, trajectory.reward, trajectory.turns) == ("5", 1.0, 1)


async def test_behind_a_proxy_with_tls_the_addresses_are_its(monkeypatch):
    """They were of plain HTTP, so that the episode's key went over the network, or nobody answered."""
    monkeypatch.setitem(HEADERS, "X-Forwarded-Proto", "https")
    scene, address = scene_of("5")
    async with running(scene):
        task = await take(address)
    secret = address.replace("http:", "https:")
    assert all(task[name].startswith(f"{secret}/sessions/") for name in ("base_url", "search_url", "end_url"))


async def test_a_program_elsewhere_is_given_the_questions_metadata():
    elsewhere = Remote(TOKEN)
    told = {"rubric": ["names a source"], "day": datetime.date(2024, 5, 1)}
    task = Task(
        question="Where?",
        question_id="q",
        base_url="",
        api_key="k",
        model="",
        search=None,
        search_url="",
        metadata=told,
    )
    waiting = asyncio.ensure_future(elsewhere.agent(task, lambda: None, lambda: ""))
    await asyncio.sleep(0)
    request = make_mocked_request("POST", TASKS, headers=HEADERS)
    given = json.loads((await elsewhere.take(request)).body)
    waiting.cancel()
    assert given["metadata"] == {"rubric": ["names a source"], "day": "2024-05-01"}


async def test_the_examples_program_runs_episodes_on_another_machine():
    command = [sys.executable, "-m", "docs.examples.remote"]
    scene, address = scene_of("<search>Pinsk</search>", "<answer> 5 </answer>")
    async with running(scene) as episode:
        process = await asyncio.create_subprocess_exec(
            *command, address, "2", env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        try:
            trajectory = await episode
        finally:
            process.kill()
            await process.wait()
    assert (trajectory.prediction, trajectory.reward, trajectory.depth) == ("5", 1.0, 1)


def test_the_examples_program_goes_to_the_next_episode_after_one_that_timed_out(monkeypatch):
    """The worker's limit is as long as the program's patience: each such episode ended a thread."""
    clock, asked = [0.0], []
    gone = HTTPError("", 404, "Not Found", Message(), None)

    class Enough(Exception): ...

    def post(url, *_):
        asked.append(url.rpartition("/")[2])
        if asked.count("tasks") == 2:
            raise Enough
        if asked[-1] == "end":
            raise gone
        return {"question": "?", "base_url": "", "api_key": "", "search_url": "", "end_url": "x/end"}

    def solve(*_):
        clock[0] += 660
        raise gone

    monkeypatch.setenv("CUSEARCH_AGENTS_TOKEN", TOKEN)
    monkeypatch.setattr(remote_example, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: None))
    monkeypatch.setattr(remote_example, "post", post)
    monkeypatch.setattr(remote_example, "solve", solve)
    with pytest.raises(Enough):
        remote_example.work("x")
    assert asked == ["tasks", "end", "tasks"]


@pytest.mark.parametrize(
    ("body", "reward", "prediction"), [({"reward": 0.25}, 0.25, None), ({"answer": None}, 0.0, None)]
)
async def test_a_reward_or_no_answer(body, reward, prediction):
    scene, address = scene_of("x")
    async with running(scene) as episode:
        task = await take(address)
        await ask(task, "?")
        await posted(task, task["end_url"], body)
        trajectory = await episode
    assert (trajectory.reward, trajectory.prediction) == (reward, prediction)


async def test_an_error_of_the_program_fails_its_episode_and_is_named():
    scene, address = scene_of("x")
    async with running(scene) as episode:
        task = await take(address)
        await ask(task, "?")
        await posted(task, task["end_url"], {"error": "no browser"})
        with pytest.raises(EpisodeFailed, match="the program elsewhere said: no browser"):
            await episode


@pytest.mark.parametrize(
    "body", [{}, {"answer": 3}, {"reward": "1"}, {"error": None}, {"answer": "5", "reward": 1}, {"else": 1}, []]
)
async def test_a_wrong_end_is_refused_and_the_episode_lasts(body):
    scene, address = scene_of("5")
    async with running(scene) as episode:
        task = await take(address)
        await ask(task, "?")
        refused = await posted(task, task["end_url"], body, status=400)
        assert "the body must be" in refused["error"]["message"]
        await posted(task, task["end_url"], {"answer": "5"})
        assert (await episode).reward == 1.0


async def test_every_episode_is_given_once_and_who_asks_in_vain_is_told(monkeypatch):
    monkeypatch.setattr(remote, "POLL_S", 0.2)
    scene, address = scene_of("5")
    async with running(scene) as episode:
        task = await take(address)
        async with aiohttp.request("POST", f"{address}/tasks", headers=HEADERS) as response:
            assert response.status == 204
        await ask(task, "?")
        await posted(task, task["end_url"], {"answer": "5"})
        assert (await episode).reward == 1.0


async def test_who_asks_before_there_is_an_episode_gets_the_next():
    scene, address = scene_of("5", "5")
    async with running(scene) as first:
        one = await take(address)
        taking = asyncio.ensure_future(take(address))
        second = asyncio.ensure_future(scene.run())
        other = await taking
        assert one["api_key"] != other["api_key"]
        for task in (one, other):
            await ask(task, "?")
            await posted(task, task["end_url"], {"answer": "5"})
        assert [(await episode).reward for episode in (first, second)] == [1.0, 1.0]


async def test_who_has_gone_while_it_waited_gets_no_episode():
    scene, address = scene_of("5", "5")
    async with running(scene) as first:
        one = await take(address)
        gone = asyncio.ensure_future(take(address))
        await until(lambda: not scene.runner._remote._news.is_set())
        gone.cancel()
        await asyncio.wait([gone])
        second = asyncio.ensure_future(scene.run())
        other = await take(address)
        for task in (one, other):
            await ask(task, "?")
            await posted(task, task["end_url"], {"answer": "5"})
        assert [(await episode).reward for episode in (first, second)] == [1.0, 1.0]


async def test_a_program_that_never_ends_its_episode_fails_it_alone():
    scene, address = scene_of("5", timeout_s=2)
    async with running(scene) as episode:
        task = await take(address)
        with pytest.raises(EpisodeFailed, match=r"an agent at http://127.0.0.1:\d+ took longer than episode.timeout_s"):
            await episode
        await posted(task, task["end_url"], {"answer": "5"}, status=404)
    assert not scene.runner._remote._waiting
    assert not scene.runner._remote._offers


async def test_a_program_that_has_gone_fails_its_episode_long_before_the_time_is_over():
    """It took the episode, asked once, and was killed."""
    scene, address = scene_of("5", silence_s=1, timeout_s=600)
    async with running(scene) as episode:
        await ask(await take(address), "?")
        with pytest.raises(EpisodeFailed, match=r"has asked for nothing for 1 s \(environment.LABEL.silence_s\)"):
            await episode
    assert not scene.runner._remote._offers


async def test_a_program_that_waits_for_the_policy_or_asks_again_is_not_silent(monkeypatch):
    scene, address = scene_of("4", silence_s=2)
    generate, go = scene.policy.generate, asyncio.Event()

    async def slow(*given):
        await go.wait()
        return await generate(*given)

    monkeypatch.setattr(scene.policy, "generate", slow)
    async with running(scene) as episode:
        task, began = await take(address), asyncio.get_running_loop().time()
        asking = asyncio.ensure_future(ask(task, "?"))
        await until(lambda: asyncio.get_running_loop().time() - began > 2.5)
        go.set()
        await asking
        for count in range(1, 6):
            await until(lambda: asyncio.get_running_loop().time() - began > 2.5 + count / 2)  # noqa: B023
            await posted(task, task["search_url"], {"query": "Pinsk"})
        await posted(task, task["end_url"], {"answer": "4"})
        assert (await episode).prediction == "4"


async def test_the_time_of_an_episode_begins_when_a_program_takes_it(monkeypatch, caplog):
    monkeypatch.setattr(remote, "TELL_S", 0.1)
    scene, address = scene_of("5", timeout_s=2)
    async with running(scene) as episode:
        await until(lambda: "1 episodes wait for a program to ask for one (POST /tasks)" in caplog.text)
        began = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() - began > 2.5)
        task = await take(address)
        await ask(task, "?")
        await posted(task, task["end_url"], {"answer": "5"})
        trajectory = await episode
        assert trajectory.reward == 1.0
        assert trajectory.episode_s < 2.5, "without the wait for a program"


async def test_the_evaluators_episodes_are_at_the_port_before(monkeypatch):
    """It took the workers' port, whose programs then had no worker, or it had no program."""
    scene, address = scene_of("5")
    of_workers = scene.runner._gateway._address.port
    monkeypatch.setattr(scene.runner._gateway, "_first_port", Gateway(None, address, object(), -1)._first_port)
    before = address.replace(str(of_workers), str(of_workers - 1))
    async with running(scene) as episode:
        task = await take(before)
        await ask(task, "?")
        await posted(task, task["end_url"], {"answer": "5"})
        assert (await episode).reward == 1.0


@pytest.mark.parametrize(
    ("remote", "reached"),
    [
        ("http://0.0.0.0:{}", "http://127.0.0.1:{}"),
        ("http://[::]:{}", "http://[::1]:{}"),
        ("http://[::1]:{}", "http://[::1]:{}"),
    ],
)
async def test_programs_of_this_machine_find_what_listens_anywhere(remote, reached):
    port = free_port()
    gateway = Gateway(EpisodeConfig(), remote.format(port), Remote("t"))
    async with gateway.session(None, None) as (_, url, key):
        assert url == f"{reached.format(port)}/sessions/{key}"
    await gateway.close()


async def test_an_episode_that_has_ended_is_not_given_later(monkeypatch):
    monkeypatch.setattr(remote, "POLL_S", 0.2)
    scene, address = scene_of("5")
    async with running(scene) as first:
        second = asyncio.ensure_future(scene.run())
        await until(lambda: len(scene.runner._remote._waiting) == 2)
        second.cancel()
        await asyncio.wait([second])
        await take(address)
        async with aiohttp.request("POST", f"{address}/tasks", headers=HEADERS) as response:
            assert response.status == 204
        assert not first.done()


async def test_a_program_may_ask_for_the_episodes_of_one_environment(monkeypatch):
    monkeypatch.setattr(remote, "POLL_S", 0.2)
    scene, address = scene_of("5")
    async with running(scene):
        for wanted, status in (("b", 204), ("a", 200)):
            body = {"environment": wanted}
            async with aiohttp.request("POST", f"{address}/tasks", json=body, headers=HEADERS) as response:
                assert response.status == status
                task = await response.json() if status == 200 else {}
        assert task["environment"] == "a"


def test_environments_with_several_addresses_are_refused():
    """Before anything is loaded: it was after vLLM."""
    both = [word for label in "ab" for word in (f"--environment.{label}.name", "agent")]
    both += ["--environment.a.remote", "http://127.0.0.1:1", "--environment.b.remote", "http://127.0.0.1:2"]
    with pytest.raises(ConfigError, match=r"remote must be the same for all, got http://127.0.0.1:1, http"):
        load_config(Path("atlas"), both)


async def test_nothing_is_given_or_ended_without_the_token_and_the_key():
    scene, address = scene_of("5", "5")
    async with running(scene):
        async with aiohttp.request("POST", f"{address}/tasks", headers={"Authorization": "Bearer x"}) as response:
            assert response.status == 401
        task = await take(address)
        await posted(task | {"api_key": "x"}, task["end_url"], {"answer": "5"}, status=401)
        await posted(task | {"api_key": TOKEN}, task["end_url"], {"answer": "5"}, status=401)
        async with aiohttp.request("GET", f"{address}/tasks", headers=HEADERS) as response:
            assert response.status == 405


async def test_a_second_worker_takes_the_next_port(monkeypatch):
    scene, address = scene_of("5")
    other = Scene(["5"], remote=address)
    async with running(scene), running(other):
        ports = [one.runner._gateway._runner.addresses[0][1] for one in (scene, other)]
        assert ports[1] > ports[0] == int(address.rpartition(":")[2])


def test_remote_agents_need_a_token_and_an_address(monkeypatch):
    with pytest.raises(ConfigError, match=r"environment.LABEL.remote: 'ftp://x:1' must look like http://"):
        Scene([], remote="ftp://x:1")
    monkeypatch.delenv("CUSEARCH_AGENTS_TOKEN")
    with pytest.raises(ConfigError, match="set CUSEARCH_AGENTS_TOKEN to the same secret"):
        scene_of("5")


def test_a_slash_at_the_end_makes_no_other_address():
    scene, address = scene_of("5")
    other = EnvironmentConfig(name="agent", remote=f"{address}/").make(scene.search)
    assert other.settings.remote == address
