"""A stand-in for ZeroSearch's language model that knows the atlas: the same API and prompts, no GPU.

It answers POST /v1/chat/completions by what the prompt asks for: useful documents are what a search for the query
finds, noisy ones are random passages. Equal seeds give equal documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from cusearch_async.retrieval.backend import Passage
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.zerosearch import NUMBERS
from cusearch_async.streams import Stream, stream

_ASKED = re.compile(
    r"need to generate (\w+) (?:related but )?(useful|noisy) documents.*^Query: (.*)\n\w+ Output:\s*\Z",
    re.DOTALL | re.M,
)


class Simulator:
    def __init__(self, passages: Sequence[Passage]) -> None:
        """`passages`: of an embedded world."""
        self._index = Bm25Index.in_memory(passages)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def complete(self, http: web.Request) -> web.Response:
        try:
            body = await http.json()
            text = self.answer(_prompt_of(body["messages"][-1]["content"]), int(body.get("seed") or 0))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=400)
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def answer(self, prompt: str, seed: int) -> str:
        """Documents as a simulator writes them, "Doc 1: ...". Raises: ValueError for another prompt."""
        asked = _ASKED.search(prompt)
        if asked is None:
            raise ValueError("the prompt does not ask for documents as ZeroSearch does")
        word, kind, query = asked.groups()
        count = NUMBERS.index(word) if word in NUMBERS else int(word)
        passages = self._index.passages
        if kind == "useful":
            found: list[Any] = [passage for passage, _ in self._index.search([query], count)[0]]
        else:
            found = [passages[i] for i in stream(Stream.DOCUMENTS, seed).integers(len(passages), size=count).tolist()]
        texts = (passage["contents"].partition("\n")[2] for passage in found)
        return "\n".join(f"Doc {rank}: {text}" for rank, text in enumerate(texts, 1)) or "Doc 1:"


def _prompt_of(content: Any) -> str:
    """The text of a message, which may come in parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
