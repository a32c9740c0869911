"""A language model that simulates the search engine (ZeroSearch), behind an OpenAI-compatible server.

Source: ZeroSearch (Sun et al., 2025), sections 3.2 and 3.3, and the requests that its own client sends
(llm_agent/generation.py, search_simulate_sft). Departures: the question and the answer in the prompt are those of the
trajectory that searches (there, rows were matched by position and could be another trajectory's); the number of
documents in the prompt is topk, not always five; a seed is sent; a failure is a failure, not a document. Useful or
noisy is drawn once per search, from the search's own random number.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from cusearch_async.config import ZeroSearchConfig, is_loopback, secret
from cusearch_async.errors import SearchFailed
from cusearch_async.retrieval.backend import Context, Query, Scored
from cusearch_async.retrieval.protocol import read_answer
from cusearch_async.streams import Stream, stream
from cusearch_async.surrogates import without_surrogates

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DOCUMENT = re.compile(r"^\s*Doc(?:ument)?\s*(\d+)\s*:\s*", re.MULTILINE | re.IGNORECASE)

SFT_PROMPT = """You are the Google search engine.
Given a query, you need to generate {count} {kind} documents for the query.

The user is trying to answer the question: "{question}" whose answer is {answer}.
Each document should contain about 30 words, and these documents should contain {kind} information.

Query: {query}
{Kind} Output:
"""
"""The prompt of ZeroSearch's client for its fine-tuned simulators, to the letter."""

_EXAMPLES = {
    "useful": (
        "Doc 1: Lima is the capital and the largest city of Peru, in the valleys of the Chillón, Rímac and Lurín "
        "rivers, on the desert coast of the Pacific Ocean, with ten million inhabitants."
    ),
    "noisy": (
        "Doc 1: Peru is known for its textiles and its cuisine; travellers to the Andes are told to drink coca tea "
        "against the height, and to carry warm clothes for the nights above Cusco."
    ),
}

FEW_SHOT_PROMPT = """You are the Google search engine.
Given a query, you need to generate {count} {nature} documents for the query.
{asker}
Each document should contain about 30 words, and these documents should contain {nature} information. Write each \
document on a line of its own, beginning with "Doc", its number and a colon, and write nothing else.

Here is an example with one document:

Query: what is the capital of Peru
{Kind} Output:
{example}

Query: {query}
{Kind} Output:
"""
"""For a chat model that was not trained to be a search engine: ZeroSearch's prompt for such models, in other words and
with an example of one document instead of five."""

_ASKER = '\nThe user is trying to answer the question: "{question}" whose answer is {answer}.\n'


def noise_probability(step: int, settings: ZeroSearchConfig, steps: int) -> float:
    """p(i) = p_s + (b^(i/m) - 1) / (b - 1) (p_e - p_s), and p_e from step m on (ZeroSearch, its curriculum)."""
    progress = min(1.0, step / steps) if steps else 1.0
    grown: float = (settings.base**progress - 1) / (settings.base - 1)
    return settings.p_start + grown * (settings.p_end - settings.p_start)


def build_prompt(query: str, context: Context, is_noisy: bool, topk: int, mode: str) -> str:
    kind = "noisy" if is_noisy else "useful"
    words = {
        "count": NUMBERS[topk] if topk < len(NUMBERS) else str(topk),
        "kind": kind,
        "Kind": kind.capitalize(),
        "nature": "related but noisy" if is_noisy else "useful",
        "query": query,
        "question": context.question,
        "answer": context.answers[0],
    }
    if mode == "sft":
        return SFT_PROMPT.format(**words)
    asker = "" if is_noisy else _ASKER.format(**words)  # noise must not know what would be useful
    return FEW_SHOT_PROMPT.format(**words, asker=asker, example=_EXAMPLES[kind])


def messages_of(prompt: str, mode: str) -> list[dict[str, Any]]:
    """The chat that holds a prompt. With `sft` as ZeroSearch's client sends it, with an empty system message, in whose
    place a Qwen template would put another; some other chat models know no system message."""
    if mode != "sft":
        return [{"role": "user", "content": prompt}]
    return [{"role": "system", "content": ""}, {"role": "user", "content": [{"type": "text", "text": prompt}]}]


def parse_documents(text: str, topk: int) -> list[str]:
    """The documents of a simulator's answer, at most `topk`, without their numbers; blank ones are none.

    "Doc 1: a b\\nDoc 2: c" -> ["a b", "c"]. A text without any "Doc i:" is one document."""
    pieces = _DOCUMENT.split(text)
    tidy = (" ".join(document.split()) for document in (pieces[2::2] or pieces))
    return [document for document in tidy if document][:topk]


class ZeroSearch:
    """A `Backend` over a language model. Raises SearchFailed when that fails; the worker repeats the request."""

    def __init__(self, settings: ZeroSearchConfig, steps: int, seed: int) -> None:
        self._settings, self._steps, self._seed = settings, settings.steps or steps, seed
        self._session: aiohttp.ClientSession | None = None
        self._useful = self._noisy = self._failures = 0

    async def search(self, queries: Sequence[Query], topk: int) -> list[list[Scored]]:
        return list(await asyncio.gather(*(self._search(query, topk) for query in queries)))

    @property
    def deterministic(self) -> bool:
        """The seed decides about noise, and the language model samples."""
        return False

    @property
    def accepts_seed(self) -> bool:
        return True

    def figures(self) -> dict[str, str | int | float]:
        return {"useful": self._useful, "noisy": self._noisy, "failures": self._failures}

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def is_noisy(self, query: Query, step: int) -> bool:
        draw = stream(Stream.NOISE, self._seed, query.seed).random()
        return bool(draw < noise_probability(step, self._settings, self._steps))

    async def _search(self, query: Query, topk: int) -> list[Scored]:
        if query.context is None:
            needed = "send 'contexts' with question, answers, step"
            raise SearchFailed(f"zerosearch needs the context of a search: {needed}", 400)
        if not query.text.strip():
            return []
        is_noisy = self.is_noisy(query, query.context.step)
        prompt = build_prompt(query.text, query.context, is_noisy, topk, self._settings.mode)
        try:
            text = await self._complete(prompt, query.seed)
        except SearchFailed:
            self._failures += 1
            raise
        self._noisy += is_noisy
        self._useful += not is_noisy
        documents = parse_documents(text, topk)
        return [({"id": f"{query.seed}-{rank}", "contents": text}, 1 / rank) for rank, text in enumerate(documents, 1)]

    async def _complete(self, prompt: str, seed: int) -> str:
        settings = self._settings
        body = {"model": settings.model, "messages": messages_of(prompt, settings.mode), "seed": seed}
        body |= {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        if self._session is None:
            key = secret("CUSEARCH_SIMULATOR_KEY")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            timeout = aiohttp.ClientTimeout(settings.timeout_s)
            connector = aiohttp.TCPConnector(limit=0)  # the worker and the simulator have their own limits
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        url = f"{settings.url}/chat/completions"
        try:
            proxy = _proxy_of(url)
            async with self._session.post(url, json=body, allow_redirects=False, **proxy) as response:
                answer = await read_answer(response)
                if response.status != 200:
                    text = answer.decode("utf-8", "replace")[:200]
                    raise SearchFailed(f"the simulator at {settings.url} answers {response.status}: {text}")
                return _without_thoughts(_text_of(json.loads(answer)))
        except TimeoutError as error:
            raise SearchFailed(f"the simulator at {settings.url} took over {settings.timeout_s:g} s", 504) from error
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise SearchFailed(f"the simulator at {settings.url} fails: {type(error).__name__}: {error}") from error


def _without_thoughts(text: str) -> str:
    """They name the right answer, which the prompt tells. Raises: ValueError for a text that ends within them."""
    _, _, said = text.rpartition("</think>")
    if "<think>" in said or not said.strip():
        raise ValueError("the text ends within its thoughts: raise max_tokens, or turn the model's thinking off")
    return said


def _text_of(answer: Any) -> str:
    """Raises: ValueError for anything but a chat completion with text."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no chat completion: {answer!r:.200}") from error
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a chat completion without text: {answer!r:.200}")
    return without_surrogates(text)


def _proxy_of(url: str) -> dict[str, Any]:
    """That of the environment, for a simulator elsewhere. Not by `trust_env`, which reads .netrc, too: aiohttp takes no
    key beside that."""
    if is_loopback(url):
        return {}
    try:
        proxy, auth = get_env_proxy_for_url(URL(url))
    except LookupError:
        return {}
    return {"proxy": proxy, "proxy_auth": auth}
