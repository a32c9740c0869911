"""Search of the live web: Google's results by way of serper.dev or SerpApi.

Sources: serper.dev's playground (POST /search), serpapi.com/search-api (GET /search.json) and its
api-status-and-error-codes. The key appears in no message, log line or file; SerpApi wants it in the URL, which is why
no URL with its query is ever shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from cusearch_async.concurrency import InFlight, doubling_pause_s
from cusearch_async.config import WebConfig, is_loopback, secret
from cusearch_async.errors import ConfigError, SearchFailed
from cusearch_async.files import entries, remove, write_file
from cusearch_async.retrieval.backend import Passage, Query, Scored
from cusearch_async.retrieval.pace import retry_after_s
from cusearch_async.retrieval.protocol import read_answer

log = logging.getLogger(__name__)

MAX_QUERY_BYTES = 2048
"""Of UTF-8 that are sent of a query: Google reads no more, and a longer URL would be refused."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_OF_THE_QUERY = (413, 414, 422)
"""Statuses that say that a query cannot be asked. Others, also 400, may be of the account: no credits."""
_SHOWN = 200
"""Characters of an answer that an error message repeats."""
_NOTHING_FOUND = "Google hasn't returned any results for this query."


class _Service(NamedTuple):
    url: str
    key_variable: str
    """Environment variable that holds the key."""
    results: str
    answer_box: str
    """Names of these in an answer."""


_SERVICES = {
    "serper": _Service("https://google.serper.dev/search", "SERPER_API_KEY", "organic", "answerBox"),
    "serpapi": _Service("https://serpapi.com/search.json", "SERPAPI_API_KEY", "organic_results", "answer_box"),
}


class _Failure(NamedTuple):
    """Why an attempt has failed. A value: an exception would carry aiohttp's own, and with it the URL and the key."""

    reason: str
    status: int = 502
    is_final: bool = False
    retry_after_s: float = 0.0


@dataclass(slots=True)
class _Request:
    """Of a client, with any number of queries."""

    waiting: int = 0
    """How many of them wait for their turn."""


def web_search(engine: str, settings: WebConfig, longest_wait_s: float = math.inf) -> WebSearch:
    """`engine` is serper or serpapi; `longest_wait_s` as in `WebSearch`.

    Raises: ConfigError when the key is not in the environment or cannot be one, or the cache cannot be made."""
    variable = key_variable(engine)
    key = secret(variable)
    if not key:
        raise ConfigError(f"retriever.backend {engine!r} needs a key: set the environment variable {variable}")
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"{variable} must be one word of ASCII characters")
    return WebSearch(engine, settings, key, longest_wait_s)


def key_variable(engine: str) -> str:
    """The environment variable that holds the service's key."""
    return _SERVICES[engine].key_variable


def parse_answer(engine: str, answer: Any, topk: int) -> list[Passage]:
    """The answer box, then the results; at most `topk`, without those that have no text.

    A document's `id` is its link ("" without one). Raises: ValueError for anything but an answer to a search."""
    if not isinstance(answer, dict):
        raise ValueError(f"it answers a JSON {type(answer).__name__}, not an object")
    service = _SERVICES[engine]
    box, rows = answer.get(service.answer_box), answer.get(service.results)
    match answer:
        case {"error": str(complaint)} if complaint.strip() == _NOTHING_FOUND:
            rows = rows or []
        case {"error": complaint}:
            raise ValueError(f"it complains: {complaint}")
        case {"search_metadata": {"status": "Success"}} if rows is None:  # SerpApi: a page without web results
            rows = []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"it answers without a list of {service.results!r}; there is {', '.join(answer) or 'nothing'}")
    passages = []
    if isinstance(box, dict) and (text := _first_text(box, "answer", "snippet", "result")):
        passages.append(_passage(box, text))
    passages += [_passage(row, _first_text(row, "snippet")) for row in rows]
    return [passage for passage in passages if passage["contents"]][:topk]


def pause_s(failed: int, retry_after_s: float) -> float:
    """The wait after `failed` failures in a row: anything up to a bound that doubles with each (full jitter), and no
    less than the service has asked for; 30 s at most."""
    jitter = random.uniform(0.0, doubling_pause_s(failed, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    return max(jitter, min(retry_after_s, _LONGEST_PAUSE_S))


class WebSearch:
    """A `Backend` over a web service: never faster than `per_second`, with retries.

    Raises SearchFailed with status 502, or 504 when the service took too long, 403 when it refuses the key or the
    budget is spent, or 429 when it limits our rate, or so many searches wait that another would wait too long. What
    fails for good (a wrong key, a wrong request) is asked once."""

    def __init__(self, engine: str, settings: WebConfig, key: str, longest_wait_s: float = math.inf) -> None:
        """`longest_wait_s`: for its turn, or for what the service asks to wait; who waits longer gives up, and asks
        again behind all others.

        Raises: ConfigError when the folder of the cache cannot be made."""
        self._engine, self._settings, self._key = engine, settings, key
        self._key_in_text = re.compile("".join(f"(?:{re.escape(c)}|%{ord(c):02X})" for c in key), re.IGNORECASE)
        """As it is, or as a URL writes it."""
        self._url = settings.url or _SERVICES[engine].url
        self._place = f"{engine} at {self._url}"
        self._cache = _Cache(settings.cache, settings.cache_ttl_s) if settings.cache else None
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: InFlight[tuple[str, int], list[Passage]] = InFlight()
        self._one_by_one = asyncio.Lock()
        self._next_start_s = 0.0
        self._longest_wait_s = longest_wait_s
        self._waiting, self._most_waiting = 0, longest_wait_s * settings.per_second
        self._requests = self._cache_hits = self._failures = self._retries = 0

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        """A document's score is 1 / its rank. The first query that fails ends the others of the request."""
        own = _Request()
        try:
            async with asyncio.TaskGroup() as group:
                searches = [group.create_task(self._search(query.text, topk, own)) for query in queries]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [search.result() for search in searches]

    @property
    def deterministic(self) -> bool:
        """The web changes."""
        return False

    @property
    def accepts_seed(self) -> bool:
        return False

    def figures(self) -> dict[str, str | int | float]:
        """Totals: requests sent, searches answered from the cache, searches that failed, requests that were repeated;
        and the requests left, if they have a cap."""
        asked = {"requests": self._requests, "cache_hits": self._cache_hits}
        cap = self._settings.max_requests
        left = {} if cap is None else {"budget_left": cap - self._requests}
        return {**asked, "failures": self._failures, "retries": self._retries, **left}

    async def close(self) -> None:
        await self._in_flight.close()
        if self._session is not None:
            await self._session.close()

    async def _search(self, text: str, topk: int, own: _Request) -> list[Scored]:
        query = text.strip().encode("utf-8", "ignore")[:MAX_QUERY_BYTES].decode("utf-8", "ignore").strip()
        cache, passages = self._cache, list[Passage]()
        if query and cache is None:
            passages = await self._ask(query, topk, own)
        elif query and cache is not None:
            passages = await self._in_flight.share((query, topk), lambda: self._look_up(query, topk, own, cache))
        return [(passage, 1 / rank) for rank, passage in enumerate(passages, start=1)]

    async def _look_up(self, query: str, topk: int, own: _Request, cache: _Cache) -> list[Passage]:
        known = await asyncio.to_thread(cache.read, self._place, query, topk)
        if known is not None:
            self._cache_hits += 1
            return known
        passages = await self._ask(query, topk, own)
        await asyncio.to_thread(cache.write, self._place, query, topk, passages)
        return passages

    async def _ask(self, query: str, topk: int, own: _Request) -> list[Passage]:
        others = self._waiting - own.waiting
        if others > self._most_waiting:  # outside of `try`, as nothing has failed: the client makes a pause
            raise SearchFailed(f"{others} searches wait for retriever.web.per_second", status=429)
        failed = 0
        try:
            while True:
                await self._wait_for_rate(own)
                outcome = await self._attempt(query, topk)
                if not isinstance(outcome, _Failure):
                    return outcome
                failed += 1
                is_too_late = outcome.retry_after_s > self._longest_wait_s  # the client makes the pause
                if outcome.is_final or failed == self._settings.attempts or is_too_late:
                    where = f"{self._place} fails for {query!r:.100}, attempt {failed}"
                    reason = self._hide(f"{where}: {outcome.reason}")
                    raise SearchFailed(reason, outcome.status, outcome.retry_after_s)
                await asyncio.sleep(pause_s(failed, outcome.retry_after_s))
                self._retries += 1
        except SearchFailed as error:
            self._failures += 1
            log.warning("%s", error)  # the client gets only the status, so the reason is logged here
            raise

    async def _wait_for_rate(self, own: _Request) -> None:
        """Wait until a request may start, and count it. Raises: SearchFailed when the budget is spent."""
        self._waiting += 1
        own.waiting += 1
        try:
            async with self._one_by_one:
                cap = self._settings.max_requests
                if cap is not None and self._requests >= cap:
                    spent = f"the {cap} requests that this process may send to {self._engine} are spent"
                    raise SearchFailed(f"{spent}; raise retriever.web.max_requests and start it again", status=403)
                await asyncio.sleep(self._next_start_s - time.monotonic())
                self._next_start_s = time.monotonic() + 1 / self._settings.per_second
                self._requests += 1
        finally:
            self._waiting -= 1
            own.waiting -= 1

    async def _attempt(self, query: str, topk: int) -> list[Passage] | _Failure:
        """One request."""
        try:
            async with self._send(query, topk) as response:
                body = await read_answer(response)
        except TimeoutError:
            return _Failure(f"no answer within retriever.web.timeout_s ({self._settings.timeout_s:g} s)", status=504)
        except aiohttp.ClientError as error:
            text = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)  # which has the URL
            return _Failure(f"{type(error).__name__}: {self._short(text)}")
        shown = self._short(body.decode("utf-8", "replace"))
        if response.status != 200:
            return self._refusal(response, shown)
        try:
            return parse_answer(self._engine, json.loads(body), topk)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            return _Failure(f"its answer is not JSON: {shown}")
        except ValueError as error:
            return _Failure(self._short(str(error)))

    def _send(self, query: str, topk: int) -> Any:
        """A request, to be entered. It follows no redirection, which could take the key elsewhere."""
        if self._session is None:  # here, as a session belongs to the loop that runs
            connector = aiohttp.TCPConnector(limit=0)  # per_second is the limit
            timeout = aiohttp.ClientTimeout(self._settings.timeout_s)
            is_away = not is_loopback(self._url)  # no proxy of the environment reaches this machine
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, middlewares=(_send_once,), trust_env=is_away
            )
        if self._engine == "serper":
            headers, content = {"X-API-KEY": self._key}, {"q": query, "num": topk}
            return self._session.post(self._url, headers=headers, json=content, allow_redirects=False)
        params = {"engine": "google", "q": query, "num": str(topk), "api_key": self._key}
        return self._session.get(self._url, params=params, allow_redirects=False)

    def _refusal(self, response: aiohttp.ClientResponse, shown: str) -> _Failure:
        status, reason = response.status, f"it answers {response.status}: {shown}"
        if status in (401, 403):
            remedy = f"it refuses the key; set {key_variable(self._engine)} to a valid key"
            return _Failure(f"{reason}; {remedy}", status=403, is_final=True)
        if status != 429 and status < 500:
            return _Failure(reason, status=422 if status in _OF_THE_QUERY else 502, is_final=True)
        wait_s = retry_after_s(response.headers) or 0.0
        return _Failure(reason, 429 if status == 429 else 502, retry_after_s=wait_s)

    def _short(self, text: str) -> str:
        """The text on one line. The key is removed before it is cut, so that no part of it is shown."""
        return " ".join(self._hide(text).split())[:_SHOWN]

    def _hide(self, text: str) -> str:
        return self._key_in_text.sub("***", text)


class _Entry(msgspec.Struct):
    place: str
    query: str
    topk: int
    written: float
    """Seconds since 1970."""
    documents: list[Passage]


_ENTRY = re.compile(r"[0-9a-f]{64}\.json")


class _Cache:
    """Answers in a folder, which several processes may share: files are only ever replaced whole.

    It makes searches cheaper and no safer: a file that cannot be read or written costs a request and a warning."""

    def __init__(self, folder: Path, ttl_s: float) -> None:
        self._folder, self._ttl_s = folder, ttl_s
        self._next_look_s = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"retriever.web.cache {folder} cannot be created: {error}") from error

    def read(self, place: str, query: str, topk: int) -> list[Passage] | None:
        """The cached documents; None when there is no entry, or it is too old, or dated in the future."""
        path = self._path(place, query, topk)
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
            documents = [{"id": row["id"], "contents": row["contents"]} for row in entry.documents]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            log.warning("cached answer %s cannot be read (%s); asking again", path, error)
            return None
        return documents if 0 <= time.time() - entry.written <= self._ttl_s else None

    def write(self, place: str, query: str, topk: int, documents: list[Passage]) -> None:
        entry = _Entry(place, query, topk, time.time(), documents)
        try:
            write_file(self._path(place, query, topk), msgspec.json.encode(entry))
        except OSError as error:
            log.warning("the answer for %.100r is not cached: %s", query, error)
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + self._ttl_s / 4
            self._remove_old()

    def _remove_old(self) -> None:
        """A policy rarely asks the same again: without this the folder would grow for ever."""
        for path, _ in entries(self._folder, _ENTRY):
            with contextlib.suppress(OSError):  # another process has removed it
                if time.time() - path.stat().st_mtime > self._ttl_s:
                    remove(path)

    def _path(self, place: str, query: str, topk: int) -> Path:
        name = hashlib.sha256(json.dumps([place, query, topk]).encode()).hexdigest()
        return self._folder / f"{name}.json"


async def _send_once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """aiohttp repeats a GET whose connection breaks by itself, past our rate and our budget; not so an error of this
    kind."""
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error) or type(error).__name__) from error


def _passage(row: dict[str, Any], text: str) -> Passage:
    """Search-R1's format: the title in quotes, newline, text. A document with only one of them is one line."""
    title = _first_text(row, "title")
    lines = (f'"{title}"' if title else "", text)
    return {"id": _first_text(row, "link"), "contents": "\n".join(line for line in lines if line)}


def _first_text(row: dict[str, Any], *names: str) -> str:
    """The first of these fields that holds text, on one line and without half characters; else ""."""
    texts = (" ".join(row[name].split()) for name in names if isinstance(row.get(name), str))
    return next((whole for text in texts if (whole := text.encode("utf-8", "ignore").decode())), "")
