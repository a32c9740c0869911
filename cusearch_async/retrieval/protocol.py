"""What retriever and client say to each other: Search-R1's protocol, two fields of ours in it, and `/health`.

    POST /retrieve {"queries": ["capital of Peru"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 11.2}, ...]]}

With "return_scores": false each inner list holds the documents alone. Two fields of ours may be added, each with one
entry per query: "seeds", integers which make simulated noise and latency reproducible; "contexts", {"question",
"answers", "step"} for a simulated engine.

    GET /health -> {"status": "ok", "deterministic": true, "accepts_seed": false, "serves": "bm25 over ...", ...}

What is served is in the header X-Retriever-Serves of every answer, too. Servers of others may lack all this.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from cusearch_async.retrieval.backend import Context, Scored

SERVES = "X-Retriever-Serves"
MAX_QUERIES = 4096
"""In one request. Search-R1's training sends those of all its trajectories at once, 512 x 5 = 2,560."""
MAX_TOPK = 100
MAX_DOCUMENTS = 100_000
"""Of one answer: queries x topk."""
MAX_ANSWER_BYTES = 8 << 20
"""Of an external service, decompressed. A page of results, or 600 tokens of a simulator, need about 1 % of it."""


@dataclass(frozen=True, slots=True)
class Request:
    texts: Sequence[str]
    topk: int
    return_scores: bool
    seeds: Sequence[int] | None
    """One per query; None leaves them to the retriever."""
    contexts: Sequence[Context | None]
    """One per query."""


class AnotherSchema(ValueError):
    """Documents came, but not in the form of this protocol."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a retriever says of the engine that serves; see `Backend` for the meaning."""

    deterministic: bool
    accepts_seed: bool
    serves: str | None = None
    """What it serves, in words with a checksum; None when it does not say."""


def encode_request(request: Request) -> dict[str, Any]:
    """The body of a request. Fields of ours are only in it where they say something: others may refuse them."""
    queries, seeds = list(request.texts), request.seeds
    body: dict[str, Any] = {"queries": queries, "topk": request.topk, "return_scores": request.return_scores}
    if seeds is not None:
        body["seeds"] = list(seeds)
    if any(request.contexts):
        body["contexts"] = [None if context is None else asdict(context) for context in request.contexts]
    return body


def decode_request(body: Any, default_topk: int) -> Request:
    """Raises: ValueError naming the field, the value and what would be right."""
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    queries = body.get("queries")
    if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
        raise ValueError("queries must be a list of strings")
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"queries must hold at most {MAX_QUERIES}, got {len(queries)}")
    topk = default_topk if body.get("topk") is None else body["topk"]
    if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be an integer in [1, {MAX_TOPK}], got {topk!r:.200}")
    if len(queries) * topk > MAX_DOCUMENTS:
        asked = f"{len(queries)} x {topk}"
        raise ValueError(f"queries x topk must be at most {MAX_DOCUMENTS}, got {asked}; ask in several requests")
    scores = body.get("return_scores", False)
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores must be true or false, got {scores!r:.200}")
    seeds = _one_per_query(body, "seeds", queries)
    if seeds is not None and not all(type(d) is int and d >= 0 for d in seeds):
        raise ValueError("seeds must hold one non-negative integer per query")
    contexts = _one_per_query(body, "contexts", queries) or [None] * len(queries)
    return Request(queries, topk, scores, seeds, [None if c is None else _decode_context(c) for c in contexts])


def encode_answer(found: Sequence[Sequence[Scored]], return_scores: bool) -> dict[str, Any]:
    """The body of an answer: for each query its documents, best first."""
    if return_scores:
        return {"result": [[{"document": passage, "score": score} for passage, score in rows] for rows in found]}
    return {"result": [[passage for passage, _ in rows] for rows in found]}


def decode_answer(body: Any) -> list[list[str]]:
    """For each query the contents of its documents, of an answer with scores.

    Raises: AnotherSchema for documents in another form; KeyError, TypeError or ValueError for anything else."""
    if other := _other_documents(body):
        raise AnotherSchema(other)
    if not _is_result(body):
        raise TypeError("result must be a list of lists")
    found = [[row["document"]["contents"] for row in rows] for rows in body["result"]]
    if not all(isinstance(contents, str) for rows in found for contents in rows):
        raise TypeError("document contents must be text")
    return found


def _other_documents(body: Any) -> str | None:
    """How documents differ from those of the protocol; None when none of them does, or the answer has none."""
    lists = body.get("result") if isinstance(body, dict) else body
    if lists is None and isinstance(body, dict):
        lists = next((value for value in body.values() if isinstance(value, list)), None)
    of_queries = [one if isinstance(one, list) else [one] for one in (lists if isinstance(lists, list) else [])]
    for row in (rows := list(itertools.chain.from_iterable(of_queries))):
        document = row.get("document", row) if isinstance(row, dict) else row
        if isinstance(document, str) and document:
            return "its documents are texts; objects with 'contents' are needed"
        if not isinstance(document, dict) or not document or "error" in document:
            continue  # no document at all
        if "contents" not in document:
            return f"its documents have {_fields(document)}; 'contents' is needed"
        if not isinstance(document["contents"], str):
            return f"'contents' of its documents is {type(document['contents']).__name__}; text is needed"
        if "document" not in row:
            return 'its documents come without scores; {"document": ..., "score": ...} is needed with return_scores'
    if rows and isinstance(rows[0], dict) and "document" in rows[0] and not _is_result(body):
        return f'its answer has {_fields(body)}; {{"result": [[...]]}} with a list per query is needed'
    return None


def _is_result(body: Any) -> bool:
    found = body.get("result") if isinstance(body, dict) else None
    return isinstance(found, list) and all(isinstance(rows, list) for rows in found)


def _fields(value: Any) -> str:
    """The names of an object's first fields; of a list, that it is one."""
    if not isinstance(value, dict):
        return "a list"
    return ", ".join(name[:40] if name.isprintable() else repr(name)[:40] for name in list(value)[:8])


def encode_health(behaviour: Behaviour, served: int, figures: dict[str, str | int | float]) -> dict[str, Any]:
    """The body of a /health answer; `served` counts queries, `figures` are the backend's."""
    said = {"deterministic": behaviour.deterministic, "accepts_seed": behaviour.accepts_seed}
    serves = {"serves": behaviour.serves} if behaviour.serves else {}
    return {"status": "ok", "queries": served, **said, **serves, **figures}


def decode_health(body: bytes) -> Behaviour | None:
    """None for an answer that does not say how the engine behaves."""
    try:
        said = json.loads(body)
        serves = said.get("serves")
        behaviour = Behaviour(said["deterministic"], said["accepts_seed"], serves if isinstance(serves, str) else None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_said = isinstance(behaviour.deterministic, bool) and isinstance(behaviour.accepts_seed, bool)
    return behaviour if is_said else None


def _decode_context(row: Any) -> Context:
    """Raises: ValueError naming the field and what would be right."""
    if not isinstance(row, dict):
        raise ValueError(f"contexts must hold objects, got {type(row).__name__}")
    question, answers, step = row.get("question"), row.get("answers"), row.get("step")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"contexts: question must be non-blank text, got {question!r:.200}")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"contexts: answers must be a list of texts, got {answers!r:.200}")
    if type(step) is not int or step < 0:
        raise ValueError(f"contexts: step must be a non-negative integer, got {step!r:.200}")
    return Context(question, tuple(answers), step)


def _one_per_query(body: dict[str, Any], field: str, queries: list[str]) -> list[Any] | None:
    values = body.get(field)
    if values is not None and (not isinstance(values, list) or len(values) != len(queries)):
        raise ValueError(f"{field} must be a list with one entry per query ({len(queries)})")
    return values


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
