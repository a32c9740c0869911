"""The simulated search engine: its prompts, its noise, its failures, and the stand-in over atlas facts."""

from __future__ import annotations

import json
import zlib
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.atlas.simulator import Simulator
from cusearch_async.config import ZeroSearchConfig, load_config
from cusearch_async.data.questions import load_corpus
from cusearch_async.errors import SearchFailed
from cusearch_async.processes.retriever import make_backend
from cusearch_async.retrieval.backend import Context, Query
from cusearch_async.retrieval.protocol import MAX_ANSWER_BYTES
from cusearch_async.retrieval.server import Retriever
from cusearch_async.retrieval.zerosearch import ZeroSearch, build_prompt, noise_probability, parse_documents
from tests.conftest import free_port

PERU = Context("What is the currency of Peru?", ("Sol", "Peruvian sol"), 0)


class Model:
    """A chat server that remembers what it was asked."""

    def __init__(self, answer="Doc 1: one\nDoc 2: two\nDoc 3: three", status=200):
        self.answer, self.status = answer, status
        self.asked: list[dict] = []

    async def handle(self, http):
        self.asked.append({**(await http.json()), "key": http.headers.get("Authorization")})
        if not isinstance(self.answer, str):
            return web.json_response(self.answer, status=self.status)
        return web.json_response({"choices": [{"message": {"content": self.answer}}]}, status=self.status)


def text_of(asked):
    """What the user's message of a request says."""
    content = asked["messages"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


@asynccontextmanager
async def engine_on(server_of, steps=100, **settings):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server_of.handle)
    async with TestServer(app) as server:
        engine = ZeroSearch(ZeroSearchConfig(url=f"http://127.0.0.1:{server.port}/v1", **settings), steps, seed=3)
        yield engine
        await engine.close()


async def test_it_asks_for_documents_of_the_one_who_searches():
    model = Model()
    async with engine_on(model, p_end=0.0, model="simulator") as engine:
        found = await engine.search([Query("currency of Peru", 7, PERU)], 2)
    assert [passage["contents"] for passage, _ in found[0]] == ["one", "two"], "topk of them"
    (asked,) = model.asked
    prompt = text_of(asked)
    assert (asked["seed"], asked["model"], asked["max_tokens"], asked["temperature"]) == (7, "simulator", 600, 0.8)
    assert "generate two useful documents" in prompt
    assert 'the question: "What is the currency of Peru?" whose answer is Sol.' in prompt


# As ZeroSearch's own client writes it (llm_agent/generation.py, search_simulate_sft; its f-strings filled in).
ZEROSEARCH = {
    False: """You are the Google search engine.
Given a query, you need to generate five useful documents for the query.

The user is trying to answer the question: "What is the currency of Peru?" whose answer is Sol.
Each document should contain about 30 words, and these documents should contain useful information.

Query: currency of Peru
Useful Output:
""",
    True: """You are the Google search engine.
Given a query, you need to generate five noisy documents for the query.

The user is trying to answer the question: "What is the currency of Peru?" whose answer is Sol.
Each document should contain about 30 words, and these documents should contain noisy information.

Query: currency of Peru
Noisy Output:
""",
}


@pytest.mark.parametrize("is_noisy", [False, True])
async def test_a_fine_tuned_simulator_is_asked_to_the_letter_as_zerosearch_asks_it(is_noisy):
    model = Model()
    async with engine_on(model, p_start=float(is_noisy), p_end=float(is_noisy)) as engine:
        await engine.search([Query("currency of Peru", 7, PERU)], 5)
    (asked,) = model.asked
    assert asked["messages"] == [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": ZEROSEARCH[is_noisy]}]},
    ]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("", 600, 0.8)


@pytest.mark.parametrize("is_noisy", [False, True])
async def test_a_chat_model_gets_the_few_shot_prompt_and_no_system_message(is_noisy):
    """Some chat templates refuse a system message."""
    model = Model()
    async with engine_on(model, p_start=float(is_noisy), p_end=float(is_noisy), mode="prompt") as engine:
        await engine.search([Query("currency of Peru", 7, PERU)], 5)
    (message,) = model.asked[0]["messages"]
    assert message["role"] == "user"
    kind = "related but noisy" if is_noisy else "useful"
    assert f"need to generate five {kind} documents" in message["content"]
    assert f"should contain {kind} information" in message["content"]
    assert message["content"].endswith(f"Query: currency of Peru\n{'Noisy' if is_noisy else 'Useful'} Output:\n")


async def test_each_query_of_a_request_gets_its_own_context():
    model = Model()
    chile = Context("What is the capital of Chile?", ("Santiago",), 0)
    async with engine_on(model, p_end=0.0) as engine:
        await engine.search([Query("a", 1, PERU), Query("", 2, PERU), Query("b", 3, chile)], 3)
    told = {asked["seed"]: text_of(asked) for asked in model.asked}
    assert set(told) == {1, 3}, "a blank query is not asked"
    assert "Sol" in told[1]
    assert "Santiago" not in told[1]
    assert "Santiago" in told[3]


def test_noise_grows_from_p_start_to_p_end():
    settings = ZeroSearchConfig(p_start=0.1, p_end=0.7, base=4)
    assert noise_probability(0, settings, 0) == settings.p_end, "a run without steps is scored, too"
    grown = [noise_probability(i, settings, 200) for i in range(0, 300, 10)]
    assert grown[0] == pytest.approx(0.1)
    assert grown[10] == pytest.approx(0.1 + (4**0.5 - 1) / 3 * 0.6), "the published formula, halfway"
    assert grown[20:] == [pytest.approx(0.7)] * 10
    assert grown == sorted(grown)


def test_the_draw_decides_and_nothing_else_does():
    engine = ZeroSearch(ZeroSearchConfig(p_start=0.5, p_end=0.5), 10, seed=1)
    drawn = [engine.is_noisy(Query("q", draw), 3) for draw in range(2000)]
    assert drawn == [engine.is_noisy(Query("another", draw), 3) for draw in range(2000)]
    assert 0.45 < sum(drawn) / 2000 < 0.55
    other = ZeroSearch(ZeroSearchConfig(p_start=0.5, p_end=0.5), 10, seed=2)
    assert drawn != [other.is_noisy(Query("q", draw), 3) for draw in range(2000)]


@pytest.mark.parametrize(("p", "kind"), [(0.0, "useful"), (1.0, "noisy")])
async def test_useful_and_noisy_are_counted_and_asked_for(p, kind):
    model = Model()
    async with engine_on(model, p_start=p, p_end=p) as engine:
        await engine.search([Query("q", draw, PERU) for draw in range(4)], 3)
        assert engine.figures() == {"useful": 0, "noisy": 0, "failures": 0} | {kind: 4}
    assert all(f"three {kind} documents" in text_of(asked) for asked in model.asked)


def test_a_noisy_few_shot_prompt_does_not_know_the_answer():
    noisy, useful = (build_prompt("q", PERU, is_noisy, 5, "prompt") for is_noisy in (True, False))
    assert "Sol" not in noisy
    assert "currency of Peru" not in noisy
    assert '"What is the currency of Peru?" whose answer is Sol.' in useful
    assert "five related but noisy documents" in noisy
    assert "12 noisy documents" in build_prompt("q", PERU, True, 12, "sft")


@pytest.mark.parametrize(
    ("text", "topk", "documents"),
    [
        ("Doc 1: a\nDoc 2: b\nDoc 3: c", 2, ["a", "b"]),
        ("Doc 1:  a \n b\n\n\nDoc 2:\n\nDoc 3: c", 5, ["a b", "c"]),
        ("Sure!\nDocument 1: a\ndoc 2 : b", 5, ["a", "b"]),
        ("no numbers at all", 5, ["no numbers at all"]),
        ("", 5, []),
        ("Doc 1:", 5, []),
        ("Doc 1: see Doc 2: within a line", 5, ["see Doc 2: within a line"]),
    ],
)
def test_documents_are_taken_from_the_text(text, topk, documents):
    assert parse_documents(text, topk) == documents


@given(st.text(), st.integers(1, 10))
def test_any_text_gives_at_most_topk_tidy_documents(text, topk):
    found = parse_documents(text, topk)
    assert len(found) <= topk
    assert all(document == " ".join(document.split()) != "" for document in found)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model({"error": "overloaded"}, 503), "answers 503: .*overloaded"),
        (Model({"error": "no such model"}, 404), "answers 404"),
        (Model({"choices": []}), "no chat completion"),
        (Model(["x"]), "no chat completion"),
        (Model({"choices": [{"message": {"content": None}}]}), "without text"),
        (Model(" \n"), "without text"),
        (Model("<think>The user wants to know, whose answer is Lima."), "ends within its thoughts: raise max_tokens"),
        (Model("Hm. Doc 1: Lima is it.</think>\n"), "ends within its thoughts"),
    ],
)
async def test_a_failure_is_no_document(model, said):
    async with engine_on(model) as engine:
        with pytest.raises(SearchFailed, match=said) as failed:
            await engine.search([Query("q", 1, PERU)], 3)
        assert failed.value.status == 502
        assert engine.figures()["failures"] == 1


class Raw:
    """A chat server whose answer is these bytes."""

    def __init__(self, body, status=200, **headers):
        self.body, self.status, self.headers = body, status, headers

    async def handle(self, _):
        return web.Response(body=self.body, status=self.status, headers=self.headers)


class Bomb(Raw):
    """64 kB that are 64 MiB."""

    def __init__(self):
        super().__init__(b"", **{"Content-Encoding": "deflate"})

    async def handle(self, _):
        self.body = zlib.compress(b" " * (64 << 20))
        return await super().handle(_)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Raw(b"[" * 100_000), "RecursionError"),
        (Raw(b" " * (MAX_ANSWER_BYTES + 1)), f"the answer is longer than {MAX_ANSWER_BYTES} bytes"),
        (Bomb(), f"the answer is longer than {MAX_ANSWER_BYTES} bytes"),
        (Raw(b"elsewhere", 307, Location="http://127.0.0.1:9/v1/chat/completions"), "answers 307: elsewhere"),
    ],
    ids=["nested", "long", "compressed", "redirected"],
)
async def test_an_answer_beyond_reason_is_a_failure_and_no_fault_of_ours(server, said):
    async with engine_on(server) as engine:
        with pytest.raises(SearchFailed, match=said) as failed:
            await engine.search([Query("q", 1, PERU)], 3)
        assert failed.value.status == 502
        assert engine.figures()["failures"] == 1


async def test_half_a_character_in_a_document_is_replaced():
    async with engine_on(Raw(b'{"choices": [{"message": {"content": "Doc 1: a \\ud83d b"}}]}')) as engine:
        found = await engine.search([Query("q", 1, PERU)], 3)
    assert found[0][0][0]["contents"] == "a ? b"


async def test_a_simulator_that_is_not_there_is_named():
    engine = ZeroSearch(ZeroSearchConfig(url=f"http://127.0.0.1:{free_port()}/v1"), 10, 0)
    with pytest.raises(SearchFailed, match=r"the simulator at http://127\.0\.0\.1:\d+/v1 fails: ClientConnector"):
        await engine.search([Query("q", 1, PERU)], 3)
    await engine.close()


async def test_a_search_of_nobody_is_refused():
    engine = ZeroSearch(ZeroSearchConfig(), 10, 0)
    with pytest.raises(SearchFailed, match="send 'contexts'") as failed:
        await engine.search([Query("q", 1)], 3)
    assert failed.value.status == 400


async def test_the_key_is_sent_and_not_told(monkeypatch):
    monkeypatch.setenv("CUSEARCH_SIMULATOR_KEY", "hunter2\n")  # as out of a file
    model = Model({"error": "no"}, 500)
    async with engine_on(model) as engine:
        with pytest.raises(SearchFailed) as failed:
            await engine.search([Query("q", 1, PERU)], 3)
    assert model.asked[0]["key"] == "Bearer hunter2"
    assert "hunter2" not in str(failed.value)


# The stand-in over atlas facts, behind the project's own retriever.

MINSK = {"question": "What is the currency of Belarus?", "answers": ["Belarusian ruble"], "step": 0}


@asynccontextmanager
async def simulated_atlas(corpus="atlas", **settings):
    async with TestServer(Simulator(load_corpus(corpus)).application()) as simulator:
        engine = ZeroSearch(ZeroSearchConfig(url=f"http://127.0.0.1:{simulator.port}/v1", **settings), 10, 0)
        async with TestClient(TestServer(Retriever(engine).application())) as client:
            yield client
        await engine.close()


async def ask(client, seed=5, query="currency of Belarus"):
    body = {"queries": [query], "topk": 2, "seeds": [seed], "contexts": [MINSK]}
    async with client.post("/retrieve", json=body) as response:
        assert response.status == 200, await response.text()
        ((*documents,),) = (await response.json())["result"]
        return [document["contents"] for document in documents]


@pytest.mark.parametrize("mode", ["sft", "prompt"])
async def test_useful_documents_of_the_atlas_answer_the_query(mode):
    async with simulated_atlas(p_end=0.0, mode=mode) as client:
        found = await ask(client)
    assert found[0] == "The currency of Belarus is Belarusian ruble."
    assert len(found) == 2


async def test_useful_documents_of_the_world_in_prose_are_its_passages():
    """They were the sentences of the other one, which no question names as evidence."""
    async with simulated_atlas("atlas-prose", p_end=0.0) as client:
        found = await ask(client)
    texts = {passage["contents"].partition("\n")[2] for passage in load_corpus("atlas-prose")}
    assert set(found) <= texts
    assert "Belarus" in found[0]


async def test_noisy_documents_of_the_atlas_are_others_and_depend_on_the_draw():
    async with simulated_atlas(p_start=1.0, p_end=1.0) as client:
        found, again, other = await ask(client), await ask(client), await ask(client, seed=6)
    assert found == again != other
    assert "The currency of Belarus is Belarusian ruble." not in found


@pytest.mark.parametrize("body", ["{", "[]", "{}", json.dumps({"messages": [{"content": "Tell me a joke."}]})])
async def test_the_stand_in_refuses_what_is_no_search(body):
    simulator = TestClient(TestServer(Simulator(load_corpus("atlas")).application()))
    async with simulator as client, client.post("/v1/chat/completions", data=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_the_retriever_of_a_run_has_its_seed_and_its_steps(atlas_config):
    given = {"retriever.backend": "zerosearch", "run.steps": "10", "run.seed": "3"}
    given |= {"retriever.zerosearch.p_start": "0", "retriever.zerosearch.p_end": "1"}
    config = load_config(atlas_config, [word for key, value in given.items() for word in (f"--{key}", value)])
    made, wanted = make_backend(config), ZeroSearch(config.retriever.zerosearch, 10, 3)
    queries = [(Query("q", seed, None), step) for seed in range(40) for step in range(11)]
    assert [made.is_noisy(*one) for one in queries] == [wanted.is_noisy(*one) for one in queries]
    other = ZeroSearch(config.retriever.zerosearch, 10, 4)
    assert [made.is_noisy(*one) for one in queries] != [other.is_noisy(*one) for one in queries]


async def test_a_proxy_of_the_machine_is_asked_for_a_simulator_that_is_away(monkeypatch):
    """Every search failed where the Internet is behind a proxy."""
    proxy, app = Model(), web.Application()
    app.router.add_post("/{path:.*}", proxy.handle)
    async with TestServer(app) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        engine = ZeroSearch(ZeroSearchConfig(url="http://simulator.example/v1"), 10, 0)
        assert await engine.search([Query("Peru", 0, PERU)], 3)
        await engine.close()
    assert len(proxy.asked) == 1
