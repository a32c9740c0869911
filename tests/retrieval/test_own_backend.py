"""A search backend of one's own behind the server, with the articles of docs/examples."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from cusearch_async.config import EpisodeConfig, RetrieverConfig, load_config
from cusearch_async.errors import ConfigError
from cusearch_async.lifecycle.children import CLI, start_child
from cusearch_async.processes.retriever import make_backend
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.server import Retriever
from tests.conftest import SLOW, free_port, wait_until
from tests.retrieval.retrievers import QUESTION

ARTICLES = "docs.examples.articles:Articles"


@pytest.fixture
def config_of(tmp_path):
    def make(backend, options="{}"):
        path = tmp_path / "run.toml"
        text = f'[run]\nname = "r"\n[retriever]\nbackend = "{backend}"\noptions = {options}\n'
        path.write_text(text, encoding="utf-8")
        return load_config(path)

    return make


async def test_a_backend_of_ones_own_answers_searches_and_says_what_it_is(config_of, tmp_path):
    (tmp_path / "articles.json").write_text(json.dumps({"Peru": "Its capital is Lima.", "Chile": "Long."}))
    backend = make_backend(config_of(ARTICLES, f'{{ path = "{tmp_path}/articles.json" }}'))
    async with TestServer(Retriever(backend, 3).application()) as server:
        settings = RetrieverConfig(url=f"http://127.0.0.1:{server.port}")
        async with SearchClient.session(settings) as session:
            client = SearchClient(session, settings, EpisodeConfig(), 4)
            assert await client.search("the capital of Peru", 0, QUESTION, 0) == ['"Peru"\nIts capital is Lima.']
            assert await client.search("nothing", 0, QUESTION, 0) == []
            async with session.get(f"{settings.url}/health") as answer:
                said = await answer.json()
    assert (said["deterministic"], said["articles"], said["queries"]) == (True, 2, 2)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        (ARTICLES, "{}", r"retriever.options \{\} do not fit .*Articles: .*'path'"),
        (ARTICLES, "{ folder = 'x' }", r"do not fit .*unexpected keyword argument 'folder'"),
        ("docs.examples.articles:Nothing", "{}", "has no 'Nothing'"),
        ("no_such_module:Thing", "{}", "module 'no_such_module' of .* cannot be imported"),
        (
            "collections:Counter",
            "{}",
            "is not a .*Backend, it has no deterministic, accepts_seed, search, figures, close",
        ),
    ],
)
def test_what_is_no_backend_is_refused_by_name(config_of, backend, options, message):
    with pytest.raises(ConfigError, match=message):
        make_backend(config_of(backend, options))


class SlowToLoad:
    """As one that indexes a large corpus in memory."""

    def __init__(self, began: str) -> None:
        Path(began).touch()
        time.sleep(100)


@pytest.mark.system
def test_a_retriever_that_loads_ends_at_a_signal(tmp_path):
    """It ended when its corpus was loaded."""
    began, url = tmp_path / "began", f"http://127.0.0.1:{free_port()}"
    own = ["--retriever.backend", f"{__name__}:SlowToLoad", "--retriever.options", f"{{began = '{began}'}}"]
    command = [*CLI, "worker", "retriever", "atlas", *own, "--retriever.url", url]
    process = start_child(command, {"PYTHONPATH": str(Path(__file__).parents[2])}, tmp_path / "log")
    try:
        wait_until(began.exists, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(10 * SLOW) == 130
    finally:
        process.kill()
    assert "stopped while the corpus and its index were being loaded" in (tmp_path / "log").read_text()
