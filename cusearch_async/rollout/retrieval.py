"""The search client of a rollout worker: Search-R1's protocol, over one aiohttp session.

A retriever that fails is not a search that finds nothing: failures are retried until the retriever has been down for
`outage_s`, then raised as RetrievalUnavailable. They never become documents. A search that fails for so long while
others are answered, or that is refused as wrong, is SearchRefused. Nothing that a retriever answers is trusted: its
length, depth, characters and redirects are bounded here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np

from cusearch_async.config import Config, EpisodeConfig, RetrieverConfig
from cusearch_async.errors import RetrievalUnavailable, SearchRefused
from cusearch_async.surrogates import without_surrogates
from cusearch_async.types import Question

log = logging.getLogger(__name__)

SAY_EVERY_S = 5.0
"""How often a retriever that is down is named in the log."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_BREAKS_AFTER = 8
"""Failures in a row, of all episodes together, until only one search at a time is tried."""
_REMEMBERED = 1000
_ERROR_BYTES = 800
"""Of an answer that is an error; it is only quoted."""
_WRONG_REQUEST = (400, 413, 422)
"""Statuses that asking again cannot change. Gateways answer 401, 403 and 404 while what is behind them is down."""
_FAILURES = (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, RecursionError)
_PROBE = Question(id="probe", text="Is anyone there?", answers=("yes",), category="probe")


class SearchClient:
    """Every episode of a worker searches through it. Equal queries that are on their way to a deterministic backend
    are asked once."""

    def __init__(
        self, session: aiohttp.ClientSession, settings: RetrieverConfig, episode: EpisodeConfig, questions_per_step: int
    ) -> None:
        """`questions_per_step` (N) turns a ticket into the learner step that trains on it, for ZeroSearch's noise."""
        self._session = session
        self._settings = settings
        self._episode = episode
        self._questions_per_step = questions_per_step
        self._on_their_way: dict[str, asyncio.Task[list[str]]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._failed_in_a_row = 0
        self._retrying: set[object] = set()
        """Searches whose last attempt failed. Without any nothing is known of the retriever, so it is not down."""
        self._down_since: float | None = None
        self._trouble = ""
        """Why the last attempt failed, and how long that is borne; empty after a search that was answered."""
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.searches = 0
        self.shared = 0
        """Searches that were answered by an equal one on its way."""
        self.failures: Counter[str] = Counter()
        """Attempts that failed: refused, timeout, status, closed, garbage."""

    @staticmethod
    def session(settings: RetrieverConfig) -> aiohttp.ClientSession:
        """The session to give to a client; the caller closes it. Nothing is decompressed, or a small answer could be a
        large one."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections),
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config) -> AsyncIterator[SearchClient]:
        """A client that says in the log while its retriever is down; its searches end with it."""
        async with cls.session(config.retriever) as session:
            client = cls(session, config.retriever, config.episode, config.questions_per_step)
            saying = asyncio.create_task(client._say_while_down())
            try:
                yield client
            finally:
                tasks = [saying, *client._on_their_way.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_until_answering(self, timeout_s: float) -> None:
        """Raises: RetrievalUnavailable when a first search is not answered properly within `timeout_s`; SearchRefused
        when it is refused."""
        await self._insist(self._body("first search", 0, _PROBE, 0), timeout_s)

    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none. `draw` is the search's own random
        number; `question` and `ticket` say whose search it is.

        Raises: RetrievalUnavailable when the retriever answers nobody properly for `outage_s`; SearchRefused when it
        answers others, refuses this search as wrong, or finds too much."""
        query = without_surrogates(query)
        body = self._body(query, draw, question, ticket)
        if not self._settings.is_deterministic:
            return await self._insist(body, self._settings.outage_s)
        asked = self._on_their_way.get(query)
        if asked is None:
            asked = asyncio.create_task(self._insist(body, self._settings.outage_s))
            self._on_their_way[query] = asked
            asked.add_done_callback(lambda _: self._on_their_way.pop(query))
            asked.add_done_callback(_have_seen)
        else:
            self.shared += 1
        return list(await asyncio.shield(asked))  # an episode that is cancelled takes no other's search with it

    @property
    def down_s(self) -> float:
        """How long every attempt has failed; 0 after a search that was answered, or while none is tried again."""
        return time.monotonic() - self._down_since if self._down_since else 0.0

    def status(self) -> dict[str, Any]:
        """Its part of a WorkerStatus: totals, and how long the last thousand searches took, retries included."""
        slow = np.quantile(self._seconds, (0.5, 0.99)) if self._seconds else (0.0, 0.0)
        return {
            "searches": self.searches,
            "searches_shared": self.shared,
            "search_failures": self.failures.total(),
            "search_failures_by_kind": " ".join(f"{kind}:{n}" for kind, n in sorted(self.failures.items())),
            "search_p50_s": round(float(slow[0]), 4),
            "search_p99_s": round(float(slow[1]), 4),
            "retriever_down_s": round(self.down_s, 1),
        }

    def _body(self, query: str, draw: int, question: Question, ticket: int) -> dict[str, Any]:
        body: dict[str, Any] = {"queries": [query], "topk": self._episode.topk, "return_scores": True}
        if self._settings.draws_by_request:
            body["draws"] = [draw]
        if self._settings.backend == "zerosearch":  # no other engine may see the answers
            step = ticket // self._questions_per_step
            body["contexts"] = [{"question": question.text, "answers": list(question.answers), "step": step}]
        return body

    async def _insist(self, body: dict[str, Any], outage_s: float) -> list[str]:
        began, this = time.monotonic(), object()
        try:
            while True:
                try:
                    found = await self._guarded(body)
                except SearchRefused:  # that is an answer
                    self._is_up()
                    raise
                except _FAILURES as error:
                    self._retrying.add(this)
                    self._bear(error, body, began, outage_s)
                    await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
                else:
                    self.searches += 1
                    self._is_up()
                    self._seconds.append(time.monotonic() - began)
                    return found
        finally:
            self._retrying.discard(this)
            if not self._retrying:
                self._is_up()

    def _bear(self, error: Exception, body: dict[str, Any], began: float, outage_s: float) -> None:
        """Take note of a failed attempt. Raises what it means once it has lasted too long."""
        self.failures[_kind(error)] += 1
        self._failed_in_a_row += 1
        self._down_since = self._down_since or time.monotonic()
        self._trouble = f"{_told(error)}; waiting up to {outage_s:g} s"
        if self.down_s + self._pause_s > outage_s:
            raise RetrievalUnavailable(
                f"the retriever at {self._settings.url} has not answered properly for {outage_s:g} s ({_told(error)}); "
                "start it (`python -m cusearch_async.processes.start retriever CONFIG`) or fix retriever.url"
            ) from error
        if time.monotonic() - began > outage_s:
            raise SearchRefused(
                f"the retriever at {self._settings.url} answers others, but for {outage_s:g} s not the search for "
                f"{body['queries'][0]!r:.200} ({_told(error)})"
            ) from error

    def _is_up(self) -> None:
        self._failed_in_a_row = 0
        self._down_since = None
        self._trouble = ""

    @property
    def _pause_s(self) -> float:
        """Between two attempts: longer the longer the retriever is down."""
        return min(max(_FIRST_PAUSE_S, self.down_s / 4), _LONGEST_PAUSE_S)

    async def _guarded(self, body: dict[str, Any]) -> list[str]:
        """Circuit breaker: a retriever in trouble gets one attempt at a time, with pauses, until one is answered."""
        if self._failed_in_a_row < _BREAKS_AFTER:
            return await self._ask(body)
        async with self._one_at_a_time:
            if self._failed_in_a_row >= _BREAKS_AFTER:
                await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
                return await self._ask(body)
        return await self._ask(body)

    async def _ask(self, body: dict[str, Any]) -> list[str]:
        """One attempt. Raises whatever went wrong; SearchRefused is final."""
        asked = f"the search for {body['queries'][0]!r:.200}"
        url = self._settings.url
        async with self._session.post(f"{url}/retrieve", json=body, allow_redirects=False) as response:
            if response.status in _WRONG_REQUEST:
                raise SearchRefused(
                    f"the retriever at {url} refuses {asked} ({response.status}): {await _error_text(response)}"
                )
            if response.status != 200:
                info, history, told = response.request_info, response.history, await _error_text(response)
                raise aiohttp.ClientResponseError(info, history, status=response.status, message=told)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError(f"the answer is compressed ({response.headers['Content-Encoding']}), unasked")
            answer = await _read(response, self._settings.max_answer_mib << 20)
        if answer is None:
            raise SearchRefused(
                f"the retriever at {url} answers {asked} with more than retriever.max_answer_mib "
                f"({self._settings.max_answer_mib}); shorten its passages, or raise that"
            )
        longest = self._episode.max_observation_characters
        return [without_surrogates(text[:longest]) for text in _contents(json.loads(answer))]

    async def _say_while_down(self) -> None:
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            if self._trouble:
                log.warning("retriever at %s down for %.0f s: %s", self._settings.url, self.down_s, self._trouble)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body; None when it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    """What an answer that is an error says, or where it points to."""
    if 300 <= response.status < 400:
        return f"it redirects to {response.headers.get('Location', 'nowhere')!r:.200}, and redirects are not followed"
    return (await response.content.read(_ERROR_BYTES)).decode(errors="replace")[:200]


def _have_seen(task: asyncio.Task[list[str]]) -> None:
    """Take note of a failure, though every episode that waited for it may have been cancelled."""
    if not task.cancelled():
        task.exception()


def _told(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it answers {error.status}: {error.message}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"


def _kind(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorError():
            return "refused"
        case aiohttp.ClientResponseError():
            return "status"
        case aiohttp.ClientError():
            return "closed"
        case _:
            return "garbage"


def _contents(answer: Any) -> list[str]:
    """Raises: KeyError, TypeError or ValueError for anything but Search-R1's answer to one query."""
    if not isinstance(answer["result"], list) or not all(isinstance(rows, list) for rows in answer["result"]):
        raise TypeError("result must be a list of lists")
    (rows,) = answer["result"]
    contents = [row["document"]["contents"] for row in rows]
    if not all(isinstance(text, str) for text in contents):
        raise TypeError("document contents must be text")
    return contents
