"""The search client of a rollout worker: Search-R1's protocol, over one aiohttp session.

A retriever that fails is not a search that finds nothing: failures are retried for `outage_s`, then raised as
RetrievalUnavailable. They never become documents.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp

from cusearch_async.config import RetrieverConfig
from cusearch_async.errors import RetrievalUnavailable

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


class SearchClient:
    def __init__(self, session: aiohttp.ClientSession, settings: RetrieverConfig, topk: int) -> None:
        self._session = session
        self._settings = settings
        self._topk = topk
        self.searches = 0
        self.failures = 0
        self._down_since: float | None = None

    @staticmethod
    def session(settings: RetrieverConfig) -> aiohttp.ClientSession:
        """The session to give to a client; the caller closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=settings.max_connections),
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        )

    async def wait_until_answering(self, timeout_s: float) -> None:
        """Raises: RetrievalUnavailable when a first search is not answered properly within `timeout_s`."""
        await self._insist("first search", 0, timeout_s)

    async def search(self, query: str, draw: int) -> list[str]:
        """Contents of the documents found, best first; empty when there are none.

        Raises: RetrievalUnavailable when the retriever does not answer properly for `outage_s`, or refuses
        the request as wrong."""
        return await self._insist(query, draw, self._settings.outage_s)

    @property
    def down_s(self) -> float:
        """How long every attempt has failed; 0 after a search that was answered."""
        return time.monotonic() - self._down_since if self._down_since else 0.0

    async def _insist(self, query: str, draw: int, outage_s: float) -> list[str]:
        deadline = time.monotonic() + outage_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                found = await self._ask(query, draw)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
                self.failures += 1
                self._down_since = self._down_since or time.monotonic()
                if time.monotonic() + pause > deadline:
                    raise RetrievalUnavailable(
                        f"the retriever at {self._settings.url} has not answered properly for "
                        f"{outage_s:g} s ({type(error).__name__}: {error}); start it "
                        "(`python -m workers.retriever CONFIG`) or mend retriever.url"
                    ) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self.searches += 1
                self._down_since = None
                return found

    async def _ask(self, query: str, draw: int) -> list[str]:
        """One attempt. Raises whatever went wrong; a 4xx answer is final."""
        body = {"queries": [query], "topk": self._topk, "return_scores": True, "draws": [draw]}
        async with self._session.post(f"{self._settings.url}/retrieve", json=body) as response:
            if 400 <= response.status < 500 and response.status not in (408, 429):
                text = (await response.text())[:200]
                raise RetrievalUnavailable(
                    f"the retriever at {self._settings.url} refuses a search ({response.status}): {text}"
                )
            response.raise_for_status()
            return _contents(await response.json(content_type=None))


def _contents(answer: Any) -> list[str]:
    """Raises: KeyError, TypeError or ValueError for anything but Search-R1's answer to one query."""
    if not isinstance(answer["result"], list) or not all(isinstance(rows, list) for rows in answer["result"]):
        raise TypeError("result must be a list of lists")
    (rows,) = answer["result"]
    contents = [row["document"]["contents"] for row in rows]
    if not all(isinstance(text, str) for text in contents):
        raise TypeError("document contents must be text")
    return contents
