"""The search client of a rollout worker: Search-R1's protocol, over one aiohttp session.

A retriever that fails is not a search that finds nothing: failures are retried until the retriever has been down for
`outage_s`, then raised as RetrievalUnavailable. They never become documents. A search that fails for so long while
others are answered is SearchRefused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from typing import Any

import aiohttp
import numpy as np

from cusearch_async.config import Config, RetrieverConfig
from cusearch_async.errors import RetrievalUnavailable, SearchRefused
from cusearch_async.types import Question

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_BREAKS_AFTER = 8
"""Failures in a row, of all episodes together, until only one search at a time is tried."""
_REMEMBERED = 1000
_PROBE = Question(id="probe", text="Is anyone there?", answers=("yes",), category="probe")


class SearchClient:
    """Every episode of a worker searches through it. Equal queries that are on their way to a deterministic backend
    are asked once."""

    def __init__(
        self, session: aiohttp.ClientSession, settings: RetrieverConfig, topk: int, questions_per_step: int
    ) -> None:
        """`questions_per_step` (N) turns a ticket into the learner step that trains on it, for ZeroSearch's noise."""
        self._session = session
        self._settings = settings
        self._topk = topk
        self._questions_per_step = questions_per_step
        self._on_their_way: dict[str, asyncio.Task[list[str]]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._failed_in_a_row = 0
        self._down_since: float | None = None
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self.searches = 0
        self.shared = 0
        """Searches that were answered by an equal one on its way."""
        self.failures: Counter[str] = Counter()
        """Attempts that failed: refused, timeout, status, closed, garbage."""

    @staticmethod
    def session(settings: RetrieverConfig) -> aiohttp.ClientSession:
        """The session to give to a client; the caller closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections),
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        )

    @classmethod
    def of(cls, session: aiohttp.ClientSession, config: Config) -> SearchClient:
        return cls(session, config.retriever, config.episode.topk, config.questions_per_step)

    async def wait_until_answering(self, timeout_s: float) -> None:
        """Raises: RetrievalUnavailable when a first search is not answered properly within `timeout_s`."""
        await self._insist(self._body("first search", 0, _PROBE, 0), timeout_s)

    async def search(self, query: str, draw: int, question: Question, ticket: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none. `draw` is the search's own random
        number; `question` and `ticket` say whose search it is.

        Raises: RetrievalUnavailable when the retriever answers nobody properly for `outage_s`, or refuses the request
        as wrong; SearchRefused when it answers others."""
        body = self._body(query, draw, question, ticket)
        if not self._settings.is_deterministic:
            return await self._insist(body, self._settings.outage_s)
        asked = self._on_their_way.get(query)
        if asked is None:
            asked = asyncio.create_task(self._insist(body, self._settings.outage_s))
            self._on_their_way[query] = asked
            asked.add_done_callback(lambda _: self._on_their_way.pop(query))
        else:
            self.shared += 1
        return list(await asyncio.shield(asked))  # an episode that is cancelled takes no other's search with it

    @property
    def down_s(self) -> float:
        """How long every attempt has failed; 0 after a search that was answered."""
        return time.monotonic() - self._down_since if self._down_since else 0.0

    def facts(self) -> dict[str, str | int | float]:
        """Totals, and how long the last thousand searches took, retries included."""
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
        body = {"queries": [query], "topk": self._topk, "return_scores": True, "draws": [draw]}
        if self._settings.backend == "zerosearch":  # no other engine may see the answers
            step = ticket // self._questions_per_step
            body["contexts"] = [{"question": question.text, "answers": list(question.answers), "step": step}]
        return body

    async def _insist(self, body: dict[str, Any], outage_s: float) -> list[str]:
        began = time.monotonic()
        while True:
            try:
                found = await self._guarded(body)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                self.failures[_kind(error)] += 1
                self._failed_in_a_row += 1
                self._down_since = self._down_since or time.monotonic()
                if self.down_s + self._pause_s > outage_s:
                    raise RetrievalUnavailable(
                        f"the retriever at {self._settings.url} has not answered properly for "
                        f"{outage_s:g} s ({_told(error)}); start it (`python -m workers.retriever CONFIG`) or mend "
                        "retriever.url"
                    ) from error
                if time.monotonic() - began > outage_s:
                    raise SearchRefused(
                        f"the retriever at {self._settings.url} answers others, but for {outage_s:g} s not the search "
                        f"for {body['queries'][0]!r:.200} ({_told(error)})"
                    ) from error
                await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
            else:
                self.searches += 1
                self._failed_in_a_row = 0
                self._down_since = None
                self._seconds.append(time.monotonic() - began)
                return found

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
        """One attempt. Raises whatever went wrong; a 4xx answer is final."""
        async with self._session.post(f"{self._settings.url}/retrieve", json=body) as response:
            if 400 <= response.status < 500 and response.status not in (408, 429):
                text = (await response.text())[:200]
                raise RetrievalUnavailable(
                    f"the retriever at {self._settings.url} refuses a search ({response.status}): {text}"
                )
            if response.status != 200:
                text = (await response.text())[:200]
                info, history = response.request_info, response.history
                raise aiohttp.ClientResponseError(info, history, status=response.status, message=text)
            return _contents(await response.json(content_type=None))


def _told(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it answers {error.status}: {error.message}"
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
