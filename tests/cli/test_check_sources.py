"""`cusearch check`: the files, services and code that a config names."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from cusearch_async.cli import check
from cusearch_async.cli.preflight.gpus import Device
from cusearch_async.cli.preflight.sources import services
from cusearch_async.config import load_config
from cusearch_async.transport.server import is_listening
from tests.cli.test_check import BASE, PAPER, findings
from tests.conftest import free_port

pytestmark = pytest.mark.system  # it builds models of transformers, which takes long


@pytest.fixture
def web():
    """PORT of a web server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_files_are_looked_for(tmp_path):
    corpus, data = tmp_path / "corpus.jsonl", tmp_path / "train.parquet"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    (tmp_path / "manifest.json").touch()
    path = [BASE, PAPER / "search-r1.toml"]
    overrides = ("--data.source", str(data), "--retriever.corpus", str(corpus), "--retriever.index", str(tmp_path))
    found = findings(*overrides, path=path)
    assert (found["data.source"].status, found["data.source"].text) == ("not reachable", f"{data} does not exist")
    assert found["retriever.corpus"].status == "ok"
    assert found["retriever.index"].status == "ok"


def test_every_source_is_looked_for(tmp_path):
    here = tmp_path / "here.jsonl"
    here.write_text('{"question": "who", "golden_answers": ["me"]}\n')
    sources = f'["{here}", "{tmp_path}/gone.jsonl", "hf:nobody/has-this/train.parquet"]'
    config = load_config(BASE, ["--data.source", sources])
    found = [
        finding
        for finding in check.check(config, None, Device(80.0, "as the test says"))
        if finding.what == "data.source"
    ]
    assert [finding.status for finding in found] == ["ok", "not reachable", "not reachable"]
    assert "gone.jsonl does not exist" in found[1].text
    assert "hf:nobody/has-this/train.parquet is not on this machine" in found[2].text


def test_sources_are_read_together(tmp_path):
    """Each was fine, and the learner, after all else had started, refused them."""
    for name in ("one", "other"):
        row = {"question": f"{name}?", "golden_answers": ["me"], "data_source": "mine", "id": 7}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = json.dumps([str(tmp_path / "one.jsonl"), str(tmp_path / "other.jsonl")])
    for key in ("data.source", "eval.suite"):
        found = findings(f"--{key}", sources)[key]
        assert found.status == "error"
        assert "two questions have the id 'mine/7'" in found.text


def test_questions_that_an_environment_brings_are_read_too(tmp_path, monkeypatch):
    (tmp_path / "brings.py").write_text(
        "from cusearch_async.environments.search import SearchEnvironment\n"
        "from cusearch_async.types import Question\n"
        "class Twice(SearchEnvironment):\n"
        "    @classmethod\n"
        "    def questions(cls):\n"
        "        return [Question(id='x', text='?', answers=('a',), category='c')] * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = findings("--environment.search.name", "brings:Twice")["environment.search"]
    assert found.status == "error"
    assert "two questions have the id 'x'" in found.text


@pytest.mark.parametrize("source", ["hf:/name/train.parquet", "hf:owner/name", "hf:"])
def test_a_dataset_on_the_hub_that_is_half_named_is_an_error(source):
    found = findings("--data.source", source)["data.source"]
    assert (found.status, "hf:OWNER/NAME/FILE" in found.text) == ("error", True)


def test_the_embedded_world_needs_no_files(atlas_config):
    found = findings(path=atlas_config)
    assert found["data.source"].status == found["retriever.corpus"].status == "ok"
    assert "retriever.index" not in found


@pytest.mark.parametrize(("every", "status"), [("0", "warning"), ("5", "error")])
def test_held_out_questions_that_nobody_has_named_are_said(tmp_path, every, status):
    """An evaluator would end at its start, and `cusearch eval` too."""
    own = ("--data.source", str(tmp_path / "mine.jsonl"), "--eval.every", every, "--eval.suite", "[]")
    assert findings(*own, "--eval.suite", "hf:a/b/c.jsonl")["eval.suite"].status == "not reachable"
    found = findings(*own)["eval.suite"]
    assert (found.status, "names no held-out questions" in found.text) == (status, True)


def test_a_retriever_that_would_search_an_embedded_world_for_other_questions_is_said(tmp_path, atlas_config):
    """`init --passages URL` leaves the corpus as shipped: with that server down, launch starts ours on the atlas."""
    data = tmp_path / "mine.jsonl"
    data.write_text('{"question": "who", "golden_answers": ["me"]}\n')
    mine = ("--data.source", str(data), "--retriever.url", f"http://127.0.0.1:{free_port()}")
    found = findings(*mine, path=atlas_config)["retriever.corpus"]
    assert (found.status, "the questions are others" in found.text) == ("warning", True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"http://127.0.0.1:{server.getsockname()[1]}"
        for url in (there, "http://192.0.2.1:9"):
            found = findings(*mine[:2], "--retriever.url", url, path=atlas_config)
            assert not found.keys() & {"retriever.corpus", "retriever.index"}, "what a server of yours searches"


def test_a_simulated_engine_needs_no_corpus():
    assert "retriever.corpus" not in findings()


def test_services_that_listen_are_told_from_those_that_do_not(redis_url, web):
    dead = f"http://127.0.0.1:{free_port()}"
    overrides = ("--redis.url", redis_url, "--retriever.url", dead)
    found = findings(*overrides, "--retriever.zerosearch.url", f"http://127.0.0.1:{web}/v1")
    assert found["redis.url"].status == "ok"
    assert found["retriever.url"].status == "not reachable"
    assert found["retriever.url"].text.startswith(f"nothing listens at {dead}: ")
    assert found["retriever.zerosearch.url"].status == "ok"


class Retriever(BaseHTTPRequestHandler):
    """Answers a search as its path says."""

    def do_POST(self) -> None:
        kind = self.path.split("/")[1]
        body = {
            "list": b"[]",
            "found": FOUND,
            "nothing": b'{"result": [[]]}',
            "other": b'{"result": [[{"text": "x"}]]}',
        }
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(int(kind) if kind.isdigit() else 200)
        self.end_headers()
        self.wfile.write(body.get(kind, b"no"))

    def log_message(self, *_: object) -> None:
        pass


FOUND = b'{"result": [[{"document": {"contents": "Paris lies on the Seine."}, "score": 1.0}]]}'
NOTHING, OTHER = b'{"result": [[]]}', b'{"result": [[{"text": "x"}]]}'


@pytest.fixture(scope="module")
def retriever():
    with ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("found", "ok", "finds documents, 1 of at most 5"),
        ("nothing", "warning", "finds nothing: does it serve the corpus"),
        ("other", "error", "does not speak Search-R1's protocol"),
        ("list", "error", "has given no valid answer for 2 s"),
        ("404", "error", "it answers 404"),
        ("422", "error", "refuses the search for"),
        ("401", "error", "is answered with 401, and no key is sent: write a class for retriever.backend"),
        ("503", "not reachable", "it answers 503"),
    ],
)
def test_a_retriever_is_searched(retriever, kind, status, said):
    """Any web server was called a good one."""
    config = load_config(BASE, ["--retriever.backend", "bm25", "--retriever.url", f"{retriever}/{kind}"])
    (found,) = (finding for finding in services(config) if finding.what == "retriever.url")
    assert (found.status, said in found.text) == (status, True), found.text


def test_what_is_searched_is_a_question_of_an_environment_that_searches(retriever, tmp_path):
    """It was that of the first environment: what this one asks, no search engine has to answer."""
    agent, sums = tmp_path / "agent.toml", tmp_path / "sums.jsonl"
    sums.write_text('{"question": "12 - 5", "golden_answers": ["7"]}\n')
    program = f'name = "agent"\nagent = "x:y"\nsource = "{sums}"\nsearches = false\n'
    agent.write_text(f'[environment.search]\n{program}[environment.other]\nname = "search"\nsource = "atlas"\n')
    config = load_config([BASE, agent], ["--retriever.backend", "bm25", "--retriever.url", f"{retriever}/found"])
    (found,) = (finding for finding in services(config) if finding.what == "retriever.url")
    assert "12 - 5" not in found.text, found.text
    assert "What" in found.text


def test_one_sentinel_that_listens_is_enough(redis_url):
    dead, port = free_port(), urlsplit(redis_url).port
    url = f"redis+sentinel://user@127.0.0.1:{dead},127.0.0.1:{port}/main/0"
    assert findings("--redis.url", url)["redis.url"].status == "ok"
    assert is_listening(url), "launch asks for it, too; before, it ended with a traceback"
    url = f"redis+sentinel://127.0.0.1:{dead}/main"
    assert findings("--redis.url", url)["redis.url"].status == "not reachable"
    assert not is_listening(url)


@pytest.mark.parametrize(("backend", "key"), [("serper", "SERPER_API_KEY"), ("serpapi", "SERPAPI_API_KEY")])
def test_a_missing_key_is_reported_and_never_shown(backend, key, monkeypatch):
    monkeypatch.delenv(key, raising=False)
    found = findings("--retriever.backend", backend)[f"{backend} key"]
    assert (found.status, f"{key} is not set" in found.text) == ("warning", True)
    monkeypatch.setenv(key, "secret-value")
    found = findings("--retriever.backend", backend)[f"{backend} key"]
    assert (found.status, "secret-value" in found.text) == ("ok", False)


# What it calls ok has been opened.


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.parquet", "PAR1 and then nothing", "cannot read"),
        (
            "train.jsonl",
            '{"question": "%s", "golden_answers": ["me"]}\n' % ("who " * 2000),
            "longer than episode.max_pr",
        ),
    ],
)
def test_questions_that_cannot_be_used_are_an_error(tmp_path, atlas_config, name, content, said):
    source = tmp_path / name
    source.write_text(content)
    found = findings("--data.source", str(source), path=atlas_config)["data.source"]
    assert (found.status, said in found.text) == ("error", True), found


def test_questions_without_gold_answers_are_fine_where_a_reward_scores_them(tmp_path, atlas_config):
    source = tmp_path / "mine.jsonl"
    source.write_text('{"question": "Write of Pinsk."}\n')
    own = ("--data.source", str(source), "--environment.search.reward", "docs.examples.rewards:brief")
    assert findings(*own, path=atlas_config)["data.source"].status == "ok"
    assert findings(*own[:2], path=atlas_config)["data.source"].status == "error"


@pytest.fixture
def one_question(tmp_path) -> str:
    """Reads faster than those of the atlas."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"id": 1, "question": "who?", "golden_answers": ["she"]}\n')
    return str(path)


@pytest.mark.parametrize(("content", "said"), [("", "is empty"), ('{"id": 1}\n', "line 1: 'contents' must be")])
def test_a_corpus_that_cannot_be_used_is_an_error(tmp_path, atlas_config, one_question, content, said):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(content)
    overrides = ("--retriever.corpus", str(corpus), "--data.source", one_question)
    found = findings(*overrides, path=atlas_config)["retriever.corpus"]
    assert (found.status, said in found.text) == ("error", True), found


def test_a_folder_that_is_no_index_is_an_error(tmp_path, atlas_config, one_question):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    overrides = ("--retriever.corpus", str(corpus), "--retriever.index", str(tmp_path), "--data.source", one_question)
    found = findings(*overrides, path=atlas_config)["retriever.index"]
    assert (found.status, "cusearch index" in found.text) == ("error", True)


# The user's code.


@pytest.mark.parametrize(
    ("key", "value", "status", "text"),
    [
        ("loss.objective", "docs.examples.objectives:cispo", "ok", "can be imported"),
        ("loss.objective", "clp", "error", "'clp' is unknown; use one of clip"),
        ("redis.transport", "docs.examples.one_process:open_buffer", "ok", "can be imported"),
        ("redis.transport", "nats", "error", "'nats' is unknown; use one of redis"),
        ("retriever.backend", "docs.examples.articles:Articles", "ok", "can be imported"),
        ("retriever.backend", "no_such:Thing", "error", "module 'no_such' of 'no_such:Thing' cannot be imported"),
    ],
)
def test_the_users_code_is_looked_for(key, value, status, text):
    found = findings(f"--{key}", value)[key]
    assert found.status == status
    assert text in found.text
