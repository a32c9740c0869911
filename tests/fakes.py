"""Stand-ins for an episode's policy and search, for a tokenizer with a chat template, and for a panic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cusearch_async.config import EnvironmentConfig
from cusearch_async.environments import Environment, Search
from cusearch_async.types import Question

STARTER = Path(__file__).parent.parent / "cusearch_async" / "atlas" / "starter"
"""The shipped policy; its tokenizer is real and small."""


class Panic(BaseException):
    """As of a library in Rust (pyo3_runtime.PanicException)."""


@dataclass(frozen=True, slots=True)
class FakeTurn:
    token_ids: list[int]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a policy."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    stops: Sequence[str]


class ScriptedPolicy:
    """Says its turns one after another: texts, or token ids as they are.

    Token i of the whole episode has log-probability -(i + 1) / 8; turn n was sampled by version n, or by
    `versions[n]`, one number per token."""

    def __init__(
        self, tokenizer: Any, turns: Sequence[str | list[int]], versions: Sequence[list[int]] | None = None
    ) -> None:
        self._turns = [tokenizer(t, add_special_tokens=False)["input_ids"] if isinstance(t, str) else t for t in turns]
        self._versions = versions
        self._sampled = 0
        self.requests: list[Request] = []

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, seed: int | None, stops: Sequence[str]
    ) -> FakeTurn:
        number = len(self.requests)
        self.requests.append(Request(list(prompt), max_tokens, temperature, seed, stops))
        token_ids = self._turns[number]
        first, self._sampled = self._sampled, self._sampled + len(token_ids)
        logprobs = -(np.arange(first, self._sampled, dtype=np.float32) + 1) / 8
        versions = self._versions[number] if self._versions else [number] * len(token_ids)
        is_cut = len(token_ids) >= max_tokens
        return FakeTurn(
            list(token_ids)[:max_tokens], logprobs[:max_tokens], np.array(versions[:max_tokens], dtype=np.int32), is_cut
        )


@dataclass(slots=True)
class FakeSearch:
    """Finds the listed documents, or raises what is listed instead of them; anything else finds nothing."""

    found: dict[str, list[str] | Exception]
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def search(self, query: str, seed: int, question: Question, ticket: int) -> list[str]:
        self.asked.append((query, seed))
        documents = self.found.get(query, [])
        if isinstance(documents, Exception):
            raise documents
        return documents


def searching(search: Search, template: str = "atlas", document_template: str = "{text}\n") -> dict[str, Environment]:
    """The search environment by its default label."""
    settings = EnvironmentConfig(template=template, document_template=document_template)
    return {"search": settings.make(search)}


class ChatTokenizer:
    """Wraps a text in a chat template, and makes one token of every character."""

    chat_template = "a template"
    eos_token = None

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a")}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, **_: object
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"

    def __call__(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) for character in text]}
