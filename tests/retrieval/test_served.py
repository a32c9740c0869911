"""A retriever says what it serves, and a client that gets answers of another one ends."""

from __future__ import annotations

import json
import re

import pytest
from aiohttp.test_utils import TestClient, TestServer

from cusearch_async.config import load_config
from cusearch_async.errors import ContractMismatch
from cusearch_async.processes.retriever import make_backend, retriever_of
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.retrieval.server import what_is_served
from tests.http_service import Service, says
from tests.retrieval.retrievers import QUESTION, client_of, finds
from tests.run.test_identity import CHANGES

PERU, JAPAN = ({"id": str(i), "contents": text} for i, text in enumerate(["Lima is in Peru.", "Tokyo is in Japan."]))


def corpus(folder, *passages):
    path = folder / f"corpus{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages), encoding="utf-8")
    return Corpus(path)


def serves(atlas_config, passages, **settings):
    overrides = [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", value)]
    config = load_config(atlas_config, overrides)
    return what_is_served(config.retriever, config.run.seed, config.run.steps, passages)


def test_it_is_the_same_wherever_the_corpus_lies(atlas_config, tmp_path):
    one, copy = corpus(tmp_path, PERU, JAPAN), corpus(tmp_path, PERU, JAPAN)
    same = serves(atlas_config, one)
    assert same.startswith("bm25 over 2 passages (")
    assert serves(atlas_config, copy, retriever__url="http://127.0.0.1:9", retriever__timeout_s="7") == same
    assert serves(atlas_config, copy, run__seed="7") == same, "nothing is drawn"


DENSE = {
    "retriever__backend": "dense",
    "retriever__dense__encoder": "FOLDER/encoder",
    "retriever__dense__query_prefix": "query: ",
    "retriever__dense__passage_prefix": "passage: ",
    "retriever__dense__pooling": "mean",
}
"""With a folder that says nothing of pooling and prefixes."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"retriever__noise": "0.5"}),
        ({}, {"retriever__distractors": "1"}),
        ({}, {"retriever__bm25__tokenizer": "tests.retrieval.tokenizers:letters"}),
        ({}, DENSE),
        ({}, {"retriever__rerank__model": "a/reranker"}),
        ({"retriever__noise": "0.5"}, {"run__seed": "7"}),
        ({"retriever__noise": "0.5"}, {"retriever__stochastic": "false"}),
        (DENSE, {"retriever__dense__query_prefix": ""}),
        (DENSE, {"retriever__dense__pooling": "cls"}),
        (DENSE, {"retriever__dense__encoder": "FOLDER/another"}),
        ({"retriever__rerank__model": "a/reranker"}, {"retriever__rerank__candidates": "20"}),
        ({"retriever__backend": "zerosearch"}, {"retriever__zerosearch__model": "another"}),
        ({"retriever__backend": "zerosearch"}, {"retriever__zerosearch__p_end": "0.9"}),
        ({"retriever__backend": "zerosearch"}, {"retriever__zerosearch__mode": "prompt"}),
        ({"retriever__backend": "zerosearch"}, {"run__steps": "400"}),
        ({"retriever__backend": "serper"}, {"retriever__backend": "serpapi"}),
        ({"retriever__backend": "a.b:C"}, {"retriever__options": "{k = 1}"}),
        ({"retriever__backend": "serper"}, {"retriever__web__url": "http://127.0.0.1:1/search"}),
    ],
    ids=str,
)
def test_whatever_decides_which_documents_a_search_gets_is_in_it(atlas_config, tmp_path, before, after):
    passages = corpus(tmp_path, PERU)
    for name in ("encoder", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "bert"}')
    first, second = (
        {key: value.replace("FOLDER", str(tmp_path)) for key, value in settings.items()}
        for settings in (before, before | after)
    )
    assert serves(atlas_config, passages, **first) != serves(atlas_config, passages, **second)


OF_BACKENDS = {
    "retriever.dense.": DENSE | {"retriever__dense__kind": "ivf"},
    "retriever.rerank.": {"retriever__rerank__model": "a/reranker"},
    "retriever.zerosearch.": {"retriever__backend": "zerosearch"},
}


@pytest.mark.parametrize("key", [key for key in CHANGES if key.startswith(tuple(OF_BACKENDS))])
def test_every_setting_of_a_backend_that_the_contract_holds_is_in_it(atlas_config, tmp_path, key):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert"}')
    base = next(settings for prefix, settings in OF_BACKENDS.items() if key.startswith(prefix))
    before = {name: value.replace("FOLDER", str(tmp_path)) for name, value in base.items()}
    after = before | {key.replace(".", "__"): CHANGES[key]}
    assert serves(atlas_config, [PERU], **before) != serves(atlas_config, [PERU], **after)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "bm25 over 1 passages"),
        ({"backend": "serper", "noise": "0.5"}, "serper"),
        ({"noise": "0.5", "stochastic": "false"}, "bm25 over 1 passages with noise 0.5, drawn for each query"),
        ({"distractors": "1"}, "bm25 over 1 passages with 1 distractors, drawn for each search"),
        ({"bm25__tokenizer": "a.b:cut"}, "bm25 over 1 passages with tokenizer a.b:cut"),
        ({"rerank__model": "a/b"}, "bm25 over 1 passages with the best of 10 by a/b"),
        pytest.param({"backend": "dense", "dense__encoder": "a/e", "dense__pooling": "cls", "dense__query_prefix": "",
          "dense__passage_prefix": ""}, "dense over 1 passages with encoder a/e (flat)", marks=pytest.mark.system),
        ({"backend": "zerosearch", "zerosearch__model": "sim"},
         "zerosearch by sim, sft, temperature 0.8, noise 0 to 0.5 over 8 steps"),
        ({"backend": "zerosearch", "zerosearch__steps": "9"},
         "zerosearch by the model of its server, sft, temperature 0.8, noise 0 to 0.5 over 9 steps"),
    ],
)  # fmt: skip
def test_its_words_name_what_decides_about_results(atlas_config, overrides, name):
    said = serves(atlas_config, [PERU], **{f"retriever__{key}": value for key, value in overrides.items()})
    assert re.fullmatch(re.escape(name) + r" \([0-9a-f]{16}\)", said)


def test_other_passages_are_another_corpus(atlas_config, tmp_path):
    assert serves(atlas_config, corpus(tmp_path, PERU)) != serves(atlas_config, corpus(tmp_path, JAPAN))
    assert serves(atlas_config, [PERU]) != serves(atlas_config, [JAPAN])


async def test_the_retriever_says_it_in_its_health_and_with_every_answer(atlas_config, tmp_path):
    passages = corpus(tmp_path, PERU, JAPAN)
    config = load_config(atlas_config, ["--retriever.corpus", str(passages._path)])
    backend = make_backend(config)
    async with TestClient(TestServer(retriever_of(config, backend).application())) as http:
        said = (await (await http.get("/health")).json())["serves"]
        answer = await http.post("/retrieve", json={"queries": ["Peru"]})
    await backend.close()
    assert (
        said
        == answer.headers["X-Retriever-Serves"]
        == what_is_served(config.retriever, config.run.seed, config.run.steps, passages)
    )


HEALTH = {"deterministic": True, "accepts_seed": False}
OURS, THEIRS = "bm25 over 2 passages (1)", "bm25 over 9 passages (2)"
OTHER = r"serves bm25 over 9 passages \(2\) now, and before it served bm25 over 2 passages \(1\); .*--accept-changes"


async def search(client):
    return await client.search("Peru", 0, QUESTION, 0)


async def test_an_answer_of_another_retriever_ends_the_client():
    answers = finds("Lima", serves=OURS), finds("Tokyo", serves=THEIRS)
    async with client_of(Service(*answers), Service(says(HEALTH | {"serves": OURS}))) as client:
        assert await search(client) == ["Lima"]
        assert client.serves == OURS
        with pytest.raises(ContractMismatch, match=OTHER):
            await search(client)


async def test_a_retriever_behind_a_proxy_that_passes_on_searches_alone_is_known_by_its_first_answer():
    """It ended every worker: without /health nothing was known, and the first answer served something. Then a failed
    search did, after which /health was to report it, too."""
    answers = finds("Lima", serves=OURS), says("", status=503), finds("Lima", serves=OURS)
    async with client_of(Service(*answers, finds("Tokyo", serves=THEIRS)), outage_s=5.0) as client:
        assert [await search(client) for _ in range(2)] == [["Lima"]] * 2
        assert client.serves == OURS
        with pytest.raises(ContractMismatch, match=OTHER):
            await search(client)


@pytest.mark.parametrize(("first", "before"), [(OURS, "it served bm25 over 2"), (None, "it did not report what")])
async def test_another_retriever_after_an_outage_ends_the_client(first, before):
    health = [HEALTH | ({"serves": serves} if serves else {}) for serves in (first, THEIRS)]
    answers = finds("Lima"), says("", status=500), finds("Tokyo")
    async with client_of(Service(*answers), Service(*map(says, health)), outage_s=5.0) as client:
        assert await search(client) == ["Lima"]
        with pytest.raises(ContractMismatch, match=f"serves bm25 over 9 .* now, and before {before}"):
            await search(client)


async def test_a_gateway_without_a_backend_is_waited_for_and_is_no_other_retriever():
    """It answers 404, or a page, for a while: before and after the first search."""
    gateway, backend = says("default backend", status=404), says(HEALTH | {"serves": OURS})
    answers = says("", status=404), finds("Lima"), says("", status=404), says("", status=404), finds("Lima")
    health = gateway, backend, gateway, gateway, backend
    async with client_of(Service(*answers), Service(*health), outage_s=5.0) as client:
        assert [await search(client) for _ in range(2)] == [["Lima"]] * 2
        assert client.serves == OURS


async def test_a_gateway_that_drops_the_header_is_fine():
    async with client_of(Service(finds("Lima")), Service(says(HEALTH | {"serves": OURS}))) as client:
        assert await search(client) == ["Lima"]
