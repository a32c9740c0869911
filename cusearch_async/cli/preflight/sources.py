"""Checks of the files and services that a run needs."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import try_to_load_from_cache

from cusearch_async.atlas.questions import WORLDS
from cusearch_async.cli.preflight.finding import Finding, tried
from cusearch_async.config import BACKENDS, EMBEDDED, Config, RetrieverConfig, is_loopback, secret
from cusearch_async.data.files import HUB, hub_place
from cusearch_async.data.questions import (
    asks_of_atlas,
    file_of,
    first_question,
    has_held_out,
    labelled,
    load_eval_questions,
    load_questions,
    load_run_questions,
    needs_answers,
    searches_another_world,
    source_key,
)
from cusearch_async.environments import NoSearch
from cusearch_async.errors import ConfigError, CusearchError
from cusearch_async.extensions import load_function
from cusearch_async.metrics.trackers import tracker_class
from cusearch_async.retrieval.client import SearchClient
from cusearch_async.retrieval.corpus import read_start
from cusearch_async.retrieval.manifest import MANIFEST
from cusearch_async.retrieval.websearch import key_variable
from cusearch_async.rollout.prompting import check_lengths
from cusearch_async.transport.buffer import TRANSPORTS
from cusearch_async.transport.server import is_listening, places_of
from cusearch_async.types import Question

PASSAGES = 10_000
"""Passages of a corpus that are read."""
ANSWER_S = 2.0
"""Longest wait for an answer of a service."""
SEARCH_S = 10.0
"""Longest wait for an answer to a search."""


def files(config: Config, tokenizer: Any) -> Iterator[Finding]:
    """Files on this machine are opened and read. Files on the Hub are only looked up in the local cache."""
    found = [*_sources(config, tokenizer)]
    yield from found
    if not len(found) == len(config.environment) == 1:  # which was read wholly
        key = found[0].what if found else f"environment.{next(iter(config.environment))}"
        yield from _together(key, found, partial(load_run_questions, config))
    found = [*_suite(config, tokenizer)]
    yield from found
    if found:
        yield from _together("eval.suite", found, partial(load_eval_questions, config))
    if not has_held_out(config):
        needed_by = f"the evaluator of eval.every = {config.eval.every}" if config.eval.every else "`cusearch eval`"
        text = f"names no held-out questions, which {needed_by} needs: set benchmarks or question files"
        yield Finding("error" if config.eval.every else "warning", "eval.suite", text)
    retriever = config.retriever
    if not is_loopback(retriever.url) or is_listening(retriever.url):
        return  # what it searches is not ours
    if searches_another_world(config):
        text = f"{retriever.corpus}, embedded, but the questions are others: start your server, or name your passages"
        yield Finding("warning", "retriever.corpus", text)
    elif config.searching and retriever.has_corpus:
        yield _corpus(retriever)
        if retriever.index is not None:
            yield _index(retriever, retriever.index)


def _sources(config: Config, tokenizer: Any) -> Iterator[Finding]:
    for label in config.environment:
        for source in config.sources_of(label):
            yield _questions(source_key(config, label), source, label, config, tokenizer)


def _suite(config: Config, tokenizer: Any) -> Iterator[Finding]:
    for source in config.eval.suite:
        yield _questions("eval.suite", file_of(source, config.eval.folder), config.evaluated_in, config, tokenizer)


def _together(key: str, found: Sequence[Finding], load: Callable[[], object]) -> Iterator[Finding]:
    """What no source shows on its own, such as two questions of one id."""
    try:
        if all(finding.status == "ok" for finding in found):
            load()
    except ConfigError as error:
        yield Finding("error", key, str(error))


def _questions(key: str, source: str, environment: str, config: Config, tokenizer: Any) -> Finding:
    """Read the questions, and measure them with the policy's tokenizer if there is one."""
    if source.startswith(HUB):
        found = _hub_file(key, source)
        if found.status != "ok":
            return found
    elif source not in WORLDS and not Path(source).exists():
        return Finding("not reachable", key, f"{source} does not exist")
    try:
        read = load_questions([source], needs_answers=needs_answers(config, environment, key == "eval.suite"))
        questions = labelled(read, environment)
        if tokenizer is not None:
            environments = config.environments(NoSearch())
            check_lengths(questions, environments, tokenizer, config.episode, config.model.template_arguments)
    except ConfigError as error:
        return Finding("error", key, str(error))
    return Finding("ok", key, f"{len(questions)} questions in {source}")


def _corpus(retriever: RetrieverConfig) -> Finding:
    key, name = "retriever.corpus", retriever.corpus
    if name in EMBEDDED:
        return Finding("ok", key, f"{name}, embedded")
    if not Path(name).exists():
        return Finding("not reachable", key, f"{name} does not exist")
    read = partial(read_start, Path(name), PASSAGES)
    return tried(key, read, f"{name}; at most the first {PASSAGES} passages were read")


def _index(retriever: RetrieverConfig, folder: Path) -> Finding:
    key, build = "retriever.index", "build it with `cusearch index CONFIG`"
    if not folder.exists():
        return Finding("not reachable", key, f"{folder} does not exist; {build}")
    if not (folder / MANIFEST).is_file():
        return Finding("error", key, f"{folder} holds no finished index; {build}")
    return Finding("ok", key, f"{folder} holds an index; the retriever checks at its start that it fits the corpus")


def _hub_file(key: str, name: str) -> Finding:
    try:
        repository, file = hub_place(name, key)
        cached = try_to_load_from_cache(repository, file, repo_type="dataset")
    except (ConfigError, ValueError) as error:
        return Finding("error", key, str(error))
    if isinstance(cached, str):
        return Finding("ok", key, f"{name} is in the local cache")
    return Finding("not reachable", key, f"{name} is not on this machine; it will be downloaded at the start")


def own_code(config: Config) -> Iterator[Finding]:
    """The code that is not imported when the config is read."""
    for key, name, built_in in (
        ("loss.objective", config.loss.objective, ("clip",)),
        ("redis.transport", config.redis.transport, TRANSPORTS),
        ("weights.transport", config.weights.transport, ("folder", "http", "object")),
        ("retriever.backend", config.retriever.backend, BACKENDS),
    ):
        if name not in built_in:
            yield tried(key, partial(load_function, key, name, built_in), f"{name} can be imported")
    for name in config.run.trackers:
        yield tried("run.trackers", partial(tracker_class, name), f"{name} can be imported")


def services(config: Config) -> Iterator[Finding]:
    """Nothing at an address is no error: the run may be on another machine, and `launch` starts what is on loopback."""
    if config.redis.transport == "redis":
        yield _service("redis.url", config.redis.url, "Redis", is_redis, "`cusearch redis CONFIG`")
    retriever, simulator = config.retriever, config.retriever.zerosearch.url
    if config.searching:
        start, ours = "`cusearch worker retriever CONFIG`", not searches_another_world(config)
        found = _service("retriever.url", retriever.url, "a web server", speaks_http, start, ours)
        yield _searched(config) if found.status == "ok" else found
    if config.searching and retriever.backend == "zerosearch":
        key, own = "retriever.zerosearch.url", asks_of_atlas(config)
        start = "`cusearch atlas simulate CONFIG`" if own else f"`vllm serve MODEL --port {urlsplit(simulator).port}`"
        yield _service(key, simulator, "a web server", speaks_http, start, own)
    if config.searching and retriever.searches_web:
        key = key_variable(retriever.backend)
        is_set = secret(key) is not None
        text = f"{key} is {'set' if is_set else 'not set'} here; the retriever process needs it"
        yield Finding("ok" if is_set else "warning", f"{retriever.backend} key", text)
    if url := config.weights.url:
        taken = f"something listens at {url}: this run's learner, or choose another port"
        free = f"nothing listens at {url} yet, the learner will"
        yield Finding("warning", "weights.url", taken) if is_listening(url) else Finding("ok", "weights.url", free)


def _service(
    key: str, url: str, kind: str, is_right: Callable[[str], bool], start: str, by_launch: bool = True
) -> Finding:
    """`start`: the command that starts it; `by_launch`: `launch` does, too, on loopback."""
    listening = [place for place in places_of(url) if is_listening(place)]
    if not listening:
        if not is_loopback(url):
            return Finding(
                "not reachable", key, f"nothing listens at {url}: start one there; ours are on loopback only"
            )
        also = " (so does `cusearch launch`)" if by_launch else ""
        return Finding("not reachable", key, f"nothing listens at {url}: {start} starts it{also}")
    if any(map(is_right, listening)):
        return Finding("ok", key, f"{kind} answers at {url}")
    return Finding("error", key, f"something other than {kind} listens at {url}: --{key} with a free port")


def _searched(config: Config) -> Finding:
    """Of a search with the workers' client, which knows the protocol."""
    key, question = "retriever.url", _first_question(config)
    timeout_s = min(config.retriever.timeout_s, SEARCH_S)
    settings = config.retriever.model_copy(update={"outage_s": ANSWER_S, "timeout_s": timeout_s})

    async def search() -> list[str]:
        async with SearchClient.open(settings, config.episode, config.questions_per_step) as client:
            return await client.search(question.text, 0, question, 0)

    asked = f"a search for {question.text!r:.80} at {settings.url}"
    try:
        documents = asyncio.run(search())
    except CusearchError as error:
        status = getattr(error.__cause__, "status", 0)
        if status in (401, 403):
            remedy = "write a class for retriever.backend, or put a proxy before it that adds its key"
            return Finding("error", key, f"{asked} is answered with {status}, and no key is sent: {remedy}")
        is_down = status >= 500 or isinstance(error.__cause__, TimeoutError)
        return Finding("not reachable" if is_down else "error", key, str(error))
    if not documents:
        return Finding("warning", key, f"{asked} finds nothing: does it serve the corpus of the questions?")
    return Finding("ok", key, f"{asked} finds documents, {len(documents)} of at most {settings.topk}")


def _first_question(config: Config) -> Question:
    """Of those that are here and are searched for, else one that any corpus may answer."""
    for label in config.searching:
        try:
            return first_question(config, label)
        except ConfigError:
            continue
    return Question(id="1", text="Which river flows through Paris?", answers=("Seine",), category="check")


def is_redis(url: str) -> bool:
    """Whether a Redis answers, also one that wants a password. With TLS it only has to listen."""
    parts = urlsplit(url)
    if parts.scheme == "rediss":
        return True
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=ANSWER_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM", b"-LOADING", b"-DENIED"))
    except OSError:
        return False


def speaks_http(url: str) -> bool:
    """Whether anything answers in HTTP, whatever it answers."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True
