"""The protocol of retriever and client: Search-R1's, two fields of ours in it, and `/health`.

    POST /retrieve {"queries": ["capital of Peru"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 11.2}, ...]]}
    GET /health -> {"status": "ok", "deterministic": true, "accepts_seed": false, "serves": "bm25 over ...", ...}

With "return_scores": false each inner list holds the documents alone. What is served is in the header
X-Retriever-Serves of every answer, too. Other servers may lack the header, /health and our fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from cusearch_async.config import MAX_TOPK
from cusearch_async.retrieval.backend import Context, Scored

SERVES = "X-Retriever-Serves"
MAX_QUERIES = 4096
"""In one request. Search-R1's training sends those of all its trajectories at once, 512 x 5 = 2,560."""
MAX_DOCUMENTS = 100_000
"""Of one answer: queries x topk."""
MAX_ANSWER_BYTES = 8 << 20
"""Of an external service, decompressed. A page of results, or 600 tokens of a simulator, need about 1 % of it."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request; fields with their defaults are not sent."""

    queries: Annotated[list[str], Meta(max_length=MAX_QUERIES)]
    topk: Annotated[int, Meta(ge=1, le=MAX_TOPK)] | None = None
    return_scores: bool = False
    seeds: list[Annotated[int, Meta(ge=0)]] | None = None
    """Ours: one per query, which make simulated noise and latency reproducible."""
    contexts: list[Context | None] | None = None
    """Ours: one per query, for a simulated engine."""

    def __post_init__(self) -> None:
        for name, values in (("seeds", self.seeds), ("contexts", self.contexts)):
            if values is not None and len(values) != len(self.queries):
                raise ValueError(f"{name} must be a list with one entry per query ({len(self.queries)})")
        if self.topk is not None and len(self.queries) * self.topk > MAX_DOCUMENTS:
            asked = f"{len(self.queries)} x {self.topk}"
            raise ValueError(f"queries x topk must be at most {MAX_DOCUMENTS}, got {asked}; ask in several requests")


class Behaviour(msgspec.Struct, frozen=True, omit_defaults=True):
    """A retriever's own report of the engine that serves; see `Backend` for the meaning."""

    deterministic: bool
    accepts_seed: bool
    serves: str | None = None
    """What it serves, in words with a checksum; None when it does not report it."""


class _Document(msgspec.Struct):
    contents: str


class _Row(msgspec.Struct):
    document: _Document


class _Answer(msgspec.Struct):
    result: list[list[_Row]]


class AnotherSchema(ValueError):
    """Documents came, but not in the form of this protocol."""


def encode_request(request: Request) -> Any:
    return msgspec.to_builtins(request)


def decode_request(body: Any, default_topk: int) -> Request:
    """Raises: ValueError naming the field and what would be right."""
    request = msgspec.convert(body, Request)
    if request.topk is not None:
        return request
    return Request(request.queries, default_topk, request.return_scores, request.seeds, request.contexts)


def encode_answer(found: Sequence[Sequence[Scored]], return_scores: bool) -> dict[str, Any]:
    """The body of an answer: for each query its documents, best first."""
    if return_scores:
        return {"result": [[{"document": passage, "score": float(score)} for passage, score in rows] for rows in found]}
    return {"result": [[passage for passage, _ in rows] for rows in found]}


def decode_answer(body: Any) -> list[list[str]]:
    """For each query the contents of its documents, of an answer with scores.

    Raises: AnotherSchema for documents in another form; ValueError for anything else."""
    try:
        return [[row.document.contents for row in rows] for rows in msgspec.convert(body, _Answer).result]
    except msgspec.ValidationError as error:
        if _has_documents(body):
            raise AnotherSchema(f"{error}; the answer is {body!r:.200}") from error
        raise


def _has_documents(body: Any) -> bool:
    """Whether there is a text or an object where documents belong; an object with an error is none."""
    lists = body.get("result") if isinstance(body, dict) else body
    if lists is None and isinstance(body, dict):
        lists = next((value for value in body.values() if isinstance(value, list)), None)
    of_queries = [one if isinstance(one, list) else [one] for one in (lists if isinstance(lists, list) else [])]
    rows = [row.get("document", row) if isinstance(row, dict) else row for row in itertools.chain(*of_queries)]
    return any(isinstance(row, str | dict) and row and "error" not in row for row in rows)


def encode_health(behaviour: Behaviour, served: int, figures: dict[str, str | int | float]) -> dict[str, Any]:
    """The body of a /health answer; `served` counts queries, `figures` are the backend's."""
    return {"status": "ok", "queries": served, **msgspec.to_builtins(behaviour), **figures}


def decode_health(body: bytes) -> Behaviour | None:
    """None for an answer without the engine's behaviour."""
    try:
        return msgspec.json.decode(body, type=Behaviour)
    except (ValueError, RecursionError):
        return None


async def read_answer(response: aiohttp.ClientResponse) -> bytes:
    """The decompressed body. Raises: aiohttp.ClientPayloadError after `MAX_ANSWER_BYTES`; the rest is not read."""
    body = await read_at_most(response, MAX_ANSWER_BYTES)
    if body is None:
        response.close()
        raise aiohttp.ClientPayloadError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return body


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body; None when it is longer than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)
