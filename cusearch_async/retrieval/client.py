"""The search client of a rollout worker: Search-R1's protocol, over one aiohttp session.

Failures are retried until the retriever has been down for `outage_s`, and never become documents. Answers are not
trusted: their length, nesting, characters and redirects are limited here. The retriever's /health reports its behaviour
and what it serves; it is read before the first search, and again after every failed attempt, because another retriever
may answer then.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from cusearch_async.concurrency import InFlight
from cusearch_async.config import EpisodeConfig, RetrieverConfig
from cusearch_async.errors import ConfigError, ContractMismatch, RetrievalUnavailable, SearchRefused
from cusearch_async.lifecycle.progress import LOG_EVERY_S
from cusearch_async.retrieval import protocol
from cusearch_async.retrieval.backend import Context, Query
from cusearch_async.retrieval.pace import Pace
from cusearch_async.retrieval.protocol import read_at_most
from cusearch_async.run.identity import ACCEPT_CHANGES
from cusearch_async.surrogates import without_surrogates
from cusearch_async.types import Question

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_BREAKS_AFTER = 8
"""Failures in a row, over all episodes, after which only one search at a time is tried."""
_ERROR_BYTES = 800
"""Bytes of an error answer that are read for the message."""
_WRONG_REQUEST = (400, 413, 422)
"""Statuses that a retry cannot change. 401, 403 and 404 are retried: gateways send them while their backend is down."""
_TOO_MANY, _BUSY = 429, 10
"""A status, and for how many times `outage_s` a search may get it while others are answered: it waits for its turn."""
_KINDS = {
    TimeoutError: "timeout",
    aiohttp.ClientConnectorError: "refused",
    aiohttp.ClientResponseError: "status",
    aiohttp.ClientError: "closed",
}
_FAILURES = (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, RecursionError)
_FIRST = "first search"
_PROBE = Question(id="probe", text="Is anyone there?", answers=("yes",), category="probe")


class SearchClient:
    """For all episodes of a worker. With a deterministic retriever, equal queries in flight are sent once."""

    def __init__(
        self, session: aiohttp.ClientSession, settings: RetrieverConfig, episode: EpisodeConfig, questions_per_step: int
    ) -> None:
        """`questions_per_step` (N) turns a ticket into the learner step that trains on it, for ZeroSearch's noise."""
        self._session, self._settings, self._episode = session, settings, episode
        self._questions_per_step = questions_per_step
        self._behaviour = self._default_behaviour = protocol.Behaviour(settings.deterministic, accepts_seed=False)
        """The default is that of a retriever that does not report it."""
        self._is_behaviour_known = False
        self.serves: str | None = None
        """What the retriever serves; None when it does not report it. The first answered search fixes it."""
        self._has_answered = False
        self._health: InFlight[str, None] = InFlight()
        self._searches: InFlight[tuple[str, Context | None], list[str]] = InFlight(ends_unwaited=True)
        self._one_at_a_time = asyncio.Lock()
        self._pace = Pace(settings.max_connections)
        self._failed_in_a_row = 0
        self._retrying: set[object] = set()
        """Searches whose last attempt failed; without any, the retriever does not count as down."""
        self._down_since: float | None = None
        self._failed_s = self._rested_at = 0.0
        """Of the same outage: how long it lasted before, whenever the last search that was tried again was given up."""
        self._answered_at = 0.0
        self._last_failure = ""
        """Why the last attempt failed, and how long the client retries; empty after an answered search."""
        self._knows_protocol = False
        """Whether a document has come in the form of the protocol."""
        self._has_warned = False
        self._seconds: deque[float] = deque(maxlen=1000)
        self.searches = 0
        self.shared = 0
        """Searches that were answered by an equal one in flight."""
        self.failures: Counter[str] = Counter()
        """Attempts that failed: refused, timeout, status, closed, garbage."""

    @staticmethod
    def session(settings: RetrieverConfig) -> aiohttp.ClientSession:
        """For a client; the caller closes it. Answers are not decompressed: a small one could become very large."""
        connector = aiohttp.TCPConnector(limit=0)  # `Pace` has it: the time of a request begins when it is made
        timeout, headers = aiohttp.ClientTimeout(settings.timeout_s), {"Accept-Encoding": "identity"}
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, auto_decompress=False)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: RetrieverConfig, episode: EpisodeConfig, questions_per_step: int
    ) -> AsyncIterator[SearchClient]:
        """A client that logs while its retriever is down. Its searches are cancelled at the end."""
        async with cls.session(settings) as session:
            client = cls(session, settings, episode, questions_per_step)
            logging_outage = asyncio.create_task(client._log_outage())
            try:
                yield client
            finally:
                logging_outage.cancel()
                await asyncio.gather(logging_outage, return_exceptions=True)
                await client._searches.close()
                await client._health.close()

    async def wait_until_answering(self, timeout_s: float) -> None:
        """Read /health and make a first search, which does not count. Raises: as `search`, after `timeout_s`."""
        await self._search_until_answered(self._first_search, timeout_s)
        self.searches = 0
        self.failures.clear()
        self._seconds.clear()

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none. `seed` is the search's own random
        number; `question` and `ticket` identify the trajectory that searches.

        Raises: RetrievalUnavailable when the retriever gives no valid answer for `outage_s`; SearchRefused when it
        answers only other searches, refuses this search as invalid, or its answer is too long; ConfigError when its
        first documents have another form than the protocol's."""
        asked = Query(without_surrogates(query), seed, self._context(question, ticket))
        if self._behaviour.deterministic:
            key = asked.text, asked.context
            is_shared = key in self._searches
            found = await self._searches.share(key, lambda: self._search_until_answered(asked, self._settings.outage_s))
            if not is_shared or self._behaviour.deterministic:
                self.shared += is_shared
                return list(found)
            # The retriever is no longer deterministic, so this search needs its own answer.
        return await self._search_until_answered(asked, self._settings.outage_s)

    @property
    def down_s(self) -> float:
        """How long every attempt has failed; 0 after an answered search, or while none is tried again."""
        return time.monotonic() - self._down_since if self._down_since else 0.0

    def status(self) -> dict[str, Any]:
        """Its part of a WorkerStatus: totals, and the seconds of the last thousand searches, retries included."""
        slow_s = float(np.quantile(self._seconds, 0.99)) if self._seconds else 0.0
        return {
            "searches": self.searches,
            "searches_shared": self.shared,
            "search_failures": self.failures.total(),
            "search_failures_by_kind": " ".join(f"{kind}:{n}" for kind, n in sorted(self.failures.items())),
            "search_p99_s": round(slow_s, 4),
            "retriever_down_s": round(self.down_s, 1),
        }

    def _context(self, question: Question, ticket: int) -> Context | None:
        """The context, only for a simulated engine: no other backend may see the gold answers."""
        if self._settings.backend != "zerosearch":
            return None
        return Context(question.text, question.answers, ticket // self._questions_per_step)

    async def _search_until_answered(self, query: Query, outage_s: float) -> list[str]:
        began, failing_since, this = time.monotonic(), 0.0, object()
        try:
            while True:
                try:
                    found = await self._ask_through_breaker(query)
                except SearchRefused:  # that is an answer
                    self._note_answer()
                    raise
                except _FAILURES as error:
                    self._retrying.add(this)
                    failing_since = failing_since or time.monotonic()  # before it, the search may have waited its turn
                    try:
                        self._note_failure(error, query, failing_since, outage_s)
                    except RetrievalUnavailable:
                        if query.text == _FIRST or not await self._answers_another():
                            raise  # else this one is refused when it has failed for so long itself
                    failing_s = max(self.down_s, time.monotonic() - failing_since)  # others may be answered
                    await asyncio.sleep(_pause_after(failing_s) * random.uniform(0.5, 1.5))
                else:
                    self.searches += 1
                    self._note_answer()
                    self._seconds.append(time.monotonic() - began)
                    return found
        finally:
            self._retrying.discard(this)
            if not self._retrying:
                self._rest()

    def _note_failure(self, error: Exception, query: Query, since: float, outage_s: float) -> None:
        """Record a failed attempt. Raises: RetrievalUnavailable or SearchRefused when it has failed for too long."""
        is_busy = isinstance(error, aiohttp.ClientResponseError) and error.status == _TOO_MANY
        self.failures[next((kind for type_, kind in _KINDS.items() if isinstance(error, type_)), "garbage")] += 1
        self._failed_in_a_row += 1
        self._is_behaviour_known = self._is_behaviour_known and is_busy  # which no other retriever has said
        if not self._down_since and time.monotonic() - self._rested_at > outage_s:
            self._failed_s = 0.0  # nobody has asked for so long: it is another outage
        self._down_since = self._down_since or time.monotonic()
        self._last_failure = f"{_describe(error)}; waiting up to {outage_s:g} s"
        is_late = time.monotonic() - since > outage_s * (_BUSY if is_busy else 1)
        if self._failed_s + self.down_s + self._pause_s > outage_s or (is_late and self._answered_at < since):
            down = f"has given no valid answer for {outage_s:g} s ({_describe(error)})"
            remedy = "start it (`cusearch worker retriever CONFIG`), or fix retriever.url"
            raise RetrievalUnavailable(f"the retriever at {self._settings.url} {down}; {remedy}") from error
        if is_late:
            refused = f"answers other searches, but for {outage_s:g} s not the search for {query.text!r:.200}"
            raise SearchRefused(f"the retriever at {self._settings.url} {refused} ({_describe(error)})") from error

    async def _answers_another(self) -> bool:
        """Whether another search is answered, where nobody may have made one: a run can continue without the one that
        is not."""
        try:
            await self._ask(replace(self._first_search, text=f"{_FIRST} {secrets.token_hex(4)}"))  # in no cache
        except (SearchRefused, *_FAILURES):
            return False
        self._note_answer()
        return True

    @property
    def _first_search(self) -> Query:
        return Query(_FIRST, 0, self._context(_PROBE, ticket=0))

    def _note_answer(self) -> None:
        self._answered_at = time.monotonic()
        self._rest()
        self._failed_s = 0.0

    def _rest(self) -> None:
        """No search is tried again: whether the retriever is down is not known, and time in which nobody asks is no
        outage."""
        if self._down_since:
            self._failed_s, self._rested_at = self._failed_s + self.down_s, time.monotonic()
        self._failed_in_a_row, self._down_since, self._last_failure = 0, None, ""

    @property
    def _pause_s(self) -> float:
        """The pause between two attempts; it grows with the length of the outage."""
        return _pause_after(self.down_s)

    async def _ask_through_breaker(self, query: Query) -> list[str]:
        """Circuit breaker: after several failures only one attempt at a time is made, with pauses, until one
        succeeds."""
        if self._failed_in_a_row < _BREAKS_AFTER:
            return await self._ask(query)
        async with self._one_at_a_time:
            if self._failed_in_a_row >= _BREAKS_AFTER:
                await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
                return await self._ask(query)
        return await self._ask(query)

    async def _ask(self, query: Query) -> list[str]:
        """One attempt. Raises whatever went wrong; SearchRefused is final."""
        if not self._is_behaviour_known:
            await self._health.share("/health", self._ask_behaviour)
        seeds = [query.seed] if self._behaviour.accepts_seed else None
        contexts: list[Context | None] | None = [query.context] if query.context else None
        request = protocol.Request([query.text], self._settings.topk, True, seeds, contexts)
        asked, url = f"the search for {query.text!r:.200}", self._settings.url
        body = protocol.encode_request(request)
        post = functools.partial(self._session.post, f"{url}/retrieve", json=body, allow_redirects=False)
        async with self._pace.one(), post() as response:
            if response.status == _TOO_MANY or "Retry-After" in response.headers:
                self._pace.slow_down(response.headers)
            else:
                self._pace.speed_up()
            if response.status in _WRONG_REQUEST:
                raise SearchRefused(
                    f"the retriever at {url} refuses {asked} ({response.status}): {await _error_text(response)}"
                )
            if response.status != 200:
                raise _status_error(response, await _error_text(response))
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise ValueError(f"the answer is compressed ({response.headers['Content-Encoding']}), unasked")
            self._refuse_another(response.headers.get(protocol.SERVES))
            answer = await read_at_most(response, self._settings.max_answer_mib << 20)
        if answer is None:
            limit = f"retriever.max_answer_mib ({self._settings.max_answer_mib})"
            remedy = "shorten its passages, or raise this limit"
            raise SearchRefused(f"the retriever at {url} answers {asked} with more than {limit}; {remedy}")
        contents = self._decoded(answer)
        self._has_answered = True
        return [without_surrogates(text[: self._episode.max_observation_characters]) for text in contents]

    def _decoded(self, answer: bytes) -> list[str]:
        """Contents of the first `topk` documents. Raises: ConfigError for documents in another form, until one had
        the right form; later another server may answer for a while."""
        settings = self._settings
        try:
            (contents,) = protocol.decode_answer(json.loads(answer))
        except protocol.AnotherSchema as error:
            if self._knows_protocol:
                raise
            raise ConfigError(
                f"the retriever at retriever.url {settings.url} does not speak Search-R1's protocol: {error}"
            ) from error
        self._knows_protocol = self._knows_protocol or bool(contents)
        if len(contents) > settings.topk and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the retriever at %s answers with %d documents, and retriever.topk is %d: only the first %d are taken",
                *(settings.url, len(contents), settings.topk, settings.topk),
            )
        return contents[: settings.topk]

    async def _ask_behaviour(self) -> None:
        """Read /health. A server without it, or with another answer there, is fine. Raises whatever went wrong;
        ContractMismatch when another retriever answers than before."""
        try:
            get = functools.partial(self._session.get, f"{self._settings.url}/health", allow_redirects=False)
            async with self._pace.one(), get() as response:
                if response.status == _TOO_MANY:
                    self._pace.slow_down(response.headers)
                if response.status == _TOO_MANY or (response.status >= 500 and response.status != 501):
                    raise _status_error(response, f"GET /health: {await _error_text(response)}")
                most = self._settings.max_answer_mib << 20
                answer = await read_at_most(response, most) if response.status == 200 else None
        except TimeoutError as error:
            raise TimeoutError("GET /health") from error
        behaviour = protocol.decode_health(answer or b"") or self._default_behaviour
        if not self._has_answered:
            self.serves = behaviour.serves
        elif self._behaviour.serves and not behaviour.serves:  # a gateway, while its backend starts
            raise ValueError("GET /health no longer reports what is served")
        self._refuse_another(behaviour.serves)
        self._behaviour, self._is_behaviour_known = behaviour, True

    def _refuse_another(self, serves: str | None) -> None:
        """Groups must not mix searches of two corpora. An answer without the header may come through a gateway that
        drops it. Raises: ContractMismatch."""
        if self.serves is None and not self._has_answered:  # a proxy may pass on searches alone
            self.serves = serves
        if serves is not None and serves != self.serves:
            before = f"it served {self.serves}" if self.serves else "it did not report what it serves"
            remedy = f"start that one again, or restart the learner with {ACCEPT_CHANGES} and then the workers"
            raise ContractMismatch(
                f"the retriever at {self._settings.url} serves {serves} now, and before {before}; {remedy}"
            )

    async def _log_outage(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY_S)
            if self._last_failure:
                log.warning("retriever at %s down for %.0f s: %s", self._settings.url, self.down_s, self._last_failure)


async def _error_text(response: aiohttp.ClientResponse) -> str:
    """The text of an error answer, or the target of a redirect."""
    if 300 <= response.status < 400:
        return f"it redirects to {response.headers.get('Location', 'nowhere')!r:.200}, and redirects are not followed"
    text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace")
    return " ".join(text.split())[:200]


def _status_error(response: aiohttp.ClientResponse, text: str) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(response.request_info, response.history, status=response.status, message=text)


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"it answers {error.status}: {error.message}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return f"{type(error).__name__}: {error}"


def _pause_after(failing_s: float) -> float:
    return min(max(_FIRST_PAUSE_S, failing_s / 4), _LONGEST_PAUSE_S)
