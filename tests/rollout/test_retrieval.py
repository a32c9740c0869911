"""The search client against real servers: a failure is retried, then raised by name, and never becomes documents."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import resource
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from cusearch_async.config import EpisodeConfig, RetrieverConfig, load_config
from cusearch_async.errors import RetrievalUnavailable, SearchRefused
from cusearch_async.host import free_port
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.local import LocalSearch, Simulation
from cusearch_async.retrieval.server import Retriever
from cusearch_async.rollout import retrieval
from cusearch_async.rollout.episode import Player
from cusearch_async.rollout.retrieval import SearchClient
from cusearch_async.types import Question
from tests.fakes import STARTER, ScriptedPolicy

QUESTION = Question(id="q/0", text="What is the capital of Peru?", answers=("Lima",), category="q")

Answer = Callable[["Service", web.Request], Awaitable[web.StreamResponse]]


class Service:
    """A retriever that answers each request by the next of its answers, and by the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.bodies: list[dict[str, object]] = []
        self.over = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await self._answers[min(len(self.bodies), len(self._answers)) - 1](self, request)


def answers(body: str, status: int = 200) -> Answer:
    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(text=body, status=status, content_type="application/json")

    return answer


def finds(*contents: str) -> Answer:
    rows = [{"document": {"id": str(i), "contents": text}, "score": 1.0} for i, text in enumerate(contents)]

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.json_response({"result": [rows]})

    return answer


async def hangs(service: Service, request: web.Request) -> web.StreamResponse:
    await service.over.wait()
    return web.Response()


def waits_for_more(count: int) -> Answer:
    """Finds Lima, once `count` requests are there."""

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        async with asyncio.timeout(5):
            while len(service.bodies) < count:
                await asyncio.sleep(0.01)
        return await finds("Lima")(service, request)

    return answer


async def closes_early(service: Service, request: web.Request) -> web.StreamResponse:
    """Half of an answer, then nothing."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"result": [[{"document": {"id": "0", "contents": "Lima"}}]]}')
    assert request.transport is not None
    request.transport.close()
    return response


async def hangs_up(service: Service, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def client_of(service: Service, **settings: float) -> AsyncIterator[SearchClient]:
    app = web.Application()
    app.router.add_post("/retrieve", service.handle)
    async with TestServer(app) as server:
        values = {"timeout_s": 5.0, "outage_s": 0.05} | settings
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}", **values)
        async with SearchClient.session(config) as session:
            try:
                yield SearchClient(session, config, EpisodeConfig(topk=2), 4)
            finally:
                service.over.set()


async def test_documents_come_best_first():
    service = Service(finds("Lima", "Peru"))
    async with client_of(service) as client:
        assert await client.search("capital of Peru", 11, QUESTION, 0) == ["Lima", "Peru"]
    assert service.bodies == [{"queries": ["capital of Peru"], "topk": 2, "return_scores": True}]
    assert (client.searches, client.failures.total()) == (1, 0)


async def test_finding_nothing_is_an_answer():
    async with client_of(Service(finds())) as client:
        assert await client.search("capital of Atlantis", 0, QUESTION, 0) == []
    assert (client.searches, client.failures.total()) == (1, 0)


@pytest.mark.parametrize(
    "failure",
    [answers("down", 500), answers("busy", 503), answers("slow", 408), answers("too many", 429), hangs_up],
)
async def test_a_failure_that_passes_is_not_noticed(failure):
    service = Service(failure, finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        assert await client.search("capital of Peru", 4, QUESTION, 0) == ["Lima"]
    assert (client.searches, client.failures.total()) == (1, 1)
    assert service.bodies[0] == service.bodies[1], "the same search with the same draw"


WRONG_SHAPES = [
    "null",
    "[]",
    "3",
    '"Lima"',
    "{}",
    '{"error": "down"}',
    '{"result": null}',
    '{"result": "Lima"}',
    '{"result": []}',
    '{"result": [[], []]}',
    '{"result": [null]}',
    '{"result": [3]}',
    '{"result": ["Lima"]}',
    '{"result": [{"error": "down"}]}',
    '{"result": [["Lima"]]}',
    '{"result": [[{"id": "0", "contents": "Lima"}]]}',
    '{"result": [[{"document": "Lima"}]]}',
    '{"result": [[{"document": {"id": "0"}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": null}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": 3}}]]}',
    '{"result": [[{"document": {"id": "0", "contents": "Lima"}}, {}]]}',
    # An empty text or object where a list of rows belongs is no empty list of rows.
    '{"result": [{}]}',
    '{"result": [""]}',
    '{"result": {"": []}}',
]


@pytest.mark.parametrize("body", ["", "<html>Bad gateway</html>", '{"result": [[', "{'result': []}", *WRONG_SHAPES])
async def test_an_answer_in_a_wrong_form_is_a_failure_and_not_an_empty_result(body):
    async with client_of(Service(answers(body))) as client:
        with pytest.raises(RetrievalUnavailable, match=r"has not answered properly for 0\.05 s"):
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert (client.searches, client.failures.total()) == (0, 1)


@pytest.mark.parametrize("failure", [closes_early, hangs_up, answers('{"result": [[]]}', 500), answers("", 204)])
async def test_a_retriever_that_breaks_off_is_a_failure(failure):
    async with client_of(Service(failure)) as client:
        with pytest.raises(RetrievalUnavailable):
            await client.search("capital of Peru", 0, QUESTION, 0)


async def test_bytes_that_are_no_utf8_are_a_failure():
    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"result": [[{"document": {"contents": "\xff"}}]]}', content_type="application/json")

    async with client_of(Service(answer)) as client:
        with pytest.raises(RetrievalUnavailable):
            await client.search("capital of Peru", 0, QUESTION, 0)


async def test_a_retriever_that_hangs_is_given_up_after_the_timeout():
    async with client_of(Service(hangs), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match="TimeoutError"):
            await client.search("capital of Peru", 0, QUESTION, 0)


async def test_a_retriever_that_hangs_once_is_asked_again():
    async with client_of(Service(hangs, finds("Lima")), timeout_s=0.3, outage_s=60) as client:
        assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]


async def test_a_retriever_that_stays_down_is_asked_several_times_and_then_named():
    service = Service(answers("down", 500))
    async with client_of(service, outage_s=1.0) as client:
        with pytest.raises(RetrievalUnavailable) as caught:
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert 2 <= len(service.bodies) == client.failures.total() <= 12
    assert client.searches == 0
    message = str(caught.value)
    assert "http://127.0.0.1:" in message
    assert "for 1 s" in message
    assert "500" in message
    assert "retriever.url" in message


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_is_refused_as_wrong_fails_this_search_alone_and_is_not_repeated(status):
    service = Service(answers('{"error": "topk must be an integer"}', status), finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        with pytest.raises(SearchRefused, match=rf"refuses the search for 'capital.*\({status}\): .*topk must be"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert len(service.bodies) == 1
        assert await client.search("capital of Chile", 0, QUESTION, 0) == ["Lima"]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_a_gateway_answers_for_a_while_is_waited_out(status):
    async with client_of(Service(answers("no upstream", status), finds("Lima")), outage_s=60) as client:
        assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]
        assert client.failures == {"status": 1}


# What an answer may hold.


async def test_half_a_surrogate_pair_in_a_passage_or_a_query_becomes_a_question_mark():
    body = '{"result": [[{"document": {"contents": "\\"Peru\\"\\nLima \\ud83d \\ud83d\\ude00"}}]]}'
    service = Service(answers(body))
    async with client_of(service) as client:
        assert await client.search("capital \ud83d", 0, QUESTION, 0) == ['"Peru"\nLima ? 😀']
        assert (await play(client)).depth == 1
    assert service.bodies[0]["queries"] == ["capital ?"]


async def test_an_answer_that_is_nested_too_deeply_is_a_failure():
    async with client_of(Service(answers("[" * 100_000))) as client:
        with pytest.raises(RetrievalUnavailable, match="RecursionError"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert client.failures == {"garbage": 1}


async def test_a_redirect_is_named_and_not_followed():
    elsewhere = Service(finds("stolen"))
    async with client_of(elsewhere) as other:
        target = f"{other._settings.url}/retrieve"

        async def redirects(service: Service, request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(target)

        async with client_of(Service(redirects)) as client:
            with pytest.raises(
                RetrievalUnavailable, match=f"it answers 307: it redirects to '{target}', and redirects"
            ):
                await client.search("capital of Peru", 0, QUESTION, 0)
    assert elsewhere.bodies == []


async def endless(service: Service, request: web.Request) -> web.StreamResponse:
    """An answer that goes on until nobody reads it any more."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"result": [[{"document": {"contents": "')
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"x" * (1 << 16))
    return response


async def test_an_answer_beyond_the_limit_is_not_read_to_its_end_and_fails_its_search():
    async with client_of(Service(endless, finds("Lima")), max_answer_mib=2, outage_s=60) as client:
        with pytest.raises(SearchRefused, match=r"'capital of Peru' with more than retriever.max_answer_mib \(2\)"):
            await client.search("capital of Peru", 0, QUESTION, 0)
        assert await client.search("capital of Peru", 0, QUESTION, 0) == ["Lima"]


async def test_a_compressed_answer_is_not_unpacked():
    bomb = zlib.compress(b" " * (300 << 20), wbits=31)

    async def answer(service: Service, request: web.Request) -> web.StreamResponse:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with client_of(Service(answer)) as client:
        with pytest.raises(RetrievalUnavailable, match=r"the answer is compressed \(gzip\), unasked"):
            await client.search("capital of Peru", 0, QUESTION, 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"


async def test_passages_of_ten_megabytes_cost_neither_the_loop_nor_memory():
    """A dozen at once: the loop must go on beating, and only what can be shown is kept."""
    huge = json.dumps({"result": [[{"document": {"contents": "t\n" + "many words " * 1_000_000}}]]})
    gaps = []

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with client_of(Service(answers(huge)), timeout_s=60, noise=0.5) as client:
        beating = asyncio.create_task(beat())
        played = await asyncio.gather(*(play(client) for _ in range(12)))
        found = await client.search("capital of Peru", 0, QUESTION, 0)
        beating.cancel()
    assert [trajectory.depth for trajectory in played] == [1] * 12
    assert [len(text) for text in found] == [EpisodeConfig().max_observation_characters]
    assert max(gaps) < 5, "seconds without a beat: tokenised whole, each passage takes ten"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800 << 10, "KiB, the server's share included"


async def test_a_server_that_knows_no_field_of_ours_is_not_sent_one():
    async def strict(service: Service, request: web.Request) -> web.StreamResponse:
        unknown = set(await request.json()) - {"queries", "topk", "return_scores"}
        return await (answers(f"extra fields {unknown}", 422) if unknown else finds("Lima"))(service, request)

    async with client_of(Service(strict)) as client:
        assert await client.search("capital of Peru", 5, QUESTION, 0) == ["Lima"]


@pytest.mark.parametrize(
    "ours",
    [{"noise": 0.5}, {"distractors": 1}, {"latency_median_s": 0.1, "latency_p99_s": 0.2}, {"backend": "zerosearch"}],
)
async def test_a_retriever_of_ours_that_draws_is_sent_the_draw(ours):
    service = Service(finds("Lima"))
    async with client_of(service, **ours, timeout_s=60) as client:
        await client.search("capital of Peru", 5, QUESTION, 0)
    assert service.bodies[0]["draws"] == [5]


# What is said while the retriever is down, and what is left at the end.


async def test_a_retriever_that_is_down_is_named_in_the_log_until_it_answers(atlas_config, monkeypatch, caplog):
    monkeypatch.setattr(retrieval, "SAY_EVERY_S", 0.05)
    url = f"http://127.0.0.1:{free_port()}"
    config = load_config(atlas_config, ["--retriever.url", url])
    async with SearchClient.open(config) as client, asyncio.timeout(20):
        waiting = asyncio.create_task(client.wait_until_answering(60))
        while len(caplog.messages) < 3:
            await asyncio.sleep(0.01)
        assert re.fullmatch(
            rf"retriever at {url} down for \d+ s: Connection refused; waiting up to 60 s", caplog.messages[-1]
        )
        app = web.Application()
        app.router.add_post("/retrieve", Service(finds("Lima")).handle)
        async with TestServer(app, port=int(url.rsplit(":", 1)[1])):
            await waiting
            assert client.facts()["retriever_down_s"] == 0.0
            assert client._trouble == ""


async def test_a_client_that_ends_while_its_retriever_is_down_leaves_nothing_behind(atlas_config, caplog):
    config = load_config(atlas_config, ["--retriever.url", f"http://127.0.0.1:{free_port()}"])
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with SearchClient.open(config) as client:
        episodes = [asyncio.create_task(client.search(f"q{i}", i, QUESTION, 0)) for i in range(20)]
        while client.failures.total() < 20:
            await asyncio.sleep(0.01)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
    del episodes, client
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_search_that_fails_after_its_episode_is_gone_is_not_complained_about():
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with client_of(Service(answers("down", 500)), outage_s=0.3) as client:
        episode = asyncio.create_task(client.search("q", 0, QUESTION, 0))
        while not client._on_their_way:
            await asyncio.sleep(0)
        episode.cancel()
        while client._on_their_way:
            await asyncio.sleep(0.01)
    gc.collect()
    assert unseen == []


async def test_a_retriever_that_is_not_there_is_named():
    config = RetrieverConfig(url=f"http://127.0.0.1:{free_port()}", outage_s=0.05)
    async with SearchClient.session(config) as session:
        with pytest.raises(RetrievalUnavailable, match=config.url):
            await SearchClient(session, config, EpisodeConfig(topk=2), 4).search("capital of Peru", 0, QUESTION, 0)


async def test_waiting_for_a_retriever_has_its_own_limit():
    async with client_of(Service(answers("starting", 503), finds()), outage_s=0.01) as client:
        await client.wait_until_answering(60)
    async with client_of(Service(answers("starting", 503)), outage_s=60) as client:
        with pytest.raises(RetrievalUnavailable, match=r"for 0\.05 s"):
            await client.wait_until_answering(0.05)


async def test_searches_at_the_same_time_each_get_their_own_answer():
    async def echo(service: Service, request: web.Request) -> web.StreamResponse:
        (query,) = (await request.json())["queries"]
        return web.json_response({"result": [[{"document": {"id": "0", "contents": query}, "score": 1.0}]]})

    async with client_of(Service(echo)) as client:
        queries = [f"query {i}" for i in range(30)]
        found = await asyncio.gather(*(client.search(query, i, QUESTION, 0) for i, query in enumerate(queries)))
    assert found == [[query] for query in queries]


async def test_the_client_understands_the_projects_own_retriever():
    index = Bm25Index.in_memory(
        [{"id": "0", "contents": '"Peru"\nThe capital of Peru is Lima.'}, {"id": "1", "contents": "x y"}]
    )
    async with TestServer(Retriever(LocalSearch(index, Simulation())).application()) as server:
        config = RetrieverConfig(url=f"http://127.0.0.1:{server.port}")
        async with SearchClient.session(config) as session:
            client = SearchClient(session, config, EpisodeConfig(topk=3), 4)
            assert await client.search("capital of Peru", 0, QUESTION, 0) == ['"Peru"\nThe capital of Peru is Lima.']
            assert await client.search("zzz", 0, QUESTION, 0) == []


# What the client does for many episodes at once.


async def test_equal_searches_on_their_way_are_asked_once_of_a_deterministic_engine():
    service = Service(waits_for_more(3))
    async with client_of(service) as client:
        asked = [client.search("capital of Peru", draw, QUESTION, 0) for draw in range(5)]
        others = [client.search(f"capital {i}", i, QUESTION, 0) for i in range(2)]
        found = await asyncio.gather(*asked, *others)
    assert len(service.bodies) == 3
    assert found == [["Lima"]] * 7
    assert (client.searches, client.shared) == (3, 4)
    assert found[0] is not found[1], "each may do with its list what it wants"


@pytest.mark.parametrize("noise", [{"noise": 0.5}, {"distractors": 1}, {"backend": "zerosearch", "timeout_s": 60}])
async def test_an_engine_that_draws_is_asked_every_time(noise):
    service = Service(waits_for_more(5))
    async with client_of(service, **noise) as client:
        await asyncio.gather(*(client.search("capital of Peru", draw, QUESTION, 0) for draw in range(5)))
    assert sorted(body["draws"][0] for body in service.bodies) == list(range(5))


async def test_an_episode_that_is_cancelled_takes_no_others_search_with_it():
    service = Service(waits_for_more(1))
    async with client_of(service) as client:
        first, second = (asyncio.create_task(client.search("q", draw, QUESTION, 0)) for draw in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ["Lima"]


async def test_only_a_simulated_engine_is_told_the_question_and_its_answers():
    for backend, contexts in (
        ("bm25", None),
        ("serper", None),
        ("zerosearch", [{"question": QUESTION.text, "answers": ["Lima"], "step": 3}]),
    ):
        service = Service(finds("Lima"))
        async with client_of(service, backend=backend, timeout_s=60) as client:
            await client.search("capital of Peru", 1, QUESTION, 14)
        assert service.bodies[0].get("contexts") == contexts


async def test_a_retriever_in_trouble_gets_one_attempt_at_a_time():
    service = Service(answers("down", 500))
    async with client_of(service, outage_s=1.5) as client:
        asked = [asyncio.create_task(client.search(f"q{i}", i, QUESTION, 0)) for i in range(40)]
        while client.failures.total() < 40:
            await asyncio.sleep(0.01)
        begun = len(service.bodies)
        await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        most = len(service.bodies) - begun
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert most <= 12, "40 that retry by themselves would have asked over 100 times"


async def test_the_breaker_closes_with_the_first_answer():
    failing = [answers("down", 500)] * 12
    service = Service(*failing, finds("Lima"))
    async with client_of(service, outage_s=60) as client:
        found = await asyncio.gather(*(client.search(f"q{i}", i, QUESTION, 0) for i in range(12)))
        assert found == [["Lima"]] * 12
        facts = client.facts()
    assert (facts["searches"], facts["search_failures_by_kind"], facts["retriever_down_s"]) == (12, "status:12", 0.0)
    assert facts["search_p99_s"] >= facts["search_p50_s"] > 0


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(answers("down", 500), "status"), (hangs_up, "closed"), (answers("{}"), "garbage"), (hangs, "timeout")],
)
async def test_failures_are_told_apart(failure, kind):
    async with client_of(Service(failure, finds()), timeout_s=0.3, outage_s=60) as client:
        await client.search("q", 0, QUESTION, 0)
        assert client.failures == {kind: 1}


# What an episode does when its retriever fails.

SEARCH_R1 = (
    '{"result": [[{"document": {"id": "0", "contents": "\\"Peru\\"\\nThe capital of Peru is Lima."}, "score": 7.5}]]}'
)
TOKENIZER = AutoTokenizer.from_pretrained(STARTER)


async def play(client):
    turns = ["<think>a</think><search>capital of Peru</search>", "<think>b</think><answer>Lima</answer><|endoftext|>"]
    settings = EpisodeConfig(template="atlas", document_template="{text}\n", max_observation_tokens=88)
    player = Player(ScriptedPolicy(TOKENIZER, turns), client, TOKENIZER, settings, seed=0)
    return await player.play(QUESTION, 0, 0, "w")


async def test_an_episode_on_search_r1s_exact_answer_counts_the_search():
    async with client_of(Service(answers(SEARCH_R1))) as client:
        trajectory = await play(client)
    assert (trajectory.depth, trajectory.em) == (1, 1.0)
    assert "The capital of Peru is Lima." in TOKENIZER.decode(trajectory.token_ids[~trajectory.sampled].tolist())


@pytest.mark.parametrize(
    "failure", [answers("down", 500), hangs, closes_early, hangs_up, answers("<html>"), answers('{"result": [{}]}')]
)
async def test_an_episode_waits_for_a_failure_to_pass_and_then_goes_on_as_if_nothing_had_been(failure):
    async with client_of(Service(failure, answers(SEARCH_R1)), timeout_s=0.3, outage_s=60) as client:
        trajectory = await play(client)
        assert client.failures.total() == 1
    assert (trajectory.depth, trajectory.em) == (1, 1.0)


@pytest.mark.parametrize(
    "failure", [answers("down", 500), hangs, closes_early, hangs_up, answers("<html>"), answers('{"result": [{}]}')]
)
async def test_an_episode_whose_retriever_stays_broken_makes_no_trajectory(failure):
    async with client_of(Service(failure), timeout_s=0.1) as client:
        with pytest.raises(RetrievalUnavailable, match="has not answered properly"):
            await play(client)


async def test_a_search_that_is_never_answered_while_others_are_is_refused_by_itself():
    async def poisoned(service, request):
        query = (await request.json())["queries"][0]
        return await (answers("content filter", 502) if query == "poison" else finds("Lima"))(service, request)

    async with client_of(Service(poisoned), outage_s=0.5) as client:
        failing = asyncio.create_task(client.search("poison", 0, QUESTION, 0))
        number = 0
        while not failing.done():
            assert await client.search(f"q{number}", number, QUESTION, 0) == ["Lima"]
            number += 1
        with pytest.raises(SearchRefused, match=r"answers others.*'poison'.*it answers 502: content filter"):
            await failing
